"""Rules of attention backends: metadata of a step, and what answers must not depend on."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, GraphSupport
from hardpoint_testing_torch.attention_problems import LAYER, AttentionProblem, run_backend, run_impl
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import LONG, MIXED, AttentionRules, assert_near, variant
from hardpoint_testing_torch.step_buffers import HostBlind, StepBuffers

__all__ = ["AttentionStepRules"]

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "chunks": {"chunk_size": 7},
    "prompt": {"sliding_window": 4, "keeps_prompt": True},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"kv_cache_dtype": "int8_per_token_head"},
    "sparse": {"uses_sparse": True},
}
OFTEN = {**FEATURES, "ranges": {"uses_mm_prefix": True}, "by row": {"uses_row_causality": True}}


class AttentionStepRules(AttentionRules):
    @pytest.mark.parametrize("feature", OFTEN)
    def test_block_ids_do_not_matter(self, backend: AttentionBackend, base: AttentionShape, feature: str) -> None:
        """I5.1: blocks."""
        problem = self.problem(variant(base, **OFTEN[feature]), MIXED)
        self.require(backend, problem.shape)
        self.check_equal(backend, problem, run_backend(backend, problem.permuted(7)))

    @pytest.mark.parametrize("feature", OFTEN)
    def test_the_order_of_rows_does_not_matter(
        self, backend: AttentionBackend, base: AttentionShape, feature: str
    ) -> None:
        """I5.1: batch order. What belongs to a row goes with it: ranges, prompts, causality."""
        problem = self.problem(variant(base, **OFTEN[feature]), MIXED)
        self.require(backend, problem.shape)
        order = (4, 0, 2, 5, 1, 3)
        parts = run_backend(backend, problem.picked(order)).split([problem.rows[row][1] for row in order])
        self.check_equal(backend, problem, torch.cat([parts[order.index(row)] for row in range(len(order))]))

    @pytest.mark.parametrize("feature", OFTEN)
    def test_padding_does_not_matter(self, backend: AttentionBackend, base: AttentionShape, feature: str) -> None:
        """I5.1 and R5.48: NaN tokens behind the real ones change nothing, nor do empty rows of the null block."""
        problem = self.problem(variant(base, **OFTEN[feature]), MIXED)
        self.require(backend, problem.shape)
        self.check_equal(backend, problem, run_backend(backend, problem.padded(5)))
        self.check_equal(backend, problem, run_backend(backend, problem.padded(2, num_rows=2)))

    def check_equal(self, backend: AttentionBackend, problem: AttentionProblem, output: torch.Tensor) -> None:
        """``output`` is what the backend makes of the problem itself, but for the order of additions."""
        assert_near(output, run_backend(backend, problem), 1e-5, "the same problem in another form")

    @pytest.mark.parametrize("sizes", [(40,), (1, 39), (16, 16, 8), (7, 1, 20, 12)], ids=str)
    @pytest.mark.parametrize("feature", FEATURES)
    def test_chunks_of_a_prompt_equal_the_whole(
        self, backend: AttentionBackend, base: AttentionShape, feature: str, sizes: tuple[int, ...]
    ) -> None:
        """I5.2: any split, over one cache; a decode of another request is in every step."""
        whole = self.problem(variant(base, **FEATURES[feature]), [(0, sum(sizes)), (30, 1)])
        self.require(backend, whole.shape)
        cache, outputs, begin = whole.kv_cache(), [], 0
        for size in sizes:
            output = run_backend(backend, part_of_prompt(whole, begin, size), cache)
            outputs.append(output[:size])
            begin += size
        self.compare(whole.alone(0), torch.cat(outputs))

    @pytest.mark.parametrize("feature", OFTEN)
    def test_a_small_build_after_a_large_one_is_as_if_alone(
        self, backend: AttentionBackend, base: AttentionShape, feature: str
    ) -> None:
        """I5.5, P5.1: nothing of a step of eight rows is left in one of three, and nothing of a prompt in a decode."""
        shape = variant(base, **OFTEN[feature])
        self.require(backend, shape)
        eight = [*MIXED, (8, 4), (1, 1)]
        steps = [self.problem(shape, eight), self.problem(shape, [(6, 1), (0, 3), (2, 1)], seed=1)]
        steps += [self.problem(shape, LONG, seed=2), self.problem(shape, [(31, 1)], seed=3)]
        builder = self.builder(backend, steps[0])
        for problem in steps:
            cache, impl = problem.kv_cache(), backend.create_impl(problem.params())
            self.write(backend, problem, cache)
            output, metadata = problem.empty_output(), builder.build(problem.common())
            self.compare(problem, run_impl(impl, problem, cache, metadata, output))

    def test_fast_builds_compute_the_same(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.31: what is not planned ahead is only slower."""
        problem = self.problem(base, MIXED)
        cache, impl, output = problem.kv_cache(), backend.create_impl(problem.params()), problem.empty_output()
        self.write(backend, problem, cache)
        metadata = self.builder(backend, problem).build(problem.common(), fast=True)
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        self.compare(problem, output)

    def test_common_prefixes_change_nothing(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.83, I5.2: knowing that all rows begin with the same blocks may save work, and gives the same answers."""
        blocks, size = -(-272 // base.block_size), base.block_size
        common = blocks * size
        problem = self.problem(base, [(common + 3, 1), (common, 5), (common + 2 * size, 1), *[(common + 1, 2)] * 7])
        keys, values = (states[:common] for states in problem.history[0])
        history = [(torch.cat((keys, k[common:])), torch.cat((values, v[common:]))) for k, v in problem.history]
        table = problem.block_table.clone()
        table[:, :blocks] = table[0, :blocks]
        problem = replace(problem, history=tuple(history), block_table=table, num_common_prefix_blocks=blocks)
        self.check(backend, problem)

    @pytest.mark.parametrize("feature", OFTEN)
    def test_building_never_waits_for_the_device(
        self, backend: AttentionBackend, base: AttentionShape, feature: str
    ) -> None:
        """R5.36: tensors that raise where the host would have to read them; the host copies say enough."""
        problem = self.problem(variant(base, **OFTEN[feature]), MIXED)
        self.require(backend, problem.shape)
        builder, common = self.builder(backend, problem), problem.common()
        blind = {
            each.name: HostBlind.of(value)
            for each in fields(common)
            if isinstance(value := getattr(common, each.name), torch.Tensor)
        }
        for _ in range(2):
            builder.build(replace(common, **blind))  # type: ignore[arg-type]

    def test_buffers_stay_where_they_are(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """I5.4, R5.38: what a graph will read is at the same addresses after every build."""
        buffers, builder = self.for_graphs(backend, base)
        seen: list[set[int]] = []
        kept = []
        for rows in ([(9, 1), (30, 1), (4, 1), (12, 1)], [(1, 1), (2, 1)], [(40, 1), (17, 1), (3, 1)]):
            kept.append(builder.build(buffers.common(self.problem(base, rows))))
            seen.append(addresses(kept[-1]) - buffers.addresses())
        assert seen[0] == seen[1] == seen[2], "builds for graphs allocate tensors of their own"

    def test_metadata_of_a_graph_follows_the_step(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.34, P5.1: a replay reads the metadata it was captured with, so later builds must reach that; rows that a
        smaller step does not have are silent."""
        buffers, builder = self.for_graphs(backend, base)
        first = self.problem(base, [(9, 1), (30, 1), (4, 1), (12, 1)])
        captured = builder.build(buffers.common(first))
        for seed, rows in enumerate(([(1, 1), (3, 1), (17, 1), (40, 1)], [(20, 1), (5, 1)], [(2, 1), (45, 1), (7, 1)])):
            problem = self.problem(base, rows, seed)
            builder.build(buffers.common(problem))
            impl, cache = backend.create_impl(problem.params()), problem.kv_cache()
            self.write(backend, problem, cache)
            query, key, value = (
                pad_rows(each, len(first.rows)) for each in (problem.query, problem.key, problem.value)
            )
            output = torch.full_like(query, torch.nan)
            impl.forward(query, key, value, cache, captured, output)
            self.compare(problem, output[: len(rows)])

    def for_graphs(self, backend: AttentionBackend, base: AttentionShape) -> tuple[StepBuffers, Any]:
        """Buffers for four decodes and a builder; skips backends whose metadata no graph may use."""
        problem = self.problem(base, [(9, 1)])
        builder = self.builder(backend, problem, rows=4, tokens=4)
        if builder.graph_support is GraphSupport.NEVER:
            pytest.skip(f"{backend.name} declares that its metadata is not for graphs")
        columns = 1 - (-64 // base.block_size)
        return StepBuffers(4, columns, base.block_size, problem.query.device), builder

    def test_batch_invariance_is_kept_where_it_is_accepted(
        self, backend: AttentionBackend, base: AttentionShape
    ) -> None:
        """Equal bits for a row whatever its neighbors, if the backend accepts the need for it."""
        reason = self.reason(backend, self.need(base, batch_invariant=True))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")
        together = self.problem(base, LONG)
        outputs = run_backend(backend, together).split([query for _, query in LONG])
        for row, output in enumerate(outputs):
            assert torch.equal(run_backend(backend, together.alone(row)), output), f"row {row} depends on its neighbors"

    def test_one_builder_serves_layers_of_any_name(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """One metadata object is read by all layers of a group, in any order and more than once."""
        problem = self.problem(base, MIXED)
        builder = backend.create_builder(problem.spec(), [LAYER, "other"], 8, 256, problem.query.device)
        metadata = builder.build(problem.common())
        for name in (LAYER, "other", LAYER):
            cache, impl, output = problem.kv_cache(), backend.create_impl(problem.params(name)), problem.empty_output()
            self.write(backend, problem, cache)
            impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
            self.compare(problem, output)


def part_of_prompt(whole: AttentionProblem, begin: int, size: int) -> AttentionProblem:
    """``size`` tokens from ``begin`` on of the first row, all of which are the step's, beside the second row."""
    length = whole.rows[0][1]
    step = torch.tensor([*range(begin, begin + size), *range(length, whole.num_tokens)])
    return replace(
        whole,
        rows=((begin, size), *whole.rows[1:]),
        query=whole.query[step],
        key=whole.key[step],
        value=whole.value[step],
        selected=None if whole.selected is None else whole.selected[step],
        history=((whole.key[:begin], whole.value[:begin]), *whole.history[1:]),
    )


def pad_rows(states: torch.Tensor, count: int) -> torch.Tensor:
    """``states`` [T, ...] with zeros up to ``count`` tokens."""
    return torch.cat((states, states.new_zeros(count - len(states), *states.shape[1:])))


def addresses(value: Any) -> set[int]:
    """Where the tensors lie that can be reached from metadata."""
    found, waiting, known = set(), [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        if isinstance(each, torch.Tensor):
            found.add(each.untyped_storage().data_ptr())
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif is_dataclass(each):
            waiting += [getattr(each, field.name) for field in fields(each)]
        elif hasattr(each, "__dict__"):
            waiting += vars(each).values()
    return found
