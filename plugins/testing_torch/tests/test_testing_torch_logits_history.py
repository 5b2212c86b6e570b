"""The kit for logits processors that act on what was generated: a sound one passes, forgetful ones fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import NewRow
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import LogitsProcessorSuite

RULE = "test_what_is_observed_counts_like_what_a_row_brings"


class NoTokenTwice(LogitsProcessor):
    """Forbids every token that the answer holds."""

    def __init__(self) -> None:
        self.said: dict[int, list[int]] = {}

    def add(self, row: NewRow) -> bool:
        self.said[row.slot] = row.token_ids[row.num_prompt_tokens :].tolist()
        return True

    def remove(self, slot: int) -> None:
        self.said.pop(slot, None)

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self.said[slot].append(token)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        for index, slot in enumerate(slots.tolist()):
            logits[index, self.said[slot]] = -torch.inf
        return logits


class HistorySuite(LogitsProcessorSuite):
    other_sampling: ClassVar[Mapping[str, Any] | None] = None
    answer: ClassVar[Sequence[int]] = (8, 9, 30)
    processor: ClassVar[type[LogitsProcessor]] = NoTokenTwice

    def create_processor(self, ctx: WorkerContext) -> LogitsProcessor:
        return self.processor()


class TestNoTokenTwice(HistorySuite):
    pass


class ForgetsOnResuming(NoTokenTwice):
    def add(self, row: NewRow) -> bool:
        self.said[row.slot] = []
        return True


class DoesNotListen(NoTokenTwice):
    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None: ...


class HearsTheFirstSlotOnly(NoTokenTwice):
    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        super().observe(slots[:1], token_ids[:1])


class CountsThePrompt(NoTokenTwice):
    def add(self, row: NewRow) -> bool:
        self.said[row.slot] = row.token_ids.tolist() if len(row.token_ids) > row.num_prompt_tokens else []
        return True


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [ForgetsOnResuming, DoesNotListen, HearsTheFirstSlotOnly, CountsThePrompt])
def test_a_forgetful_processor_fails(mutant: type[LogitsProcessor]) -> None:
    class Mutated(HistorySuite):
        processor: ClassVar[type[LogitsProcessor]] = mutant

    assert RULE in run_suite(Mutated, only=RULE).failed
