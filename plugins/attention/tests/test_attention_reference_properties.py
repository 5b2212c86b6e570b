"""The reference backend against the dense answer over random batches, shapes and memory layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.attention import CommonAttentionMetadata
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_testing_torch import AttentionShape, dense_attention, make_problem, run_backend

BACKEND = ReferenceBackend()

rows = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 3, 16, 17, 30])), min_size=1, max_size=7)
shapes = st.builds(
    lambda kv, group, block, window, cap: AttentionShape(
        num_heads=kv * group, num_kv_heads=kv, head_size=8, block_size=block, sliding_window=window, logits_soft_cap=cap
    ),
    kv=st.integers(1, 3),
    group=st.integers(1, 4),
    block=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([None, None, 1, 5, 100]),
    cap=st.sampled_from([None, None, 3.0]),
)

latent_shapes = st.builds(
    lambda heads, size, rotated, block, window: AttentionShape(
        num_heads=heads,
        num_kv_heads=1,
        head_size=size + rotated,
        latent_values=size,
        block_size=block,
        sliding_window=window,
    ),
    heads=st.integers(1, 5),
    size=st.integers(1, 20),
    rotated=st.sampled_from([0, 2, 6]),
    block=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([None, None, 5]),
)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-5, atol=2e-5)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, batch=rows, seed=st.integers(0, 1000))
def test_any_batch_equals_the_dense_answer(shape: AttentionShape, batch: list[tuple[int, int]], seed: int) -> None:
    """R5.47, with windows and soft cap."""
    problem = make_problem(shape, batch, seed)
    assert_equal(run_backend(BACKEND, problem), dense_attention(problem)[0])


@settings(max_examples=20, deadline=None)
@given(shape=latent_shapes, batch=rows, seed=st.integers(0, 1000), padding=st.integers(0, 3))
def test_any_batch_of_latents_equals_the_dense_answer(
    shape: AttentionShape, batch: list[tuple[int, int]], seed: int, padding: int
) -> None:
    """R5.47 for keys that hold the values (MLA), over block tables in random order and any sizes."""
    problem = make_problem(shape, batch, seed)
    assert_equal(run_backend(BACKEND, problem.permuted(seed).padded(padding)), dense_attention(problem)[0])


@settings(max_examples=15, deadline=None)
@given(shape=st.one_of(shapes, latent_shapes), batch=rows, seed=st.integers(0, 1000), padding=st.integers(0, 9))
def test_blocks_and_padding_do_not_matter(
    shape: AttentionShape, batch: list[tuple[int, int]], seed: int, padding: int
) -> None:
    """I5.1: block ids and padding."""
    problem = make_problem(shape, batch, seed)
    assert_equal(run_backend(BACKEND, problem.permuted(seed).padded(padding)), run_backend(BACKEND, problem))


@settings(max_examples=30, deadline=None)
@given(shape=shapes, batch=rows, seed=st.integers(0, 1000), data=st.data())
def test_the_order_of_rows_does_not_matter(
    shape: AttentionShape, batch: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    """I5.1: batch order, per row."""
    problem = make_problem(shape, batch, seed)
    order = data.draw(st.permutations(range(len(batch))))
    begins = np.concatenate(([0], np.cumsum([query for _, query in batch])))
    tokens = torch.cat([torch.arange(begins[row], begins[row + 1]) for row in order])
    shuffled = replace(
        problem,
        rows=tuple(problem.rows[row] for row in order),
        query=problem.query[tokens],
        key=problem.key[tokens],
        value=problem.value[tokens],
        history=tuple(problem.history[row] for row in order),
        block_table=problem.block_table[torch.tensor(order)],
    )
    assert_equal(run_backend(BACKEND, shuffled), run_backend(BACKEND, problem)[tokens])


@settings(max_examples=15, deadline=None)
@given(shape=st.one_of(shapes, latent_shapes), length=st.integers(2, 60), seed=st.integers(0, 1000), data=st.data())
def test_any_chunking_equals_one_prefill(shape: AttentionShape, length: int, seed: int, data: st.DataObject) -> None:
    """I5.2: the same prompt in any split."""
    whole = make_problem(shape, [(0, length)], seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
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


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_may_interleave_in_memory(kv_heads: int, layers: int) -> None:
    """R1.40, R5.41: a layer's blocks need not be adjacent, only its pages whole."""
    problem = make_problem(AttentionShape(num_heads=2, num_kv_heads=kv_heads), [(9, 1), (0, 20), (5, 3)])
    plain = problem.kv_cache()
    shared = torch.full((plain.shape[0], layers, *plain.shape[1:]), torch.nan)
    shared[:, layers - 1] = plain
    output = run_backend(BACKEND, problem, shared[:, layers - 1])
    assert_equal(output, dense_attention(problem)[0])


@pytest.mark.parametrize("stored", [None, "fp8", "int8_per_token_head"])
def test_heads_may_interleave_in_memory(stored: str | None) -> None:
    """R5.41, P5.2: pages that are not contiguous are read by their strides, and written by them."""
    problem = make_problem(AttentionShape(kv_cache_dtype=stored), [(9, 1), (0, 20), (5, 3)])
    cache = problem.kv_cache().transpose(1, 2).contiguous().transpose(1, 2)
    assert_equal(run_backend(BACKEND, problem, cache), dense_attention(problem)[0])


def test_the_layers_window_wins_over_the_groups() -> None:
    """R5.45, P5.10: one builder and one metadata object serve a windowed and a global layer."""
    windowed = make_problem(AttentionShape(sliding_window=5), [(30, 1), (0, 25), (12, 4)])
    plain = replace(windowed, shape=replace(windowed.shape, sliding_window=None))
    metadata = BACKEND.create_builder(windowed.spec(), ["a", "b"], 4, 64, torch.device("cpu")).build(windowed.common())
    for problem in (windowed, plain, windowed):
        impl, cache = BACKEND.create_impl(problem.params()), problem.kv_cache()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        output = impl.forward(
            problem.query, problem.key, problem.value, cache, metadata, torch.empty_like(problem.query)
        )
        assert_equal(output, dense_attention(problem)[0])


def test_the_cache_may_be_narrower_than_the_computation() -> None:
    problem = make_problem(AttentionShape(), [(9, 1), (3, 20), (0, 30)])
    output = run_backend(BACKEND, problem, problem.kv_cache().bfloat16())
    torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=3e-2, atol=3e-2)
    latent = make_problem(AttentionShape(num_kv_heads=1, latent_values=10), [(9, 1), (3, 20), (0, 30)])
    output = run_backend(BACKEND, latent, latent.kv_cache().bfloat16())
    torch.testing.assert_close(output.double(), dense_attention(latent)[0], rtol=3e-2, atol=3e-2)


def test_lengths_come_from_the_device_when_the_host_has_bounds_only() -> None:
    problem = make_problem(AttentionShape(), [(9, 1), (3, 2)])
    common = problem.common()
    common.seq_lens_cpu = common.seq_lens_cpu + 2
    common.seq_lens_is_exact = False
    metadata = BACKEND.create_builder(problem.spec(), [], 4, 64, torch.device("cpu")).build(common)
    impl, cache = BACKEND.create_impl(problem.params()), problem.kv_cache()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    output = impl.forward(problem.query, problem.key, problem.value, cache, metadata, torch.empty_like(problem.query))
    assert_equal(output, dense_attention(problem)[0])


class Untouchable(torch.Tensor):
    """A device tensor that nobody may read."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError(f"build called {func}")


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(),
        AttentionShape(uses_row_causality=True, uses_mm_prefix=True),
        AttentionShape(sliding_window=3, keeps_prompt=True),
    ],
    ids=["plain", "ranges", "prompts"],
)
def test_building_reads_the_host_side_only(shape: AttentionShape) -> None:
    """R5.36: whatever the step says of its rows is on the host too."""
    problem = make_problem(shape, [(9, 1), (0, 20)])
    common = problem.common()
    common.num_common_prefix_blocks = 2
    common.dcp_local_seq_lens_cpu = np.array([5, 0], dtype=np.int32)
    common.dcp_local_seq_lens = torch.from_numpy(common.dcp_local_seq_lens_cpu)
    values = {name: getattr(common, name) for name in common.__slots__}
    hidden: dict[str, Any] = {
        name: value.as_subclass(Untouchable) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
    BACKEND.create_builder(problem.spec(), [], 4, 64, torch.device("cpu")).build(CommonAttentionMetadata(**hidden))
