"""A logits processor: no sequence of ``size`` tokens occurs twice in an answer.

Small models fall into loops under greedy decoding. This forbids the token that would complete a sequence of tokens that
the answer already contains. The prompt does not count: a question may be quoted.
"""

from __future__ import annotations

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces import LogitsProcessor, NewRow, WorkerContext, plugin


class Options(BaseModel):
    """Options under ``plugins.logits_processor.no_repeat_ngrams``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(default=3, ge=1, le=64, description="length in tokens of what may not occur twice")


class Answer:
    """One request's answer so far, and which token followed each sequence of ``size - 1`` tokens in it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], list[int]] = {}

    def append(self, token_id: int) -> None:
        if len(self._recent) == self._size - 1:
            self._followers.setdefault(self._recent, []).append(token_id)
        if self._size > 1:
            self._recent = (*self._recent, token_id)[-(self._size - 1) :]

    @property
    def forbidden(self) -> list[int]:
        return self._followers.get(self._recent, []) if len(self._recent) == self._size - 1 else []


class NoRepeatNgrams(LogitsProcessor):
    """Changes the most likely token, so it acts on greedy rows too (``argmax_invariant`` stays False)."""

    def __init__(self, options: Options) -> None:
        self._size = options.size
        self._answers: dict[int, Answer] = {}

    def add(self, row: NewRow) -> bool:
        """A request that resumes after preemption brings its answer along."""
        answer = self._answers[row.slot] = Answer(self._size)
        for token_id in row.token_ids[row.num_prompt_tokens :].tolist():
            answer.append(token_id)
        return True

    def remove(self, slot: int) -> None:
        self._answers.pop(slot, None)

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self._answers[slot].append(token_id)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """float32 [S, V]; one scatter for the whole batch."""
        forbidden = [self._answers[slot].forbidden for slot in slots.tolist()]
        rows = [row for row, ids in enumerate(forbidden) for _ in ids]
        if rows:
            columns = [token_id for ids in forbidden for token_id in ids]
            logits[rows, columns] = -torch.inf
        return logits


@plugin("logits_processor", options=Options)
def create(ctx: WorkerContext, options: Options) -> LogitsProcessor:
    return NoRepeatNgrams(options)
