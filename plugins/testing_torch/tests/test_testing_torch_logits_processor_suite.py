"""Sound logits processors pass their suite, and a faulty one fails the rule that it breaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import NewRow
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import LogitsProcessorSuite

BANNED = (3, 11, 40, 90)


class Ban(LogitsProcessor):
    """Forbids the tokens that a request lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def add(self, row: NewRow) -> bool:
        self.tokens.pop(row.slot, None)
        tokens = row.sampling.extensions.get("ban")
        if tokens:
            self.tokens[row.slot] = list(tokens)
        return bool(tokens)

    def remove(self, slot: int) -> None:
        self.tokens.pop(slot, None)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        for index, slot in enumerate(slots.tolist()):
            if slot in self.tokens:
                logits[index, self.tokens[slot]] = -torch.inf
        return logits


class NearTheBest(LogitsProcessor):
    """Keeps what is within a distance of the best; makes a new tensor."""

    argmax_invariant = True

    def __init__(self) -> None:
        self.distance: dict[int, float] = {}

    def add(self, row: NewRow) -> bool:
        self.distance[row.slot] = float(row.sampling.extensions.get("near", torch.inf))
        return "near" in row.sampling.extensions

    def remove(self, slot: int) -> None:
        self.distance.pop(slot, None)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        if not len(slots):
            return logits
        allowed = torch.tensor([self.distance.get(slot, torch.inf) for slot in slots.tolist()])[:, None]
        return logits.masked_fill(logits < logits.amax(dim=1, keepdim=True) - allowed, -torch.inf)


class BanSuite(LogitsProcessorSuite):
    sampling: ClassVar[Mapping[str, Any]] = {"extensions": {"ban": BANNED}}
    processor: ClassVar[type[LogitsProcessor]] = Ban

    def create_processor(self, ctx: WorkerContext) -> LogitsProcessor:
        return self.processor()


class NearSuite(BanSuite):
    sampling: ClassVar[Mapping[str, Any]] = {"extensions": {"near": 0.5}}
    processor: ClassVar[type[LogitsProcessor]] = NearTheBest


class TestBan(BanSuite):
    pass


class TestNearTheBest(NearSuite):
    pass


class AlwaysOn(Ban):
    """The whole batch is treated like its first affected row."""

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        for tokens in self.tokens.values():
            logits[:, tokens] = -torch.inf
        return logits


class ByPosition(Ban):
    """Takes row i for slot i."""

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        return super().apply(logits, np.arange(len(slots)))


class AllSlotsAtOnce(Ban):
    """Expects every known slot in every step."""

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        for slot in self.tokens:
            logits[slots.tolist().index(slot), self.tokens[slot]] = -torch.inf
        return logits


class NeverForgets(Ban):
    def remove(self, slot: int) -> None:
        pass

    def add(self, row: NewRow) -> bool:
        tokens = row.sampling.extensions.get("ban")
        self.tokens.setdefault(row.slot, []).extend(tokens or ())
        return bool(tokens)


class OnlyRemoveForgets(Ban):
    def add(self, row: NewRow) -> bool:
        tokens = row.sampling.extensions.get("ban")
        self.tokens.setdefault(row.slot, []).extend(tokens or ())
        return bool(tokens)


class KnowsEverySlot(Ban):
    def remove(self, slot: int) -> None:
        del self.tokens[slot]


class SharedState(Ban):
    everybody: ClassVar[dict[int, list[int]]] = {}

    def __init__(self) -> None:
        self.tokens = self.everybody

    def add(self, row: NewRow) -> bool:
        tokens = row.sampling.extensions.get("ban")
        if tokens:
            self.tokens[row.slot] = list(tokens)
        return bool(tokens)


class Nothing(Ban):
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        return logits


class ClaimsEverybody(Ban):
    def add(self, row: NewRow) -> bool:
        super().add(row)
        return True


class ReturnsNothing(Ban):
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        super().apply(logits, slots)
        return None  # type: ignore[return-value]


class Halves(Ban):
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        return super().apply(logits, slots).half()


class NeedsARow(Ban):
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        logits.max()
        return super().apply(logits, slots)


class BringsBack(Ban):
    """Clamps, so that minus infinity becomes a number."""

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        known = [index for index, slot in enumerate(slots.tolist()) if slot in self.tokens]
        logits[known] = logits[known].clamp_min(-1e4)
        return super().apply(logits, slots)


class YieldsNoNumbers(Ban):
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        known = [index for index, slot in enumerate(slots.tolist()) if slot in self.tokens]
        logits[known] = logits[known] - logits[known].amin(dim=1, keepdim=True)
        return super().apply(logits, slots)


class FalselyInvariant(Ban):
    argmax_invariant = True


class NeedlesslyChanging(NearTheBest):
    argmax_invariant = False


class AnswersNone(Ban):
    def add(self, row: NewRow) -> bool:
        return super().add(row) or None  # type: ignore[return-value]


class NeedsGradients(Ban):
    """Workers compute without them."""

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        tracked = logits.detach().clone().requires_grad_(True)
        (tracked * 2).sum().backward()
        return super().apply(logits, slots)


class SortsTheSlots(Ban):
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        result = super().apply(logits, slots)
        slots.sort()
        return result


class Accumulates(Ban):
    """Keeps a sum over all rows it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        self.seen += len(slots)
        for index, slot in enumerate(slots.tolist()):
            if slot in self.tokens:
                logits[index] -= self.seen
        return super().apply(logits, slots)


FAULTS: dict[type[LogitsProcessor], str] = {
    AlwaysOn: "test_other_requests_keep_every_bit",
    ByPosition: "test_rows_may_come_in_any_order",
    AllSlotsAtOnce: "test_a_step_need_not_hold_every_slot",
    NeverForgets: "test_removing_ends_the_effect",
    OnlyRemoveForgets: "test_adding_again_replaces",
    KnowsEverySlot: "test_removing_an_empty_slot_is_no_error",
    SharedState: "test_instances_share_nothing",
    Nothing: "test_add_says_whether_the_request_is_affected",
    ClaimsEverybody: "test_add_says_whether_the_request_is_affected",
    AnswersNone: "test_add_says_whether_the_request_is_affected",
    ReturnsNothing: "test_rows_may_come_in_any_order",
    Halves: "test_rows_may_come_in_any_order",
    NeedsARow: "test_empty_steps",
    BringsBack: "test_forbidden_tokens_stay_forbidden",
    YieldsNoNumbers: "test_forbidden_tokens_stay_forbidden",
    FalselyInvariant: "test_argmax_invariance_is_declared_truthfully",
    NeedsGradients: "test_a_worker_runs_it",
    SortsTheSlots: "test_rows_may_come_in_any_order",
    Accumulates: "test_a_step_need_not_hold_every_slot",
    NeedlesslyChanging: "test_argmax_invariance_is_declared_truthfully",
}


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_processor_fails(mutant: type[LogitsProcessor]) -> None:
    base = NearSuite if issubclass(mutant, NearTheBest) else BanSuite

    class Mutated(base):  # type: ignore[misc,valid-type]
        processor: ClassVar[type[LogitsProcessor]] = mutant

    rule = FAULTS[mutant]
    assert rule in run_suite(Mutated, only=rule).failed


@pytest.mark.slow
def test_without_an_affected_request_the_skip_says_what_to_set() -> None:
    class Unknown(BanSuite):
        sampling: ClassVar[Mapping[str, Any]] = {}

    outcome = run_suite(Unknown, only="test_rows_may_come_in_any_order")
    assert "set 'sampling'" in outcome.skipped["test_rows_may_come_in_any_order"]


@pytest.mark.slow
def test_one_that_acts_on_everybody_needs_no_class_of_its_own() -> None:
    class AlwaysNear(NearTheBest):
        def add(self, row: NewRow) -> bool:
            self.distance[row.slot] = 0.5
            return True

    class Unknown(NearSuite):
        sampling: ClassVar[Mapping[str, Any]] = {}
        processor: ClassVar[type[LogitsProcessor]] = AlwaysNear

    outcome = run_suite(Unknown)
    assert outcome.failed == {}
    assert "the same as sampling" in outcome.skipped["test_removing_ends_the_effect"]
    assert "test_a_worker_runs_it" in outcome.passed
