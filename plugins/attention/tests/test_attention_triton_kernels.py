"""Triton's kernels of attention, by interpreter, against the float64 oracle: shapes, layouts, parts and cascades."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint_attention.triton import TritonBackend, TritonOptions
from hardpoint_attention.triton.configs import TileConfig
from hardpoint_attention.triton.planning import LaunchPlan, LaunchQuestion
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem, run_backend
from hardpoint_torch_runtime.layers import Partial
from hardpoint_torch_runtime.layers import merge_partials as merge_plainly

pytest.importorskip("triton")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIXED = [(17, 1), (5, 1), (0, 9), (3, 7)]


def tiles_of(block_m: int, tile: int, splits: int = 1) -> TritonBackend:
    """With these tiles whatever is asked, so that their seams lie within short rows."""

    def plan(question: LaunchQuestion) -> LaunchPlan:
        return LaunchPlan(TileConfig(block_m, tile), splits)

    return TritonBackend(plan=plan)


def check(backend: TritonBackend, problem: AttentionProblem, cache: torch.Tensor | None = None) -> None:
    output = run_backend(backend, problem, cache).double()
    tolerance = TOLERANCE[problem.shape.dtype]
    torch.testing.assert_close(output, dense_attention(problem)[0], rtol=tolerance, atol=tolerance)


def test_a_mixed_step_equals_the_dense_answer() -> None:
    """R5.47: decodes and prefills together, in parts, over NaN wherever no row owns the cache."""
    check(tiles_of(16, 16, splits=2), make_problem(AttentionShape(num_heads=2, num_kv_heads=1), [(17, 1), (3, 2)]))


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_head_sizes_and_dtypes(head_size: int) -> None:
    """R5.47, R5.10."""
    for dtype in TOLERANCE:
        check(TritonBackend(), make_problem(AttentionShape(head_size=head_size, dtype=dtype), [(17, 1), (3, 7)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8_per_token_head"])
def test_every_head_has_its_scales(name: str) -> None:
    """R5.11, R5.43: read by stride, be it one scale for all heads or one for each."""
    for by_head in (False, True):
        shape = AttentionShape(num_heads=6, num_kv_heads=3, kv_cache_dtype=name, per_head_scales=by_head)
        check(tiles_of(16, 16, 2), make_problem(shape, [(17, 1), (3, 4)]))


@pytest.mark.slow
def test_latents_of_the_usual_size() -> None:
    """R5.12: more heads than a block has lanes, in parts; prefills and decodes read the cache alike."""
    shape = AttentionShape(num_heads=20, num_kv_heads=1, head_size=576, latent_values=512)
    check(tiles_of(16, 16, splits=2), make_problem(shape, [(33, 1), (0, 5)]))
    check(TritonBackend(), make_problem(replace(shape, dtype=torch.bfloat16), [(33, 1), (0, 5)]))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (20, 1)], ids=lambda heads: f"{heads[0]}over{heads[1]}")
def test_block_sizes_and_head_groups(block_size: int, heads: tuple[int, int]) -> None:
    """R5.15, R5.47: blocks smaller and larger than tiles; groups that fill a block of lanes badly, or not at all."""
    shape = AttentionShape(num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size)
    around = [size for size in (block_size - 1, block_size, block_size + 1) if size]
    rows = [*((size, 1) for size in around), (0, 1), (0, block_size + 1), (2 * block_size - 1, 2)]
    check(tiles_of(16, 16), make_problem(shape, rows))


@pytest.mark.slow
@pytest.mark.parametrize("feature", [{}, {"sliding_window": 5}, {"uses_sinks": True}, {"uses_alibi": True}], ids=str)
def test_parts_equal_the_whole(feature: dict[str, Any]) -> None:
    """R5.33: more parts than a row has tiles are no fault; a sink counts once."""
    shape = replace(AttentionShape(num_heads=4), **feature)
    check(tiles_of(16, 16, 8), make_problem(shape, [(40, 1), (0, 3), (33, 2)]))


@pytest.mark.slow
@pytest.mark.parametrize("feature", [{}, {"uses_sinks": True}, {"sliding_window": 5}], ids=str)
def test_parts_have_the_log_sum_exp_of_the_whole(feature: dict[str, Any]) -> None:
    """R5.83: natural logarithms, although parts are put together by those to base 2; empty parts count nothing."""
    problem = make_problem(replace(AttentionShape(num_heads=4), **feature), [(40, 1), (0, 3), (33, 2)])
    backend = tiles_of(16, 16, 4)
    impl, cache = backend.create_impl(problem.params()), problem.kv_cache()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    builder = backend.create_builder(problem.spec(), ["layer"], 8, 64, torch.device("cpu"))
    found = impl.forward_with_lse(problem.query, cache, builder.build(problem.common()), problem.empty_output())
    for actual, expected in zip(found, dense_attention(problem), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("feature", [{}, {"uses_sinks": True}, {"logits_soft_cap": 2.0}], ids=str)
def test_cascade_equals_plain_attention(feature: dict[str, Any]) -> None:
    """R5.83, I5.2: merged by log-sum-exp; sinks enter the prefix only."""
    shape = replace(AttentionShape(), **feature)
    problem = make_problem(shape, [(24, 1), (16, 5), (40, 1), (17, 2)])
    table = problem.block_table.clone()
    table[:, :4] = table[0, :4]
    keys, values = problem.history[0]
    history = tuple((torch.cat((keys[:16], k[16:])), torch.cat((values[:16], v[16:]))) for k, v in problem.history)
    shared = replace(problem, block_table=table, history=history, num_common_prefix_blocks=4)
    reads: list[tuple[int, int]] = []
    backend = TritonBackend(TritonOptions(cascade="always"))
    for chosen in (backend, TritonBackend(TritonOptions(cascade="never"))):
        check(chosen, shared)
    plan = watch_launches(reads)
    run_backend(TritonBackend(TritonOptions(cascade="always"), plan=plan), shared)
    assert reads == [(4, 9), (1, 9)], "the prefix is planned for as the one long row that it is"


def watch_launches(seen: list[tuple[int, int]]) -> Any:
    def plan(question: LaunchQuestion) -> LaunchPlan:
        seen.append((question.num_rows, question.num_tokens))
        return LaunchPlan(TileConfig(16, 16))

    return plan


@pytest.mark.slow
@pytest.mark.parametrize("feature", [{}, {"sliding_window": 7}, {"uses_sinks": True}], ids=str)
def test_bits_depend_on_neither_chunks_nor_neighbors(feature: dict[str, Any]) -> None:
    """R5.33, I5.2: keys lie in tiles by their positions, and a tile that nobody sees adds nothing."""
    shape = replace(AttentionShape(num_heads=4), **feature)
    whole = make_problem(shape, [(0, 150)])
    backend = TritonBackend(fixed=True)
    expected = run_backend(backend, whole)
    cache, begin = whole.kv_cache(), 0
    for size in (1, 60, 17, 72):
        step = slice(begin, begin + size)
        part = replace(
            whole, rows=((begin, size),), query=whole.query[step], key=whole.key[step], value=whole.value[step]
        )
        assert torch.equal(run_backend(backend, part, cache), expected[step])
        begin += size
    assert begin == 150


class Recorded(TorchDispatchMode):
    """Names of torch's operators, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_step_allocates_nothing_and_asks_torch_for_little(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """P5.7, P5.9, R5.38: views only, few of them, once layers and builder exist."""
    from hardpoint_attention.triton import launch

    problem = make_problem(AttentionShape(num_heads=2, num_kv_heads=1), [(9, 1), (3, 1)])
    backend = tiles_of(16, 16, splits)
    impl, cache, output = backend.create_impl(problem.params()), problem.kv_cache(), problem.empty_output()
    builder, common = backend.create_builder(problem.spec(), ["layer"], 8, 64, torch.device("cpu")), problem.common()
    launched: list[str] = []
    for name in ("attend", "combine_parts", "write_states"):
        monkeypatch.setattr(launch, name, Launcher(name, launched))
    with Recorded() as recorded:
        impl.write_kv(problem.key, problem.value, cache, common.slot_mapping)
        impl.forward(problem.query, problem.key, problem.value, cache, builder.build(common), output)
    assert launched == ["write_states", "attend", *(["combine_parts"] if splits > 1 else [])]
    assert len(recorded.names) <= 14, recorded.names
    assert {name.split(".")[1] for name in recorded.names} <= {"slice", "view", "unsqueeze", "as_strided"}


class Launcher:
    """Stands in for a kernel, whose interpreter would copy its arguments."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self.name = name
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **settings: self.launched.append(self.name)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 4, 17])
def test_keys_outside_of_a_window_are_not_read(window: int) -> None:
    """R5.55: whole tiles are skipped, and of the first only what somebody sees is loaded: blocks that the cache's
    manager has taken back may hold anything."""
    shape = AttentionShape(sliding_window=window)
    problem = make_problem(shape, [(60, 1), (50, 3)])
    cache = problem.kv_cache()
    for row, (context, _) in enumerate(problem.rows):
        gone = problem.slots(row, 0, max(context - window + 1, 0))
        cache.transpose(1, 2)[gone // shape.block_size, gone % shape.block_size] = torch.nan
    check(tiles_of(16, 16), problem, cache)
    check(tiles_of(16, 16, splits=4), problem, cache)


@pytest.mark.slow
def test_tiles_between_the_prompt_and_the_window_are_not_read() -> None:
    """R5.55: R-SWA."""
    shape = AttentionShape(sliding_window=4, keeps_prompt=True)
    problem = replace(make_problem(shape, [(90, 1), (80, 3)]), prompt_lens=(5, 20))
    cache = problem.kv_cache()
    for row, (context, _) in enumerate(problem.rows):
        gone = problem.slots(row, problem.prompt_lens[row], context - 3)  # type: ignore[index]
        cache.transpose(1, 2)[gone // shape.block_size, gone % shape.block_size] = torch.nan
    check(tiles_of(16, 16), problem, cache)


@pytest.mark.slow
def test_layers_that_keep_prompts_are_causal_whatever_a_row_says() -> None:
    shape = AttentionShape(sliding_window=4, keeps_prompt=True, uses_row_causality=True)
    check(tiles_of(16, 16), make_problem(shape, [(9, 5), (8, 6), (0, 7)]))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_any_strides(kv_heads: int) -> None:
    """R5.41, R5.42: caches interleaved with other layers', slots outermost within a block, queries and outputs that
    are parts of wider rows, and strides of single heads that mean nothing."""
    problem = make_problem(AttentionShape(num_heads=2, num_kv_heads=kv_heads, head_size=8), MIXED)
    plain = problem.kv_cache()
    shared = torch.full((plain.shape[0], 3, *plain.shape[1:]), torch.nan)
    shared[:, 1] = plain
    by_slot = plain.transpose(1, 2).contiguous().transpose(1, 2)
    degenerate = plain.as_strided(
        plain.shape, (plain.stride(0), 1 if kv_heads == 1 else plain.stride(1), *plain.stride()[2:])
    )
    for cache in (shared[:, 1], by_slot, degenerate):
        check(TritonBackend(), problem, cache)
    wide = torch.full((problem.num_tokens, 5, 2 * kv_heads + 2, 8), torch.nan)
    parts = wide[:, 1, :2], wide[:, 2, :kv_heads], wide[:, 3, :kv_heads]
    for part, values in zip(parts, (problem.query, problem.key, problem.value), strict=True):
        part.copy_(values)
    strided = replace(problem, query=parts[0], key=parts[1], value=parts[2])
    check(TritonBackend(), strided)


@pytest.mark.slow
def test_writing_takes_slots_of_its_own_number_and_skips_negative_ones() -> None:
    """R5.70, R5.71, R5.72: for both layouts of a block, and for elements with scales."""
    shape = AttentionShape(head_size=8, kv_cache_dtype="int8_per_token_head")
    for name in (None, "fp8", "int8_per_token_head"):
        problem = make_problem(replace(shape, kv_cache_dtype=name), [(2, 5)])
        impl = TritonBackend().create_impl(problem.params())
        cache = problem.kv_cache()
        before = cache.clone().view(torch.uint8).transpose(1, 2)
        slots = problem.slot_mapping()[:4].clone()
        slots[1] = -1
        impl.write_kv(problem.key, problem.value, cache, slots)
        after = cache.view(torch.uint8).transpose(1, 2)
        differs = (before != after).flatten(2).any(-1).flatten().nonzero().flatten()
        assert set(differs.tolist()) <= {int(slot) for slot in slots if slot >= 0}
        assert len(differs) == 3


@pytest.mark.slow
def test_the_layers_window_wins_over_the_groups() -> None:
    """R5.45, P5.10: one builder and one metadata object serve a windowed and a global layer."""
    windowed = make_problem(AttentionShape(sliding_window=5), [(30, 1), (0, 15)])
    plain = replace(windowed, shape=replace(windowed.shape, sliding_window=None))
    backend = TritonBackend()
    metadata = backend.create_builder(windowed.spec(), ["a", "b"], 4, 64, torch.device("cpu")).build(windowed.common())
    for problem in (windowed, plain, windowed):
        impl, cache = backend.create_impl(problem.params()), problem.kv_cache()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        output = impl.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
        torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=2e-5, atol=2e-5)


def test_a_layer_that_keeps_prompts_has_to_know_them() -> None:
    problem = replace(make_problem(AttentionShape(sliding_window=4, keeps_prompt=True), [(3, 1)]), prompt_lens=None)
    with pytest.raises(ValueError, match="'layer' keeps the prompt beside its window, but the step brings no prompt"):
        run_backend(TritonBackend(), problem)


def test_a_cache_of_another_width_is_refused() -> None:
    """P5.2: not silent garbage."""
    problem = make_problem(AttentionShape(head_size=8), [(3, 1)])
    with pytest.raises(ValueError, match=r"does not hold heads of 8; expected \[blocks, heads, block size, 16\]"):
        run_backend(TritonBackend(), problem, torch.zeros(9, 2, 4, 12))


def test_merging_two_parts_is_what_merging_says() -> None:
    """R5.83: also where a part saw nothing and holds no numbers."""
    from hardpoint_attention.triton.launch import merge_partials

    generator = torch.Generator().manual_seed(0)
    parts = [
        Partial(torch.randn(3, 2, 5, generator=generator), 3 * torch.randn(3, 2, generator=generator)) for _ in range(2)
    ]
    parts[0].lse[0] = parts[1].lse[2] = -torch.inf
    parts[0].output[0] = torch.nan
    parts[0].lse[1, 1] = parts[1].lse[1, 1] = -torch.inf
    output, lse = torch.full((3, 2, 5), torch.nan), torch.full((3, 2), torch.nan)
    merge_partials(parts[0].output, parts[0].lse, parts[1].output, parts[1].lse, output, lse)
    expected = merge_plainly(parts)
    torch.testing.assert_close(output, expected.output)
    torch.testing.assert_close(lse, expected.lse)
