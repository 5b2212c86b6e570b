"""The reference backend against the float64 answer over every kind of mask, score and cache, in any mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.attention import AttentionKind
from hardpoint_attention.reference import ReferenceBackend, ReferenceImpl
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem, run_backend

BACKEND = ReferenceBackend()
CPU = torch.device("cpu")
MIXED = [(17, 1), (5, 1), (0, 9), (12, 1), (3, 7), (30, 1), (21, 20), (0, 40)]

rows = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 5, 17, 30])), min_size=1, max_size=6)


@st.composite
def shapes(draw: st.DrawFn) -> AttentionShape:
    keeps_prompt = draw(st.booleans())
    is_latent = draw(st.integers(0, 3)) == 0
    kv_heads = 1 if is_latent else draw(st.integers(1, 3))
    stored = [
        None,
        None,
        "bfloat16",
        "fp8",
        "fp8_e5m2",
        "float8_e4m3fn",
        *([] if is_latent else ["int8_per_token_head"]),
    ]
    return AttentionShape(
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_size=8,
        latent_values=5 if is_latent else None,
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        sliding_window=draw(st.sampled_from([1, 5, 100] if keeps_prompt else [None, None, 1, 5, 100])),
        keeps_prompt=keeps_prompt,
        chunk_size=None if keeps_prompt else draw(st.sampled_from([None, None, 1, 7, 16])),
        logits_soft_cap=draw(st.sampled_from([None, None, 3.0])),
        uses_alibi=draw(st.booleans()),
        uses_sinks=draw(st.booleans()),
        uses_mm_prefix=draw(st.booleans()),
        uses_row_causality=draw(st.booleans()),
        kv_cache_dtype=draw(st.sampled_from(stored if is_latent else [*stored, "int8_per_token_head"])),
        per_head_scales=draw(st.booleans()),
    )


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 3e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def with_lse(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    cache, impl = problem.kv_cache(), BACKEND.create_impl(problem.params())
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    builder = BACKEND.create_builder(problem.spec(), [], 8, 256, CPU)
    output, lse = impl.forward_with_lse(problem.query, cache, builder.build(problem.common()), problem.empty_output())
    return output[: problem.num_tokens], lse[: problem.num_tokens]


mixtures = given(shape=shapes(), batch=rows, seed=st.integers(0, 1000), padding=st.integers(0, 3))


@settings(max_examples=8, deadline=None)
@mixtures
def test_any_mixture_equals_the_dense_answer(
    shape: AttentionShape, batch: list[tuple[int, int]], seed: int, padding: int
) -> None:
    """R5.23, R5.45, R5.47, R5.50, R5.52, R5.55, I5.1, I5.3: what is accepted is computed, with and without the
    log-sum-exp, under padding of tokens and rows."""
    check_mixture(shape, batch, seed, padding)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@mixtures
def test_many_mixtures_equal_the_dense_answer(
    shape: AttentionShape, batch: list[tuple[int, int]], seed: int, padding: int
) -> None:
    """R5.47, I5.3: the same, longer."""
    check_mixture(shape, batch, seed, padding)


def check_mixture(shape: AttentionShape, batch: list[tuple[int, int]], seed: int, padding: int) -> None:
    assert BACKEND.objection(shape.need()) is None
    problem = make_problem(shape, batch, seed).padded(padding, padding)
    expected, expected_lse = dense_attention(problem)
    assert_equal(run_backend(BACKEND, problem), expected)
    output, lse = with_lse(problem)
    assert_equal(output, expected)
    assert_equal(lse, expected_lse)


@settings(max_examples=8, deadline=None)
@given(shape=shapes(), length=st.integers(2, 50), seed=st.integers(0, 1000), data=st.data())
def test_any_chunking_equals_one_prefill(shape: AttentionShape, length: int, seed: int, data: st.DataObject) -> None:
    """I5.2, R5.52: the same prompt in any split, if causal; what is bidirectional needs keys that come later."""
    shape = replace(shape, uses_mm_prefix=False, uses_row_causality=False)
    whole = replace(make_problem(shape, [(0, length)], seed))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    outputs = []
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        part = replace(
            whole,
            rows=((begin, end - begin),),
            query=whole.query[begin:end],
            key=whole.key[begin:end],
            value=whole.value[begin:end],
            history=((whole.key[:begin], whole.value[:begin]),),
        )
        outputs.append(run_backend(BACKEND, part))
    assert_equal(torch.cat(outputs), run_backend(BACKEND, whole))


cross_shapes = st.builds(
    lambda kv, group, block, stored, sinks, cap: AttentionShape(
        kind=AttentionKind.ENCODER_DECODER,
        num_heads=kv * group,
        num_kv_heads=kv,
        block_size=block,
        kv_cache_dtype=stored,
        uses_sinks=sinks,
        logits_soft_cap=cap,
    ),
    kv=st.integers(1, 2),
    group=st.integers(1, 3),
    block=st.sampled_from([1, 4, 16]),
    stored=st.sampled_from([None, "fp8", "int8_per_token_head"]),
    sinks=st.booleans(),
    cap=st.sampled_from([None, 4.0]),
)
encoder_rows = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 20]), st.integers(0, 20), st.integers(0, 20)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None)
@given(shape=cross_shapes, batch=encoder_rows, seed=st.integers(0, 1000))
def test_cross_attention_sees_all_of_the_other_sequence(
    shape: AttentionShape, batch: list[tuple[int, int, int, int]], seed: int
) -> None:
    """R5.14: encoder tokens from before, of this step or of both, or none at all: then zeros and no log-sum-exp but a
    sink's."""
    decoder = [(context, query) for context, query, _, _ in batch]
    problem = make_problem(shape, decoder, seed, encoder_rows=[(before, new) for _, _, before, new in batch])
    expected, expected_lse = dense_attention(problem)
    assert_equal(run_backend(BACKEND, problem), expected)
    output, lse = with_lse(problem)
    assert_equal(output, expected)
    assert_equal(lse, expected_lse)


def test_cross_attention_without_a_cache_reads_the_steps_keys() -> None:
    """R5.46: rows have as many of these as ``seq_lens`` says, one after another."""
    shape = AttentionShape(kind=AttentionKind.ENCODER_DECODER)
    problem = make_problem(shape, [(0, 3), (0, 1), (0, 20)], encoder_rows=[(0, 5), (0, 0), (0, 7)])
    metadata = BACKEND.create_builder(problem.spec(), [], 8, 64, CPU).build(problem.common())
    output = BACKEND.create_impl(problem.params()).forward(
        problem.query, problem.key, problem.value, None, metadata, problem.empty_output()
    )
    assert_equal(output, dense_attention(problem)[0])
    assert not output[3].any()


@pytest.mark.parametrize("kind", [AttentionKind.ENCODER, AttentionKind.ENCODER_ONLY])
@pytest.mark.parametrize("uses_row_causality", [False, True])
def test_encoders_may_mix_causal_rows_with_others(kind: AttentionKind, uses_row_causality: bool) -> None:
    """R5.23, R5.46."""
    shape = AttentionShape(kind=kind, causal=False, uses_row_causality=uses_row_causality)
    problem = make_problem(shape, [(0, 9), (0, 9), (0, 1), (0, 23), (0, 40)])
    assert_equal(run_backend(BACKEND, problem), dense_attention(problem)[0])


@pytest.mark.parametrize("features", [{"uses_mm_prefix": True}, {"sliding_window": 3, "keeps_prompt": True}], ids=str)
def test_blocks_that_nobody_sees_may_be_gone(features: dict[str, Any]) -> None:
    """R5.55: between prompt and window, and before a window, blocks may be another owner's by now: NaN perhaps."""
    problem = make_problem(AttentionShape(**{"sliding_window": 3, **features}), [(40, 1), (37, 5), (33, 20)])
    problem = replace(problem, prompt_lens=None if problem.prompt_lens is None else (6, 1, 9))
    expected = dense_attention(problem)[0]
    cache = problem.kv_cache()
    table = problem.block_table.clone()
    table[:, 4:7] = 0
    assert_equal(run_backend(BACKEND, replace(problem, block_table=table), cache), expected)


def test_keeping_a_prompt_takes_its_length() -> None:
    problem = make_problem(AttentionShape(sliding_window=3, keeps_prompt=True), [(9, 1)])
    with pytest.raises(ValueError, match="prompt_lens"):
        run_backend(BACKEND, replace(problem, prompt_lens=None))


def test_what_only_the_device_knows_is_fetched() -> None:
    """Where the host has no copy, this backend waits for the device."""
    several: list[dict[str, Any]] = [{"uses_row_causality": True}, {"sliding_window": 3, "keeps_prompt": True}]
    for features in several:
        problem = make_problem(AttentionShape(**features), MIXED)
        common = problem.common()
        common.row_causal_cpu = common.prompt_lens_cpu = None
        metadata = BACKEND.create_builder(problem.spec(), [], 8, 256, CPU).build(common)
        impl, cache = BACKEND.create_impl(problem.params()), problem.kv_cache()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        output = problem.empty_output()
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        assert_equal(output, dense_attention(problem)[0])


def test_scales_may_come_after_the_layer() -> None:
    """R5.43: read at every call, one or one per head."""
    problem = make_problem(AttentionShape(kv_cache_dtype="fp8", per_head_scales=True), MIXED)
    assert problem.key_scale is not None
    assert problem.value_scale is not None
    scales = (torch.ones_like(problem.key_scale), torch.ones_like(problem.value_scale))
    impl = BACKEND.create_impl(replace(problem, key_scale=scales[0], value_scale=scales[1]).params())
    scales[0].copy_(problem.key_scale)
    scales[1].copy_(problem.value_scale)
    cache = problem.kv_cache()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    metadata = BACKEND.create_builder(problem.spec(), [], 8, 256, CPU).build(problem.common())
    output = impl.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
    assert_equal(output, dense_attention(problem)[0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    """Saturation on write: neither NaN nor infinity, and NaN stays NaN."""
    problem = make_problem(AttentionShape(num_kv_heads=1, head_size=4), [(0, 3)])
    largest = torch.finfo(dtype).max
    key = torch.tensor([[1e9, -1e9, 0.5, torch.nan]]).expand(3, 1, 4).contiguous()
    cache = torch.zeros(problem.num_blocks, 1, 4, 8).to(dtype)
    BACKEND.create_impl(problem.params()).write_kv(key, problem.value, cache, problem.slot_mapping())
    stored = cache.float().transpose(1, 2).flatten(0, 1)[problem.slot_mapping(), 0, :4]
    assert stored[:, :3].tolist() == [[largest, -largest, 0.5]] * 3
    assert stored[:, 3].isnan().all()


def test_int8_scales_lie_behind_the_content() -> None:
    """Keys and values of zero have scale zero and stay zero; others use all of int8."""
    problem = make_problem(AttentionShape(num_kv_heads=2, head_size=4), [(0, 2)])
    key, value = problem.key.clone(), problem.value.clone()
    key[0, 0] = 0
    cache = torch.full((problem.num_blocks, 2, 4, 16), 77, dtype=torch.int8)
    BACKEND.create_impl(problem.params()).write_kv(key, value, cache, problem.slot_mapping())
    stored = cache.transpose(1, 2).flatten(0, 1)[problem.slot_mapping()]
    scales = stored[..., 8:].contiguous().view(torch.float32)
    assert scales[0, 0, 0] == 0
    assert stored[0, 0, :4].tolist() == [0, 0, 0, 0]
    assert stored[1, :, :4].abs().amax(-1).tolist() == [127, 127]
    assert_equal(stored[..., 4:8].float() * scales[..., 1:], value, 2e-2)


def test_latents_may_be_int8_too() -> None:
    """One scale per latent: its values are part of its key."""
    problem = make_problem(AttentionShape(num_kv_heads=1, latent_values=10), MIXED)
    cache = torch.zeros(problem.num_blocks, 1, 4, 16 + 8, dtype=torch.int8)
    impl = BACKEND.create_impl(problem.params())
    for row, (keys, values) in enumerate(problem.history):
        impl.write_kv(keys, values, cache, problem.slots(row, 0, len(keys)))
    torch.testing.assert_close(
        run_backend(BACKEND, problem, cache).double(), dense_attention(problem)[0], rtol=5e-2, atol=5e-2
    )


def test_a_cache_of_unknown_elements_is_refused() -> None:
    """P5.2: not silent garbage."""
    problem = make_problem(AttentionShape(), [(9, 1)])
    with pytest.raises(TypeError, match="torch.int32"):
        run_backend(BACKEND, problem, torch.zeros(problem.num_blocks, 2, 4, 32, dtype=torch.int32))


def test_rows_without_ranges_stay_on_the_plain_path() -> None:
    """R5.50, P5.4: masks are spelled out only for rows that need one, and there causality is not also built in."""
    problem = make_problem(AttentionShape(uses_mm_prefix=True), [(0, 20), (0, 24), (0, 28)])
    problem = replace(problem, mm_ranges=((), ((2, 9),), ()))
    metadata = BACKEND.create_builder(problem.spec(), [], 8, 256, CPU).build(problem.common())
    impl = BACKEND.create_impl(problem.params())
    assert isinstance(impl, ReferenceImpl)
    impl.forward(problem.query, problem.key, problem.value, problem.kv_cache(), metadata, problem.empty_output())
    (plan,) = metadata._plans.values()
    assert sorted((group.num_queries, group.is_causal, group.mask is not None) for group in plan) == [
        (20, True, False),
        (24, False, True),
        (28, True, False),
    ]
    assert np.array([group.pages is None for group in plan]).all()
