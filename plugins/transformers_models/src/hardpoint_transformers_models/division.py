"""How tensor parallelism divides a model of ``transformers``: by the plan that its configuration carries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from hardpoint.errors import ConfigError, UnsupportedModelError

__all__ = ["Cut", "Division", "Share"]


class Share(Enum):
    """What a rank holds of a linear layer, and what it takes and gives."""

    WHOLE = "replicated"
    COLUMNS = "colwise"
    COLUMNS_GATHERED = "colwise_gather_output"
    ROWS = "rowwise"
    ROWS_OF_WHOLE = "rowwise_split_input"


class Cut(Enum):
    """What a rank holds of a stack [experts, outputs, inputs]. ``num_parts`` matrices lie behind one another in it."""

    NONE = "replicated"
    OUTPUTS = "colwise"
    PACKED_OUTPUTS = "packed_colwise"
    INPUTS = "rowwise"

    @property
    def num_parts(self) -> int:
        return 2 if self is Cut.PACKED_OUTPUTS else 1

    def share(self, stack: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """That of ``rank`` among ``size``, which divide it."""
        if self is Cut.NONE:
            return stack
        if self is Cut.INPUTS:
            return stack.chunk(size, 2)[rank]
        return torch.cat([part.chunk(size, 1)[rank] for part in stack.chunk(self.num_parts, 1)], 1)


REPLICATED = ("replicate", "replicated", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles that differ in what becomes of gradients only."""
TABLES = ("embedding_rowwise",)
"""Tables are divided by the vocabulary whatever a plan says."""
EXPERTS = "moe_tp_experts"
"""A module of stacks, which the plan divides one by one, and whose outputs the ranks have parts of."""


@dataclass(frozen=True, slots=True)
class Division:
    """The share of every linear layer, by its name in the base model with ``*`` for numbers; ``size`` ranks.

    ``stacks`` are, for every module of experts, the cuts of its parameters.
    """

    architecture: str
    size: int = 1
    shares: Mapping[str, Share] = field(default_factory=dict)
    stacks: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)

    @classmethod
    def of(cls, architecture: str, plan: Mapping[str, Any] | None, size: int) -> Division:
        """Raises ``UnsupportedModelError`` where several ranks are asked for and the ``plan`` is not understood."""
        if size == 1:
            return cls(architecture)
        known = {share.value: share for share in Share} | dict.fromkeys(REPLICATED, Share.WHOLE)
        plan = dict(plan or {})
        stacks = {name: _cuts(plan, name) for name in [name for name, style in plan.items() if style == EXPERTS]}
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
        return cls(architecture, size, shares, stacks)

    def share(self, name: str) -> Share:
        """Of the linear layer ``name`` of the base model."""
        return self.shares.get(_pattern(name), Share.WHOLE)

    def cuts(self, name: str) -> Mapping[str, Cut]:
        """Of the parameters of the module ``name`` of the base model; empty for one that is no module of experts."""
        return self.stacks.get(_pattern(name), {})

    def shrink(self, base: torch.nn.Module) -> None:
        """Give every linear layer of ``base``, which is on the device without memory, one rank's sizes.

        Raises ``ConfigError`` for a size that the ranks do not divide.
        """
        for name, module in list(base.named_modules()):
            if self.cuts(name):
                self.shrink_stacks(name, module)
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

    def shrink_stacks(self, name: str, module: torch.nn.Module) -> None:
        """The same for the stacks of the experts ``module``."""
        for own, cut in self.cuts(name).items():
            parameter = module._parameters.get(own)
            if parameter is None or parameter.dim() != 3:
                raise UnsupportedModelError(
                    f"{self.architecture} cannot be divided among {self.size} ranks: {name} has no stack {own}, which "
                    "its plan divides; set --tensor-parallel-size 1"
                )
            num_experts, outputs, inputs = parameter.shape
            if cut is Cut.INPUTS:
                inputs = self._part(f"{name}.{own}", inputs)
            elif cut is not Cut.NONE:
                outputs = self._part(f"{name}.{own}", outputs // cut.num_parts) * cut.num_parts
            empty = torch.empty((num_experts, outputs, inputs), dtype=parameter.dtype, device="meta")
            module.register_parameter(own, torch.nn.Parameter(empty, requires_grad=False))

    def _part(self, name: str, total: int) -> int:
        share, rest = divmod(total, self.size)
        if rest:
            raise ConfigError(
                f"{self.architecture}: {name} has {total} rows or columns to divide, which --tensor-parallel-size "
                f"{self.size} does not"
            )
        return share


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _cuts(plan: dict[str, Any], module: str) -> dict[str, Cut]:
    """Those of the parameters of ``module``; takes them and the module out of ``plan``."""
    del plan[module]
    known = {cut.value: cut for cut in Cut}
    inside = [name for name in plan if name.startswith(f"{module}.") and plan[name] in known]
    return {name.removeprefix(f"{module}."): known[plan.pop(name)] for name in inside}
