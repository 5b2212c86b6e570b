"""How tensor parallelism divides a model of ``transformers``: by the plan that its configuration carries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from hardpoint.errors import ConfigError, UnsupportedModelError

__all__ = ["Division", "Share"]


class Share(Enum):
    """What a rank holds of a linear layer, and what it takes and gives."""

    WHOLE = "replicated"
    COLUMNS = "colwise"
    COLUMNS_GATHERED = "colwise_gather_output"
    ROWS = "rowwise"
    ROWS_OF_WHOLE = "rowwise_split_input"


REPLICATED = ("replicate", "replicated", "replicated_with_grad_allreduce")
TABLES = ("embedding_rowwise",)
"""Tables are divided by the vocabulary whatever a plan says."""


@dataclass(frozen=True, slots=True)
class Division:
    """The share of every linear layer, by its name in the base model with ``*`` for numbers; ``size`` ranks."""

    architecture: str
    size: int = 1
    shares: Mapping[str, Share] = field(default_factory=dict)

    @classmethod
    def of(cls, architecture: str, plan: Mapping[str, Any] | None, size: int) -> Division:
        """Raises ``UnsupportedModelError`` where several ranks are asked for and the ``plan`` is not understood."""
        if size == 1:
            return cls(architecture)
        known = {share.value: share for share in Share} | dict.fromkeys(REPLICATED, Share.WHOLE)
        plan = plan or {}
        alien = sorted({str(style) for style in plan.values() if style not in known and style not in TABLES})
        shares = {name: known[style] for name, style in plan.items() if style in known}
        reason = ""
        if alien:
            reason = f"its plan for tensor parallelism has parts that are {', '.join(alien)}"
        elif all(share is Share.WHOLE for share in shares.values()):
            reason = "its configuration has no plan for tensor parallelism"
        if reason:
            raise UnsupportedModelError(
                f"{architecture} cannot be divided among {size} ranks: {reason}; set --tensor-parallel-size 1"
            )
        return cls(architecture, size, shares)

    def share(self, name: str) -> Share:
        """Of the linear layer ``name`` of the base model."""
        return self.shares.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), Share.WHOLE)

    def shrink(self, base: torch.nn.Module) -> None:
        """Give every linear layer of ``base``, which is on the device without memory, one rank's sizes.

        Raises ``ConfigError`` for a size that the ranks do not divide.
        """
        for name, module in list(base.named_modules()):
            share = self.share(name)
            if type(module) is not torch.nn.Linear or share not in (Share.COLUMNS, Share.ROWS):
                continue
            inputs, outputs = module.in_features, module.out_features
            if share is Share.COLUMNS:
                outputs = self._part(name, outputs)
            else:
                inputs = self._part(name, inputs)
            smaller = torch.nn.Linear(
                inputs, outputs, bias=module.bias is not None, device="meta", dtype=module.weight.dtype
            )
            parent, _, own = name.rpartition(".")
            setattr(base.get_submodule(parent), own, smaller)

    def _part(self, name: str, total: int) -> int:
        share, rest = divmod(total, self.size)
        if rest:
            raise ConfigError(
                f"{self.architecture}: {name} has {total} rows or columns to divide, which --tensor-parallel-size "
                f"{self.size} does not"
            )
        return share
