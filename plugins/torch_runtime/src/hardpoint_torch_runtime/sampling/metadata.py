"""What the sampler needs to know about the rows of one step. Legend: S sampled rows, V vocabulary.

A part that no row uses is None or empty, so that its work is skipped for the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.errors import ConfigError

__all__ = ["LogitEdits", "LogprobRequest", "Penalties", "SamplingMetadata", "TokenLists"]


@dataclass(frozen=True, slots=True)
class TokenLists:
    """(row, token) pairs: int64 [N] each, rows ascending."""

    rows: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Values added to single logits: float32 [N] beside the pairs."""

    targets: TokenLists
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """For the P rows that use any penalty.

    ``rows`` int64 [P]; ``repetition``, ``frequency``, ``presence`` float32 [P]; ``token_ids`` int64 [P, L], every known
    token, the vocabulary size as padding; ``is_output`` bool [P, L] marks generated ones.
    """

    rows: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    token_ids: torch.Tensor
    is_output: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """``rows`` int64 [N]; ``counts`` int64 [N], alternatives per row, -1 for the whole vocabulary."""

    rows: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """All batch state of one sampler call.

    Attributes:
        slots: int32 [S].
        random_rows: int64 [R'], rows drawn at random; empty when all are greedy.
        temperature: float32 [R'] for those rows; None when there are none.
        uniforms: float64 [R'] in [0, 1), one draw per random row, made beforehand.
        min_p, top_p: float32 [R']; top_k: int64 [R'], 0 for all; None when no row uses it.
        allowed: allowed tokens of rows with a whitelist.
        grammar: bool [N, V], True where legal, for rows ``grammar_rows`` int64 [N].
        bad_words: tokens that would complete an excluded sequence now.
        stop_tokens: stop tokens of rows below their minimum length.
    """

    slots: np.ndarray
    random_rows: torch.Tensor
    temperature: torch.Tensor | None = None
    uniforms: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    allowed: TokenLists | None = None
    grammar: torch.Tensor | None = None
    grammar_rows: torch.Tensor | None = None
    bad_words: TokenLists | None = None
    stop_tokens: TokenLists | None = None
    logit_bias: LogitEdits | None = None
    penalties: Penalties | None = None
    logprobs: LogprobRequest | None = None

    def __post_init__(self) -> None:
        if not self.all_greedy and (self.temperature is None or self.uniforms is None):
            raise ConfigError(f"{len(self.random_rows)} random rows were given without temperature or without draws")

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def all_greedy(self) -> bool:
        return self.random_rows.shape[0] == 0

    @property
    def all_random(self) -> bool:
        return len(self.random_rows) == self.num_rows
