"""Logits processors hear of every token that joins a request after its row, once and in order."""

from __future__ import annotations

import numpy as np
import torch

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import NewRow, TokenUpdate
from hardpoint_torch_runtime.runner.batch_state import BatchState
from hardpoint_torch_runtime.runner.samples import StepSamples


class Listener(LogitsProcessor):
    def __init__(self) -> None:
        self.heard: list[tuple[int, int]] = []

    def add(self, row: NewRow) -> bool:
        return True

    def remove(self, slot: int) -> None: ...

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        self.heard += zip(slots.tolist(), token_ids.tolist(), strict=True)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        return logits


class Slots:
    """The part of the slots' state that takes sampled tokens."""

    def __init__(self) -> None:
        self.appended: list[int] = []

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        self.appended += token_ids.tolist()


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def make() -> tuple[BatchState, Listener, Slots]:
    listener, slots = Listener(), Slots()
    state = BatchState(slots, None, None, None, [listener])  # type: ignore[arg-type]
    return state, listener, slots


def test_sampled_tokens_are_remembered_and_told() -> None:
    state, listener, slots = make()
    state.remember(int32(2, 0), StepSamples(int32(1, 1), int32(7, 8), {}))
    state.remember(int32(2), StepSamples(int32(1), int32(9), {}))
    assert listener.heard == [(2, 7), (0, 8), (2, 9)]
    assert slots.appended == [7, 8, 9]


def test_what_is_no_token_holds_its_place_untold() -> None:
    """R3.96: a step planned meanwhile goes on behind it."""
    state, listener, slots = make()
    state.remember(int32(2, 0, 1), StepSamples(int32(1, 1, 1), int32(7, 8, 9), {1: "broken"}))
    assert listener.heard == [(2, 7), (1, 9)]
    assert slots.appended == [7, 0, 9]
    assert state.refused == {0: "broken"}


def test_of_tokens_learned_elsewhere_only_news_are_told() -> None:
    """An id of -1 stands for a token that was sampled, and told, here."""
    state, listener, _ = make()
    state._observe_known(int32(3, 1, 0), TokenUpdate(int32(2, 1, 0), int32(-1, 5, 6)))
    assert listener.heard == [(3, 5), (1, 6)]
    state._observe_known(int32(3), TokenUpdate(int32(1), int32(-1)))
    assert len(listener.heard) == 2
