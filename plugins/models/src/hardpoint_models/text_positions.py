"""Where a token stands in its text, for encoders that ask for more than its number.

Texts lie behind one another in a step, and each of them whole. Legend: T tokens of the step.
"""

from __future__ import annotations

import torch

__all__ = ["num_separators_before", "positions_behind_padding"]


def positions_behind_padding(positions: torch.Tensor, token_ids: torch.Tensor | None, padding_id: int) -> torch.Tensor:
    """int64 [T]: tokens other than padding are counted from ``padding_id + 1`` on, as fairseq's were trained to be;
    padding stands at its own id. Given as embeddings, no token is padding."""
    if token_ids is None:
        return positions + (padding_id + 1)
    counts_in = token_ids != padding_id
    return torch.where(counts_in, _count_since_start(counts_in, positions) + (padding_id + 1), padding_id)


def num_separators_before(positions: torch.Tensor, token_ids: torch.Tensor, separator_id: int) -> torch.Tensor:
    """int64 [T]: how many tokens before each one, in its own text, are separators."""
    return _count_since_start(token_ids == separator_id, positions)


def _count_since_start(marked: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [T]: marked tokens of the same text before each one. ``positions`` count tokens from the text's first."""
    marks = marked.long()
    before = marks.cumsum(0) - marks
    # Behind the step's own tokens lies padding, whose positions mean nothing.
    starts = (torch.arange(len(marks), device=marks.device) - positions).clamp_(min=0)
    return (before - before[starts]).clamp_(min=0)
