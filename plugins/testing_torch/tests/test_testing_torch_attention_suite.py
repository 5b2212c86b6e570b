"""The suite catches the usual faults: every mutant of a correct backend fails at least one of its tests."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionKind,
    AttentionLayerParams,
    AttentionNeed,
    BlockSizeRule,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import (
    AttentionBackendConformance,
    AttentionBackendSuite,
    AttentionProblem,
    AttentionShape,
    PlainAttention,
    PlainAttentionBackend,
    dense_attention,
    make_problem,
)

SOUND: PluginDeclaration = PluginDeclaration(
    "attention_backend",
    probe=lambda: ProbeResult(ProbeStatus.AVAILABLE, "there is a CPU"),
    capabilities={"block_sizes": {"multiple_of": 1}, "returns_lse": True},
)


class PlainSuite(AttentionBackendSuite):
    """With a declaration, as if the backend were installed."""

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return PlainAttentionBackend()

    @pytest.fixture
    def declaration(self) -> PluginDeclaration:
        return SOUND


@pytest.mark.slow
class TestPlainBackend(PlainSuite):
    pass


class WrongScale(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        super().__init__(replace(params, scale=params.scale * 1.05))


class WindowOffByOne(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        window = params.sliding_window
        super().__init__(replace(params, sliding_window=None if window is None else window + 1))


class StaleTail(PlainAttention):
    """Reads one entry that belongs to nobody."""

    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        metadata.seq_lens_cpu = metadata.seq_lens_cpu + 1
        return super().stored(cache, metadata, row)


class WrongSlot(PlainAttention):
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        moved = torch.where(slot_mapping >= 0, slot_mapping ^ 1, slot_mapping)
        super().write_kv(key, value, kv_cache, moved)


class WritesPadding(PlainAttention):
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        super().write_kv(key[: len(slot_mapping)], value[: len(slot_mapping)], kv_cache, slot_mapping.clamp(min=0))


class NotCausal(PlainAttention):
    def is_causal(self, metadata: CommonAttentionMetadata, row: int) -> bool:
        return False


class KeepsValuesOfLatents(PlainAttention):
    """Makes room for values beside keys, as everywhere else."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        super().write_kv(torch.cat((key, value), dim=-1)[..., -key.shape[-1] :], value, kv_cache, slot_mapping)


class LastEntriesOfLatents(PlainAttention):
    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        return super().stored(cache, metadata, row).flip(-1)


class NoSinks(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        super().__init__(replace(params, sinks=None))


KERNEL_FAULTS = {
    WrongScale: "test_equals_the_dense_answer",
    WindowOffByOne: "test_sliding_window",
    StaleTail: "test_equals_the_dense_answer",
    WrongSlot: "test_writing_touches_exactly_the_addressed_slots",
    WritesPadding: "test_writing_touches_exactly_the_addressed_slots",
    NotCausal: "test_equals_the_dense_answer",
    NoSinks: "test_score_features",
    KeepsValuesOfLatents: "test_writing_latents_touches_exactly_the_addressed_slots",
    LastEntriesOfLatents: "test_latents",
}


class TakesAnything(PlainAttentionBackend):
    def refuse(self, need: AttentionNeed) -> str | None:
        return None


class RaisesInstead(PlainAttentionBackend):
    def refuse(self, need: AttentionNeed) -> str | None:
        if need.num_heads % need.num_kv_heads:
            raise ValueError("no")
        return None


class SaysNothing(PlainAttentionBackend):
    def refuse(self, need: AttentionNeed) -> str | None:
        return "" if need.uses_mla else super().refuse(need)


class ChangesItsMind(PlainAttentionBackend):
    answers = itertools.count()

    def refuse(self, need: AttentionNeed) -> str | None:
        return f"refused for the {next(self.answers)}th time" if need.uses_mla else super().refuse(need)


class TakesOtherBlocks(PlainAttentionBackend):
    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return BlockSizeRule(multiple_of=4)


class KeepsALogSumExp(PlainAttentionBackend):
    returns_lse = False


class PromisesALogSumExp(KeepsALogSumExp):
    """To whom it asks by a need."""


class SaysNothingOfCrossing(PlainAttentionBackend):
    def refuse(self, need: AttentionNeed) -> str | None:
        return "" if need.kind is AttentionKind.ENCODER_DECODER else super().refuse(need)


BACKEND_FAULTS = {
    TakesAnything: "test_impossible_needs_are_refused",
    RaisesInstead: "test_impossible_head_counts_are_refused",
    SaysNothing: "test_rare_needs_get_an_answer",
    ChangesItsMind: "test_rare_needs_get_an_answer",
    TakesOtherBlocks: "test_it_declares_the_block_sizes_it_takes",
    KeepsALogSumExp: "test_it_declares_what_it_can_do",
    PromisesALogSumExp: "test_who_accepts_the_need_declares_it",
    SaysNothingOfCrossing: "test_rare_needs_get_an_answer",
}
PROBES = {
    "broken": lambda: ProbeResult(ProbeStatus.BROKEN, "the library is of another version"),
    "mute": lambda: ProbeResult(ProbeStatus.AVAILABLE, ""),
    "no result": lambda: True,
}


def failures(backend_class: type[PlainAttentionBackend], rule: str) -> dict[str, str]:
    class Mutated(PlainSuite):
        @pytest.fixture
        def backend(self) -> AttentionBackend:
            return backend_class()

    return run_suite(Mutated, only=rule).failed


@pytest.mark.slow
@pytest.mark.parametrize("mutant", KERNEL_FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_kernel_fails(mutant: type[PlainAttention]) -> None:
    class Mutated(PlainAttentionBackend):
        impl = mutant

    rule = KERNEL_FAULTS[mutant]
    assert rule in failures(Mutated, rule)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", BACKEND_FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_answer_fails(mutant: type[PlainAttentionBackend]) -> None:
    """L12.20."""
    rule = BACKEND_FAULTS[mutant]
    assert rule in failures(mutant, rule)


def test_a_false_promise_of_batch_invariance_fails() -> None:
    """L12.20."""

    class Leaking(PlainAttention):
        def forward(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
            return super().forward(query, *rest).mul_(1 + 1e-6 * rest[3].num_rows)

    class Promising(PlainAttentionBackend):
        impl = Leaking

        def refuse(self, need: AttentionNeed) -> str | None:
            return super().refuse(replace(need, batch_invariant=False))

    rule = "test_batch_invariance_is_kept_where_it_is_accepted"
    assert rule in failures(Promising, rule)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_a_faulty_probe_fails(name: str) -> None:
    class Mutated(PlainSuite):
        @pytest.fixture
        def declaration(self) -> PluginDeclaration:
            return replace(SOUND, probe=PROBES[name])  # type: ignore[arg-type]

    assert "test_its_probe_answers" in run_suite(Mutated, only="probe").failed


def test_the_oracle_agrees_with_torch_on_a_plain_prompt() -> None:
    problem = make_problem(AttentionShape(num_heads=2, num_kv_heads=2), [(0, 11)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        problem.query.transpose(0, 1)[None],
        problem.key.transpose(0, 1)[None],
        problem.value.transpose(0, 1)[None],
        is_causal=True,
    )
    torch.testing.assert_close(dense_attention(problem)[0].float(), expected[0].transpose(0, 1))


def test_the_issues_name_is_the_same_class() -> None:
    assert AttentionBackendConformance is AttentionBackendSuite


def test_problems_are_what_they_say() -> None:
    problem: AttentionProblem = make_problem(AttentionShape(), [(5, 3), (0, 1)])
    assert problem.num_tokens == 4
    assert problem.slot_mapping().shape == (4,)
    slots = torch.cat([problem.slots(0, 0, 8), problem.slots(1, 0, 1)])
    assert len(set(slots.tolist())) == 9, "no slot belongs to two tokens"
    assert bool((slots >= problem.shape.block_size).all()), "block 0 belongs to nobody"
    assert int(torch.isnan(problem.kv_cache()).sum()) > 0
