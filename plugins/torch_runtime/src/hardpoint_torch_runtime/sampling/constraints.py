"""Processors that can change the argmax; they act on greedy and random rows alike. All work in place on float32
[S, V]."""

from __future__ import annotations

import numpy as np
import torch

from hardpoint_torch_runtime.sampling.metadata import LogitEdits, Penalties, TokenLists

__all__ = ["add_bias", "apply_penalties", "exclude", "keep_legal", "keep_only", "unpack_grammar_bits"]


def keep_only(logits: torch.Tensor, allowed: TokenLists) -> None:
    """Rows named in ``allowed`` keep their listed tokens only."""
    kept = logits[allowed.rows, allowed.token_ids]
    logits[allowed.rows.unique()] = -torch.inf
    logits[allowed.rows, allowed.token_ids] = kept


def keep_legal(logits: torch.Tensor, rows: torch.Tensor, legal: torch.Tensor) -> None:
    """``legal`` bool [N, V] for ``rows`` [N]."""
    logits[rows] = logits[rows].masked_fill(~legal, -torch.inf)


def exclude(logits: torch.Tensor, excluded: TokenLists) -> None:
    logits[excluded.rows, excluded.token_ids] = -torch.inf


def add_bias(logits: torch.Tensor, edits: LogitEdits) -> None:
    logits[edits.targets.rows, edits.targets.token_ids] += edits.values


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Repetition over all known tokens, then frequency and presence over generated ones (R6.15)."""
    rows = logits[penalties.rows]
    num_rows, vocabulary = rows.shape
    # One column more than the vocabulary takes the padding.
    counts = rows.new_zeros((num_rows, vocabulary + 1))
    counts.scatter_add_(1, penalties.token_ids, penalties.is_output.to(rows.dtype))
    counts = counts[:, :vocabulary]
    known = torch.zeros((num_rows, vocabulary + 1), dtype=torch.bool, device=rows.device)
    known.scatter_(1, penalties.token_ids, True)
    known = known[:, :vocabulary]
    limits = torch.finfo(rows.dtype)
    # Zero in float32 would make NaN of an excluded token.
    factor = torch.where(known, penalties.repetition.clamp(min=limits.tiny).unsqueeze(1), 1.0)
    # A penalty near zero divides beyond what float32 holds; the token is then simply the best one.
    rows = torch.where(rows > 0, (rows / factor).clamp_(max=limits.max), rows * factor)
    rows -= penalties.frequency.unsqueeze(1) * counts
    rows -= penalties.presence.unsqueeze(1) * (counts > 0)
    logits[penalties.rows] = rows


def unpack_grammar_bits(bits: np.ndarray, vocabulary: int) -> torch.Tensor:
    """int32 [N, ceil(V / 32)] to bool [N, V]; bits beyond the vocabulary are ignored (R6.47)."""
    words = np.ascontiguousarray(bits, dtype="<i4").view(np.uint8)
    flags = np.unpackbits(words, axis=1, bitorder="little", count=vocabulary)
    return torch.from_numpy(flags.view(np.bool_))
