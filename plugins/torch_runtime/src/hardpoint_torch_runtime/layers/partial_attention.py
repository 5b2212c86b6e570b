"""Attention over parts of the keys, put together by log-sum-exp.

Legend: T query tokens, H heads, V size of a head's values. With o_i the attention over part i alone and l_i the
log-sum-exp of its scores, attention over all parts is ``sum_i exp(l_i - l) o_i`` with ``l = log sum_i exp(l_i)``.
A sink is one more score; it must enter exactly one part (R5.83: the prefix), or it would be counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Partial", "merge_partials", "rank_share", "total_lse"]


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over some of the keys: ``output`` [T, H, V] and ``lse`` [T, H].

    A query that saw none of the keys has ``lse`` -inf (some kernels say +inf; that is taken for the same) and whatever
    ``output``, NaN included.
    """

    output: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        if self.output.shape[:-1] != self.lse.shape:
            raise ValueError(
                f"a partial result of shape {tuple(self.output.shape)} needs one log-sum-exp per token and head, "
                f"{tuple(self.output.shape[:-1])}, not {tuple(self.lse.shape)}"
            )

    @property
    def known_lse(self) -> torch.Tensor:
        """``lse`` in the dtype merging computes in, -inf wherever nothing was seen."""
        lse = self.lse.to(_wide(self.lse.dtype))
        return torch.where(lse == torch.inf, -torch.inf, lse)


def merge_partials(partials: Sequence[Partial], out: torch.Tensor | None = None) -> Partial:
    """All parts as one, computed in float32 (float64 if a log-sum-exp is).

    The output goes into ``out`` if given, else it has the dtype of the first part's. Where no part saw a key, output
    is 0 and log-sum-exp -inf. Raises ``ValueError`` for no parts, and for parts of different shapes.
    """
    if not partials:
        raise ValueError("there is nothing to merge: give one partial result or more")
    shapes = {tuple(partial.output.shape) for partial in partials}
    if len(shapes) > 1:
        raise ValueError(f"partial results to merge must be of one shape, not {sorted(shapes)}")
    lses = [partial.known_lse for partial in partials]
    total = total_lse(lses)
    merged = _weighed(partials[0].output, lses[0], total)
    for partial, lse in zip(partials[1:], lses[1:], strict=True):
        merged += _weighed(partial.output, lse, total)
    if out is None:
        return Partial(merged.to(partials[0].output.dtype), total)
    return Partial(out.copy_(merged), total)


def total_lse(lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Log-sum-exp [T, H] over all parts'; -inf where all are."""
    return torch.logsumexp(torch.stack(list(lses)), dim=0)


def rank_share(partial: Partial, lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """What ``partial`` adds to the merged output, [T, H, V] in float32 (float64 if its log-sum-exp is).

    ``lses``: those of all parts, its own among them. For parts that lie on different ranks: these exchange the
    log-sum-exps, and the sum of their shares is the result, to be reduced by any collective that adds.
    """
    known = [Partial(partial.output, lse).known_lse for lse in lses]
    return _weighed(partial.output, partial.known_lse, total_lse(known))


def _weighed(output: torch.Tensor, lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    is_empty = lse == -torch.inf
    # Without the first choice, -inf less -inf would be NaN; without the second, so would zero times a NaN output.
    weight = torch.where(is_empty, 0.0, torch.exp(lse - torch.where(is_empty, 0.0, total)))
    return torch.where(is_empty.unsqueeze(-1), 0.0, output.to(lse.dtype) * weight.unsqueeze(-1))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
