"""What FlashAttention's kernels are called with, as recorded by doubles, and what layers leave undone."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cases import FlashCase, flash_backend
from flash_double import FlashDouble
from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionKind
from hardpoint_attention.flash import FlashOptions
from hardpoint_attention.flash.cache_write import CacheWriter, prefers_kernel, write_by_kernel, write_states
from hardpoint_attention.flash.calls import AttentionCall
from hardpoint_attention.flash.impl import FlashImpl, LayerKernels
from hardpoint_testing_torch import AttentionProblem, AttentionShape, FakeGraphBackend, dense_attention, make_problem

BF16 = torch.bfloat16
ROWS = [(17, 1), (5, 1), (12, 1), (0, 9), (3, 7)]
SHARED = [(40 + row, 1 + row % 2) for row in range(8)]


@pytest.fixture
def double() -> Iterator[FlashDouble]:
    with FlashDouble().installed() as installed:
        yield installed


def assert_right(problem: AttentionProblem, output: torch.Tensor) -> None:
    torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=2e-2, atol=2e-2)


def shape(**changes: Any) -> AttentionShape:
    return AttentionShape(**{"dtype": BF16, "block_size": 16, **changes})


def test_a_fused_output_scale_is_refused() -> None:
    """R5.40."""
    case = FlashCase.create(3)
    problem = case.problem(ROWS)
    with pytest.raises(TypeError, match="does not quantize its output"):
        case.layers[0].forward(
            problem.query, problem.key, problem.value, None, None, problem.empty_output(), torch.ones(1)
        )


def test_without_metadata_nothing_is_called(double: FlashDouble) -> None:
    """R5.40: zeros, and no look at the cache."""
    case = FlashCase.create(3)
    problem = case.problem(ROWS)
    output = problem.empty_output()
    case.layers[0].forward(problem.query, problem.key, problem.value, None, None, output)
    assert not output.any()
    assert double.calls == []


def test_the_plain_call_of_generation_3(double: FlashDouble) -> None:
    """R5.43: query offsets, used key lengths, block table; the very tensors of the step."""
    case = FlashCase.create(3)
    problem = case.problem(ROWS)
    common = problem.common()
    impl, cache = case.layers[0], problem.kv_cache()
    impl.write_kv(problem.key, problem.value, cache, common.slot_mapping)
    output = problem.empty_output()
    impl.forward(problem.query, problem.key, problem.value, cache, case.builder.build(common), output)
    call = double.last
    assert call.function == "flash_attn_with_kvcache"
    assert call["q"] is problem.query
    assert call["cu_seqlens_q"] is common.query_start_loc
    assert call["cache_seqlens"] is common.seq_lens
    assert call["page_table"] is common.block_table
    assert (call["max_seqlen_q"], call["causal"], call["window_size"]) == (9, True, (-1, -1))
    assert call["softmax_scale"] == pytest.approx(16**-0.5)
    # R5.41: strides of the cache itself.
    for name, offset in (("k_cache", 0), ("v_cache", 16)):
        assert call[name].data_ptr() == cache.data_ptr() + offset * cache.element_size()
        assert call[name].shape == (problem.num_blocks, 16, 2, 16)
        assert call[name].stride() == (1024, 32, 512, 1)
    assert_right(problem, output)


def test_the_plain_call_of_generation_2(double: FlashDouble) -> None:
    """R5.43: the same, with prefix sums of key lengths."""
    case = FlashCase.create(2)
    problem = case.problem(ROWS)
    assert_right(problem, case.run(problem))
    call = double.last
    assert call.function == "flash_attn_varlen_func.2"
    assert call["cu_seqlens_k"].tolist() == [0, 18, 24, 37, 46, 56]
    assert (call["max_seqlen_q"], call["max_seqlen_k"], call["dropout_p"]) == (9, 18, 0.0)


def test_the_plain_call_of_generation_4(double: FlashDouble) -> None:
    """R5.43: used lengths, and windows without a bound as None."""
    case = FlashCase.create(4)
    problem = case.problem(ROWS)
    assert_right(problem, case.run(problem))
    call = double.last
    assert call.function == "flash_attn_varlen_func.4"
    assert call["cu_seqlens_k"] is None
    assert call["seqused_k"].tolist() == [18, 6, 13, 9, 10]
    assert (call["window_size"], call["mask_mod"], call["aux_tensors"]) == ((None, None), None, None)


@pytest.mark.parametrize("generation", [3, 4])
def test_kernels_that_take_an_output_write_into_it(generation: int) -> None:
    """R5.38: without a copy."""
    with FlashDouble(with_out=True).installed() as double:
        case = FlashCase.create(generation)
        problem = case.problem(ROWS)
        output = case.run(problem)
        assert double.last["out"] is output
        assert_right(problem, output)


@pytest.mark.parametrize("heads", [1, 2])
def test_scales_are_expanded_and_never_copied(double: FlashDouble, heads: int) -> None:
    """R5.43: [R, K] of one or of K numbers, on their own memory."""
    case = FlashCase.create(3)
    scale = torch.full((heads,), 0.5)
    params = replace(case.problem([(1, 1)]).params("scaled"), key_scale=scale, value_scale=scale)
    problem = case.problem(ROWS)
    impl = case.backend.create_impl(params)
    assert isinstance(impl, FlashImpl)
    cache = torch.zeros(problem.num_blocks, 2, 16, 32, dtype=torch.float8_e4m3fn)
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    metadata = case.builder.build(problem.common(), fast=True)
    impl.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
    for name in ("k_descale", "v_descale"):
        descale = double.last[name]
        assert descale.shape == (5, 2)
        assert descale.data_ptr() == scale.data_ptr()
        assert descale.stride() == (0, 0 if heads == 1 else 1)
    assert double.last["q"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("generation", [3, 4])
def test_one_kv_head_of_odd_strides(double: FlashDouble, generation: int) -> None:
    """R5.42, P5.3: the double takes no stride that is no multiple of 16 bytes, not even one nobody follows."""
    case = FlashCase.create(generation, shape(num_kv_heads=1))
    problem = case.problem([(17, 1)])
    odd = problem.kv_cache()
    odd = odd.as_strided(odd.shape, (odd.stride(0), 3, odd.stride(2), 1))
    impl, output = case.layers[0], problem.empty_output()
    # R5.71: writing canonicalizes nothing.
    impl.write_kv(problem.key, problem.value, odd, problem.slot_mapping())
    query = problem.query.as_strided(problem.query.shape, (5, problem.query.stride(1), 1))
    impl.forward(query, problem.key, problem.value, odd, case.builder.build(problem.common()), output)
    assert_right(problem, output)


def test_the_layers_own_window_wins(double: FlashDouble) -> None:
    """R5.45, P5.10: one group and one metadata object, a windowed layer and a global one."""
    case = FlashCase.create(3, windows=[7, None])
    problem = case.problem(ROWS)
    for layer, expected in ((0, (6, 0)), (1, (-1, -1)), (0, (6, 0))):
        output = case.run(problem, layer)
        assert double.last["window_size"] == expected
        windowed = replace(problem, shape=replace(problem.shape, sliding_window=7 if layer == 0 else None))
        assert_right(windowed, output)


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize(("window", "expected"), [(6, (5, 5)), (None, (-1, -1))])
def test_encoders_see_both_sides_without_a_cache(
    double: FlashDouble, generation: int, window: int | None, expected: tuple[int, int]
) -> None:
    """R5.46, R5.44: the step's own keys, a window to both sides, no pages."""
    base = shape(kind=AttentionKind.ENCODER_ONLY, causal=False, sliding_window=window)
    case = FlashCase.create(generation, base, windows=[window])
    problem = make_problem(base, [(0, 9), (0, 1), (0, 23)])
    output = problem.empty_output()
    metadata = case.builder.build(problem.common())
    case.layers[0].forward(problem.query, problem.key, problem.value, None, metadata, output)
    assert_right(problem, output)
    call = double.last
    assert call["k"] is problem.key
    assert call["causal"] is False
    assert call["window_size"] == tuple(None if side < 0 and generation == 4 else side for side in expected)
    assert call["cu_seqlens_k"] is call["cu_seqlens_q"]


def test_windowed_encoders_with_heads_of_256_fall_back(double: FlashDouble, caplog: pytest.LogCaptureFixture) -> None:
    """R5.61: to generation 2, with a warning; without it such a layer is refused."""
    base = shape(kind=AttentionKind.ENCODER_ONLY, causal=False, head_size=256, block_size=128, sliding_window=3)
    with caplog.at_level(logging.WARNING, "hardpoint.attention.flash"):
        case = FlashCase.create(4, base, windows=[3], others=[2])
    assert "runs on FlashAttention 2" in caplog.text
    problem = make_problem(base, [(0, 9)])
    output = problem.empty_output()
    metadata = case.builder.build(problem.common())
    case.layers[0].forward(problem.query, problem.key, problem.value, None, metadata, output)
    assert double.last.function == "flash_attn_varlen_func.2"
    assert_right(problem, output)
    with pytest.raises(ValueError, match="install flash-attn"):
        FlashCase.create(4, base, windows=[3])


RANGES: Sequence[Sequence[tuple[int, int]]] = [[(2, 6)], [], [(0, 3), (5, 12)], [(1, 4), (6, 9)], [(2, 8)]]


def with_ranges(base: AttentionShape) -> AttentionProblem:
    """The rows of ``ROWS``; the last is the second chunk of a prompt, in the middle of a range."""
    return replace(make_problem(base, ROWS), mm_ranges=tuple(tuple(row) for row in RANGES))


@pytest.mark.parametrize("window", [None, 3])
def test_ranges_switch_the_built_in_options_off(double: FlashDouble, window: int | None) -> None:
    """R5.50, P5.4, R5.52, P5.6: also in later chunks, where the kernel counts queries from the chunk's first."""
    base = shape(sliding_window=window, uses_mm_prefix=True)
    case = FlashCase.create(4, base, windows=[window])
    problem = with_ranges(base)
    assert_right(problem, case.run(problem))
    call = double.last
    assert (call["causal"], call["window_size"]) == (False, (None, None))
    assert call["mask_mod"] is not None
    assert call["aux_tensors"][0].shape == (2, 2048)


def test_leaving_the_built_in_options_on_would_show(double: FlashDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5.4: the double cuts a mask short, as the kernel does."""

    def install_only(self: FlashImpl, call: AttentionCall, metadata: Any) -> None:
        causal, window = call.causal, call.window
        original(self, call, metadata)
        call.causal, call.window = causal, window

    original = FlashImpl._install_mask
    monkeypatch.setattr(FlashImpl, "_install_mask", install_only)
    base = shape(uses_mm_prefix=True)
    problem = with_ranges(base)
    with pytest.raises(AssertionError):
        assert_right(problem, FlashCase.create(4, base).run(problem))


def test_masks_are_installed_where_there_are_ranges_only(double: FlashDouble) -> None:
    """R5.51."""
    base = shape(uses_mm_prefix=True)
    case = FlashCase.create(4, base)
    plain = replace(make_problem(base, ROWS), mm_ranges=((),) * 5)
    assert_right(plain, case.run(plain))
    assert double.last["mask_mod"] is None
    assert double.last["causal"] is True


def test_ranges_need_generation_4(double: FlashDouble) -> None:
    """R5.51: which also serves them beside another one."""
    base = shape(uses_mm_prefix=True)
    problem = with_ranges(base)
    case = FlashCase.create(3, base)
    with pytest.raises(RuntimeError, match="declare uses_mm_prefix"):
        case.run(problem)
    both = FlashCase.create(3, base, others=[4])
    assert_right(problem, both.run(problem))
    assert double.last.function == "flash_attn_varlen_func.4"
    plain = both.problem(ROWS)
    assert_right(replace(plain, mm_ranges=None), both.run(replace(plain, mm_ranges=None)))
    assert double.last.function == "flash_attn_with_kvcache"


def test_a_hundred_steps_compile_one_mask(double: FlashDouble) -> None:
    """R5.53, P5.5: the function object that is part of the kernel's key never changes."""
    base = shape(uses_mm_prefix=True)
    case = FlashCase.create(4, base)
    problem = with_ranges(base)
    for _ in range(5):
        case.run(problem)
    assert len({id(call["mask_mod"]) for call in double.kernel_calls()}) == 1


def test_kept_prompts_need_their_lengths(double: FlashDouble) -> None:
    """R5.55."""
    base = shape(sliding_window=4, keeps_prompt=True)
    case = FlashCase.create(4, base, windows=[4])
    problem = case.problem(ROWS)
    assert_right(problem, case.run(problem))
    assert double.last["aux_tensors"][0].shape == (5,)
    with pytest.raises(RuntimeError, match="fill prompt_lens"):
        case.run(problem, prompt_lens=None)


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_a_shared_prefix_gives_the_same_answers(double: FlashDouble, generation: int) -> None:
    """R5.83, I5.2: two calls, merged by their log-sum-exps."""
    base = shape(block_size=256 if generation == 2 else 16, uses_sinks=generation > 2)
    case = FlashCase.create(generation, base, options=FlashOptions(cascade="always"))
    size = base.block_size
    rows = [(2 * size + context % 8, query) for context, query in SHARED]
    problem = make_problem(base, rows)
    keys, values = (states[:size] for states in problem.history[0])
    history = tuple((torch.cat((keys, k[size:])), torch.cat((values, v[size:]))) for k, v in problem.history)
    table = problem.block_table.clone()
    table[:, 0] = table[0, 0]
    problem = replace(problem, history=history, block_table=table)
    case.layers = [case.backend.create_impl(problem.params())]  # type: ignore[list-item]
    output = case.run(problem, num_common_prefix_blocks=1)
    assert_right(problem, output)
    prefix, suffix = double.kernel_calls()
    assert (prefix["causal"], suffix["causal"]) == (False, True)
    if generation == 4:
        assert prefix["learnable_sink"] is not None
        assert suffix["learnable_sink"] is None


def test_layers_with_windows_of_their_own_take_no_part_in_a_cascade(double: FlashDouble) -> None:
    """R5.45, R5.80: a layer that came after the first build."""
    case = FlashCase.create(4, options=FlashOptions(cascade="always"))
    problem = case.problem(SHARED)
    metadata = case.builder.build(replace(problem.common(), num_common_prefix_blocks=1))
    assert metadata.cascade is not None
    impl = case.backend.create_impl(replace(problem.params("late"), sliding_window=5))
    cache, output = problem.kv_cache(), problem.empty_output()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
    (call,) = double.kernel_calls()
    assert call["window_size"] == (4, 0)


class CountedOperators(TorchDispatchMode):
    """How many operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class SilentKernel:
    """A kernel that computes nothing, so that what is left is the layer's own."""

    needs_cu_key_lens = False
    needs_canonical_strides = True

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.calls: list[AttentionCall] = []

    def lacks(self, *, masks: bool, scales: bool) -> str | None:
        return None

    def __call__(self, call: AttentionCall) -> torch.Tensor | None:
        self.calls.append(call)
        return None


BUDGET: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "window": ({"sliding_window": 9}, 0),
    "softcap": ({"logits_soft_cap": 9.0}, 0),
    "sinks": ({"sinks": torch.zeros(6)}, 0),
    "chunks": ({"chunk_size": 32}, 0),
    "scales": ({"key_scale": torch.ones(1), "value_scale": torch.ones(1)}, 2),
}
"""Operators a layer may run around its kernel, from the second step on (P5.7)."""


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("feature", BUDGET)
def test_operators_around_the_kernel(double: FlashDouble, generation: int, feature: str) -> None:
    """P5.7: forward runs eagerly between captured pieces, where every view costs host time."""
    changes, budget = BUDGET[feature]
    case = FlashCase.create(4)
    kernel = SilentKernel(generation)
    params = replace(case.problem([(1, 1)]).params(), **changes)
    impl = FlashImpl(params, LayerKernels(lambda number: kernel, generation, None, generation))
    problem = case.problem(ROWS)
    cache, output, metadata = problem.kv_cache(), problem.empty_output(), case.builder.build(problem.common())
    impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
    with CountedOperators() as counted:
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
    assert len(counted.names) <= budget, counted.names
    assert kernel.calls[0].key is kernel.calls[1].key


@pytest.mark.slow
@pytest.mark.parametrize("feature", BUDGET)
def test_forward_takes_no_memory_of_its_own(double: FlashDouble, feature: str) -> None:
    """R5.38, P5.9: in a capture that forbids it."""
    changes, _ = BUDGET[feature]
    case = FlashCase.create(4)
    kernel = SilentKernel(4)
    params = replace(case.problem([(1, 1)]).params(), **changes)
    impl = FlashImpl(params, LayerKernels(lambda number: kernel, 4, None, 4))
    problem = case.problem(ROWS)
    cache, output, metadata = problem.kv_cache(), problem.empty_output(), case.builder.build(problem.common())
    arguments = problem.query, problem.key, problem.value, cache, metadata, output
    FakeGraphBackend(forbid_allocation=True).capture(lambda: impl.forward(*arguments), [problem.query], None)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [BF16, torch.float8_e4m3fn])
def test_writing_can_be_captured(stored: torch.dtype) -> None:
    """R5.70 to R5.72, R5.36: padding is skipped without the host learning which tokens that is."""
    problem = make_problem(shape(), ROWS)
    cache = torch.zeros(problem.num_blocks, 2, 16, 32, dtype=stored)
    slots = torch.full((problem.num_tokens - 2,), -1)
    graph = FakeGraphBackend().capture(lambda: write_states(problem.key, problem.value, cache, slots), [slots], None)
    slots.copy_(problem.slot_mapping()[:-2])
    slots[3] = -1
    graph.replay()
    real = slots[slots >= 0]
    written = torch.zeros(problem.num_blocks * 16, dtype=torch.bool)
    written[real] = True
    by_slot = cache.transpose(1, 2).flatten(0, 1).float()
    kept = torch.cat((problem.key, problem.value), dim=-1)[:-2][slots >= 0]
    assert torch.equal(by_slot[real], kept.to(stored).float())
    assert not by_slot[~written].any()


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn])
def test_kernel_and_operators_write_the_same(stored: torch.dtype) -> None:
    """R5.70 to R5.72: in Triton's interpreter, padding and scales included."""
    problem = make_problem(shape(dtype=torch.float16), ROWS).padded(2)
    params = replace(problem.params(), key_scale=torch.tensor([0.5, 2.0]), value_scale=torch.tensor([0.25]))
    caches = [torch.zeros(problem.num_blocks, 2, 16, 32).to(stored) for _ in range(2)]
    slots = problem.slot_mapping()[:-1]
    for cache, by_kernel in zip(caches, (False, True), strict=True):
        writer = CacheWriter(params, lambda device, by_kernel=by_kernel: by_kernel)  # type: ignore[misc]
        writer.write(problem.key, problem.value, cache, slots)
    assert torch.equal(caches[0].float(), caches[1].float())
    assert caches[0].float().any()


def test_where_a_kernel_writes() -> None:
    """P5.7: on devices, where every operator is a launch; not on the CPU, whatever is installed."""
    assert not prefers_kernel(torch.device("cpu"))
    assert prefers_kernel(torch.device("cuda:1"))
    assert callable(write_by_kernel)


def test_packages_too_old_for_a_layer_are_told_at_the_start(
    double: FlashDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5.5: not in the first forward."""

    def older(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Without masks and scales."""

    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", older)
    made = flash_backend(4)
    plain = make_problem(shape(), [(1, 1)]).params()
    made.create_impl(plain)
    with pytest.raises(ConfigError, match="takes no aux_tensors, mask_mod; install a newer one"):
        made.create_impl(replace(plain, chunk_size=8))
    with pytest.raises(ConfigError, match="takes no k_descale, v_descale"):
        made.create_impl(replace(plain, key_scale=torch.ones(1)))


def test_the_log_sum_exp_of_nothing_is_minus_infinity(double: FlashDouble) -> None:
    """R5.83: kernels say plus infinity where a query saw no key."""
    case = FlashCase.create(4, shape(kind=AttentionKind.ENCODER_DECODER, causal=False))
    problem = make_problem(shape(), [(0, 2)])
    impl, cache = case.layers[0], problem.kv_cache()
    common = replace(problem.common(), causal=False, seq_lens=torch.zeros(1, dtype=torch.int32))
    _, lse = impl.forward_with_lse(problem.query, cache, case.builder.build(common), problem.empty_output())
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_layers_that_come_too_late_are_told(double: FlashDouble) -> None:
    """R5.32: a biased layer runs on generation 2, which wants sums that a group of generation 3 does not make."""
    case = FlashCase.create(3, shape(block_size=256), others=[2])
    problem = case.problem(ROWS)
    metadata = case.builder.build(problem.common())
    late = case.backend.create_impl(replace(problem.params("late"), alibi_slopes=(0.5,) * 6))
    cache = problem.kv_cache()
    with pytest.raises(RuntimeError, match="Create layers before"):
        late.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
    assert double.kernel_calls() == []


def test_layers_nobody_serves_are_named() -> None:
    """R5.5: told at the start, should selection have been passed by."""
    params = replace(make_problem(shape(), [(1, 1)]).params("model.3"), alibi_slopes=(0.5,) * 6)
    with pytest.raises(ValueError, match=r"'model\.3'.*takes no ALiBi slopes"):
        flash_backend(3).create_impl(params)
