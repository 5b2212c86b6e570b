"""The attention kernels against the dense answer in float64, and bit for bit against themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_attention_cases import LAYOUTS, chunks, facts, rows_of, run, shape_of, shapes
from hardpoint_cpu.native import attention as kernels
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_testing_torch import AttentionShape, dense_attention, make_problem

MIXED = [(17, 1), (130, 1), (0, 9), (127, 1), (3, 70), (300, 1), (100, 40), (0, 0), (128, 2)]
"""Decodes, first and later chunks, a row without tokens; keys that end before, at and behind the ends of tiles."""

layers = shapes([1, 2, 3, 5, 8], [8, 16, 24, 40, 64, 80, 128, 256], [1, 3, 16, 48, 256])
rows = st.lists(
    st.tuples(st.sampled_from([0, 1, 40, 127, 128, 200]), st.sampled_from([0, 1, 1, 2, 17, 70])), min_size=1, max_size=5
)


def assert_dense(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


def check_batches(library: NativeLibrary, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, database=None)
    @given(shape=layers, batch=rows, seed=st.integers(0, 1000), layout=st.sampled_from(LAYOUTS))
    def check(shape: AttentionShape, batch: list[tuple[int, int]], seed: int, layout: str) -> None:
        problem = make_problem(shape, batch, seed)
        assert_dense(run(library, problem, layout=layout), dense_attention(problem))

    check()


def test_any_batch_equals_the_dense_answer(best_native: NativeLibrary) -> None:
    """R5.47, R5.41, R5.44: any shape, block table and layout, over NaN in every cache entry that no row owns."""
    check_batches(best_native, 10)


@pytest.mark.slow
def test_many_batches_equal_the_dense_answer(native: NativeLibrary) -> None:
    """The same on all levels."""
    check_batches(native, 40)


@pytest.mark.parametrize(
    "feature",
    [{}, {"sliding_window": 150}, {"uses_alibi": True, "uses_sinks": True}, {"logits_soft_cap": 5.0}],
    ids=str,
)
def test_bits_do_not_depend_on_neighbors_or_threads(
    load_native: Callable[..., NativeLibrary], feature: dict[str, object]
) -> None:
    """I5.1 to the last bit, with rows enough for one thread and tiles that several share."""
    problem = make_problem(shape_of(**feature), MIXED)
    together = [run(load_native(threads=threads), problem) for threads in (1, 2, 3)]
    for other in together[1:]:
        assert torch.equal(other[0], together[0][0])
        assert torch.equal(other[1], together[0][1])
    begin = 0
    for row, (_, length) in enumerate(MIXED):
        output, lse = run(load_native(threads=1 + row % 3), problem.alone(row))
        assert torch.equal(output, together[0][0][begin : begin + length])
        assert torch.equal(lse, together[0][1][begin : begin + length])
        begin += length


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e4])
def test_caps_of_any_size_lose_no_digits(native: NativeLibrary, cap: float) -> None:
    """R5.47: a cap far above all logits changes them by next to nothing."""
    problem = make_problem(shape_of(logits_soft_cap=cap), [(17, 1), (0, 40)])
    found, expected = run(native, problem)[0], dense_attention(problem)[0]
    torch.testing.assert_close(found.double(), expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("head_size", [16, 24])
def test_bits_do_not_depend_on_chunks(native: NativeLibrary, head_size: int) -> None:
    """I5.2 to the last bit: a prompt in any pieces, single tokens among them; a prefix hit leaves such a piece."""
    whole = make_problem(shape_of(head_size=head_size), [(0, 300)])
    expected, lse = run(native, whole)
    for cuts in ([1, 2, 130, 131, 299], [128, 256], [77]):
        parts = [run(native, part) for part in chunks(whole, cuts)]
        assert torch.equal(torch.cat([output for output, _ in parts]), expected)
        assert torch.equal(torch.cat([part for _, part in parts]), lse)


@pytest.mark.parametrize("head_size", [32, 64])
def test_bits_do_not_depend_on_when_stored_keys_become_floats(native: NativeLibrary, head_size: int) -> None:
    """I5.2: few query rows widen bfloat16 as they multiply it, more rows all of it beforehand."""
    whole = make_problem(shape_of(head_size=head_size), [(0, 300)])
    expected, _ = run(native, whole, dtype=torch.bfloat16)
    pieces = chunks(whole, [1, 2, 128, 131, 298, 299])
    found = torch.cat([run(native, piece, dtype=torch.bfloat16)[0] for piece in pieces])
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_bits_hold_for_usual_sizes(native: NativeLibrary, head_size: int, group: int) -> None:
    shape = AttentionShape(num_heads=2 * group, num_kv_heads=2, head_size=head_size, block_size=16)
    whole = make_problem(shape, [(0, 700)])
    expected, _ = run(native, whole)
    parts = chunks(whole, [1, 130, 300, 301, 302, 555])
    assert torch.equal(torch.cat([run(native, part)[0] for part in parts]), expected)
    batch = make_problem(shape, MIXED)
    together = run(native, batch)[0].split([length for _, length in MIXED])
    for row, output in enumerate(together):
        assert torch.equal(run(native, batch.alone(row))[0], output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrower_cache_is_that_cache_widened(native: NativeLibrary, dtype: torch.dtype) -> None:
    """What is stored is rounded as torch rounds; what is computed from it is computed in float32."""
    problem = make_problem(shape_of(), MIXED)
    rounded = replace(
        problem,
        key=problem.key.to(dtype).float(),
        value=problem.value.to(dtype).float(),
        history=tuple((key.to(dtype).float(), value.to(dtype).float()) for key, value in problem.history),
    )
    expected = run(native, rounded)
    for layout in LAYOUTS:
        actual = run(native, problem, layout=layout, dtype=dtype)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_what_torch_would_round(native: NativeLibrary, dtype: torch.dtype) -> None:
    """R5.70 to R5.72: negative slots and all other bytes stay; subnormal, huge and endless values included."""
    edges = torch.tensor(
        [0.0, -0.0, 1e-8, -3e-6, 6e-5, 65504.0, 65519.9, 65520.0, 1e30, torch.inf, -torch.inf, 1.0009766]
    )
    key = torch.cat((edges.repeat(4), torch.randn(80)))[: 4 * 32].reshape(4, 2, 16)
    value = torch.randn(4, 2, 16)
    cache = torch.full((3, 2, 4, 32), 7.0, dtype=dtype)
    layer = plain_layer(4, 2, 16)
    slots = torch.tensor([9, -1, 0, 11])
    kernels.write_kv(native, layer, key, value, slots, kernels.cache_view(cache, 2, 16))
    expected = torch.full_like(cache, 7.0)
    for token in (0, 2, 3):
        block, place = divmod(int(slots[token]), 4)
        expected[block, :, place] = torch.cat((key[token], value[token]), dim=-1).to(dtype)
    assert torch.equal(cache, expected)


def test_queries_and_outputs_may_lie_in_wider_rows(native: NativeLibrary) -> None:
    """A fused projection's output is read where it lies, and nothing between the heads of two tokens is touched."""
    problem = make_problem(shape_of(head_size=64), MIXED)
    heads, kv_heads, size = 9, 3, 64
    fused = torch.full((problem.num_tokens, (heads + 2 * kv_heads) * size + 5), torch.nan)
    parts = fused[:, : (heads + 2 * kv_heads) * size].split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    query, key, value = (part.unflatten(1, (-1, size)) for part in parts)
    for part, values in zip((query, key, value), (problem.query, problem.key, problem.value), strict=True):
        part.copy_(values)
    wide = torch.full((problem.num_tokens, heads + 1, size), 5.0)
    layer, cache = facts(problem), problem.kv_cache()
    view = kernels.cache_view(cache, kv_heads, size)
    kernels.write_kv(native, layer, key, value, problem.slot_mapping(), view)
    kernels.attention(native, layer, rows_of(problem), view, query, wide[:, :heads])
    assert torch.equal(wide[:, :heads], run(native, problem)[0])
    assert bool((wide[:, heads] == 5.0).all())


@pytest.mark.parametrize("window", [None, 30])
def test_rows_without_a_cache_see_their_own_tokens(native: NativeLibrary, window: int | None) -> None:
    """R5.46."""
    problem = make_problem(shape_of(head_size=24, causal=False, sliding_window=window), [(0, 40), (0, 1), (0, 200)])
    common = problem.common()
    own = kernels.RowFacts.make(common.query_start_loc, common.seq_lens, None, causal=False)
    output, lse = torch.empty_like(problem.query), torch.empty(problem.query.shape[:2])
    kernels.attention_fresh(native, facts(problem), own, problem.key, problem.value, problem.query, output, lse)
    assert_dense((output, lse), dense_attention(problem))


def test_sinks_are_read_at_every_call(native: NativeLibrary) -> None:
    problem = make_problem(shape_of(uses_sinks=True), [(5, 1)])
    assert problem.sinks is not None
    first = run(native, problem)
    problem.sinks.add_(3.0)
    second = run(native, problem)
    assert not torch.equal(first[0], second[0])
    assert_dense(second, dense_attention(problem))


def plain_layer(heads: int, kv_heads: int, size: int) -> kernels.LayerFacts:
    return kernels.LayerFacts.make(heads, kv_heads, size, size**-0.5)


class TestRefusals:
    """What does not fit is an exception and never a read or write somewhere else."""

    def attend(self, library: NativeLibrary, **changes: object) -> None:
        """A small problem that works, with ``changes`` to what its structures say."""
        problem = make_problem(shape_of(), [(20, 1), (0, 3)])
        layer, rows, cache = facts(problem), rows_of(problem), problem.kv_cache()
        view = kernels.cache_view(cache, 3, 16)
        query, output = problem.query, torch.empty_like(problem.query)
        for name, value in changes.items():
            for struct in (layer.struct, rows.struct, view):
                if hasattr(struct, name):
                    setattr(struct, name, value)
        kernels.attention(library, layer, rows, view, query, output)

    def test_it_works_unchanged(self, best_native: NativeLibrary) -> None:
        self.attend(best_native)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"kv_heads": 2}, "9 query heads"),
            ({"kv_heads": 0}, "0 key and value heads"),
            ({"window": 0}, "window 0"),
            ({"soft_cap": -1.0}, "soft cap -1"),
            ({"rows": -1}, "rows -1"),
            ({"blocks": 2}, "of 2"),
            ({"block_size": 0}, "blocks of 0"),
            ({"table_columns": 1}, "2 blocks, its table 1"),
            ({"data": None}, "missing"),
            ({"block_table": None}, "missing"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_structures_that_do_not_fit(
        self, best_native: NativeLibrary, changes: dict[str, object], reason: str
    ) -> None:
        with pytest.raises(ValueError, match=reason):
            self.attend(best_native, **changes)

    @pytest.mark.parametrize(
        ("starts", "lengths", "table", "reason"),
        [
            ([0, 2, 5], [2, 3], [[1, 2], [3, 4]], "claims tokens 2 to 5 of 4"),
            ([0, 3, 2], [3, 3], [[1, 2], [3, 4]], "claims tokens 3 to 2"),
            ([-1, 2, 3], [3, 3], [[1, 2], [3, 4]], "claims tokens -1 to 2"),
            ([0, 2, 4], [1, 3], [[1, 2], [3, 4]], "2 new tokens, but a length of 1"),
            ([0, 2, 4], [2, 3], [[1, 2], [5, 4]], "row 1 names block 5 of 5"),
            ([0, 2, 4], [2, 17], [[1, 2], [3, -1]], "row 1 names block -1"),
        ],
    )
    def test_rows_that_do_not_fit(
        self, best_native: NativeLibrary, starts: list[int], lengths: list[int], table: list[list[int]], reason: str
    ) -> None:
        layer, cache = plain_layer(4, 2, 16), torch.zeros(5, 2, 16, 32)
        given = [torch.tensor(values, dtype=torch.int32) for values in (starts, lengths, table)]
        query = torch.zeros(4, 4, 16)
        with pytest.raises(ValueError, match=reason):
            kernels.attention(
                best_native,
                layer,
                kernels.RowFacts.make(*given),
                kernels.cache_view(cache, 2, 16),
                query,
                torch.empty_like(query),
            )

    @pytest.mark.parametrize("size", [12, 264])
    def test_head_sizes(self, best_native: NativeLibrary, size: int) -> None:
        problem = make_problem(AttentionShape(head_size=size), [(3, 1)])
        with pytest.raises(ValueError, match=f"head size {size}"):
            run(best_native, problem)

    def test_slots_and_keys_that_do_not_fit(self, best_native: NativeLibrary) -> None:
        layer, cache = plain_layer(4, 2, 16), torch.zeros(5, 2, 16, 32)
        view, key = kernels.cache_view(cache, 2, 16), torch.ones(2, 2, 16)
        with pytest.raises(ValueError, match="slot 80 of 5 blocks"):
            kernels.write_kv(best_native, layer, key, key, torch.tensor([3, 80]), view)
        with pytest.raises(ValueError, match="3 slots have 2 keys"):
            kernels.write_kv(best_native, layer, key, key, torch.tensor([1, 2, 3]), view)
        assert not cache.any()

    def test_own_keys_have_no_past(self, best_native: NativeLibrary) -> None:
        layer, query, key = plain_layer(4, 2, 16), torch.zeros(3, 4, 16), torch.zeros(3, 2, 16)
        starts, lengths = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
        rows = kernels.RowFacts.make(starts, lengths, None, causal=False)
        with pytest.raises(ValueError, match="keys from before this step"):
            kernels.attention_fresh(best_native, layer, rows, key, key, query, torch.empty_like(query))

    @pytest.mark.parametrize(
        ("cache", "reason"),
        [
            (torch.zeros(5, 2, 16, 31), "KV cache must be"),
            (torch.zeros(5, 3, 16, 32), "KV cache must be"),
            (torch.zeros(5, 2, 16, 32, dtype=torch.float64), "float64"),
            (torch.zeros(5, 2, 32, 16).transpose(2, 3), "contiguous"),
        ],
        ids=["content", "heads", "dtype", "strides"],
    )
    def test_caches_of_another_form(self, cache: torch.Tensor, reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            kernels.cache_view(cache, 2, 16)

    def test_tensors_of_another_form(self, best_native: NativeLibrary) -> None:
        layer, cache = plain_layer(4, 2, 16), torch.zeros(5, 2, 16, 32)
        view = kernels.cache_view(cache, 2, 16)
        starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        rows = kernels.RowFacts.make(starts, lengths, torch.zeros(1, 2, dtype=torch.int32))
        good = torch.zeros(2, 4, 16)
        for name, query, output in (
            ("query", good.double(), good),
            ("query", torch.zeros(2, 4, 8), good),
            ("output", good, torch.zeros(2, 4, 32)[..., ::2]),
            ("heads of query", torch.zeros(2, 4, 32)[..., :16], good),
            ("output has 1 tokens", good, good[:1]),
        ):
            with pytest.raises(ValueError, match=name):
                kernels.attention(best_native, layer, rows, view, query, output)
        with pytest.raises(ValueError, match="lse"):
            kernels.attention(best_native, layer, rows, view, good, good, torch.zeros(2, 3))
        with pytest.raises(ValueError, match="sinks"):
            kernels.LayerFacts.make(4, 2, 16, 1.0, sinks=torch.zeros(3))
        with pytest.raises(ValueError, match="3 rows"):
            kernels.RowFacts.make(starts, lengths, None, rows=3)
