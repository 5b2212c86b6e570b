"""Which experts a token goes to, and with which weights.

Legend: T tokens, C hidden size, E experts, G groups of E / G neighboring experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["ExpertRouter", "RoutingParameters"]

MIN_SUM = 1e-20
"""Added to sums of weights before dividing by them; sigmoid scores may all be zero."""


@dataclass(frozen=True, slots=True)
class RoutingParameters:
    """How experts are scored and chosen. Raises ``ValueError`` naming the field that cannot be.

    Attributes:
        scoring: scores are the softmax over all experts, or each expert's own sigmoid.
        renormalizes: the chosen experts' weights sum to one (before ``scale``).
        num_groups, num_kept_groups: experts are chosen from the best ``num_kept_groups`` of ``num_groups`` only.
        group_score_size: a group is as good as the sum of its best experts, this many of them.
        has_correction_bias: a stored bias per expert is added to scores when choosing, not when weighting.
        scale: factor on all weights.
        in_float32: logits are computed in float32 from a float32 gate, whatever the compute dtype.
        has_bias: the gate has one, which counts for choosing and for weighting.
        weighs_inputs: weights are factors on what the chosen experts are given, not on what they yield.
    """

    num_experts: int
    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalizes: bool = True
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score_size: int = 2
    has_correction_bias: bool = False
    scale: float = 1.0
    in_float32: bool = False
    has_bias: bool = False
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={self.num_experts}")
        if not 1 <= self.num_kept_groups <= self.num_groups:
            raise ValueError(f"num_kept_groups={self.num_kept_groups} must be 1 to num_groups={self.num_groups}")
        if not 1 <= self.num_chosen <= self.group_size * self.num_kept_groups:
            raise ValueError(
                f"num_chosen={self.num_chosen} must be 1 to {self.group_size * self.num_kept_groups}, the experts in "
                f"{self.num_kept_groups} of {self.num_groups} groups"
            )
        if self.num_groups > 1 and not 1 <= self.group_score_size <= self.group_size:
            raise ValueError(
                f"group_score_size={self.group_score_size} must be 1 to {self.group_size}, the experts of a group"
            )

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups


class ExpertRouter(torch.nn.Module):
    """Hidden states [T, C] to float32 weights and int64 expert numbers, both [T, K].

    Every rank holds the whole gate and chooses alike; gates are small and decisive, so no method quantizes them.
    Parameters: ``weight`` [E, C], ``bias`` [E] where the gate has one and, with a correction bias,
    ``e_score_correction_bias`` float32 [E].
    """

    def __init__(self, hidden_size: int, routing: RoutingParameters, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.routing = routing
        self._dtype = torch.float32 if routing.in_float32 else dtype
        empty = torch.empty(routing.num_experts, hidden_size, dtype=self._dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)
        self.bias: torch.nn.Parameter | None = None
        if routing.has_bias:
            bias = torch.empty(routing.num_experts, dtype=self._dtype, device=device)
            self.bias = torch.nn.Parameter(bias, requires_grad=False)
        self.e_score_correction_bias: torch.nn.Parameter | None = None
        if routing.has_correction_bias:
            correction = torch.empty(routing.num_experts, dtype=torch.float32, device=device)
            self.e_score_correction_bias = torch.nn.Parameter(correction, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        how = self.routing
        logits = F.linear(hidden.to(self._dtype), self.weight, self.bias).float()
        scores = logits.softmax(dim=-1) if how.scoring == "softmax" else logits.sigmoid()
        correction = self.e_score_correction_bias
        merits = scores if correction is None else scores + correction
        if how.num_kept_groups < how.num_groups:
            merits = self._within_best_groups(merits)
        chosen = merits.topk(how.num_chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if how.renormalizes:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + MIN_SUM)
        return weights if how.scale == 1.0 else weights * how.scale, chosen

    def _within_best_groups(self, merits: torch.Tensor) -> torch.Tensor:
        """``merits`` [T, E], with -inf for experts of other groups."""
        how = self.routing
        grouped = merits.unflatten(-1, (how.num_groups, how.group_size))
        group_merits = grouped.topk(how.group_score_size, dim=-1).values.sum(dim=-1)
        kept = group_merits.topk(how.num_kept_groups, dim=-1).indices
        is_left_out = torch.ones_like(group_merits, dtype=torch.bool).scatter_(-1, kept, False)
        return grouped.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)

    def extra_repr(self) -> str:
        how = self.routing
        return f"{how.num_chosen} of {how.num_experts}, {how.scoring}"
