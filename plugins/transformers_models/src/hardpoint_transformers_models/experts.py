"""Stacks of experts: how stored matrices fill them, and how tensor parallelism divides them.

Every rank has a part of every expert, as of any feed-forward block: some of the outputs of its first matrices, and of
the inputs of its last. What the library's own code makes of the parts must then add up to what it makes of the whole,
which is tried with small matrices before anything is loaded.

Legend: E experts, I intermediate size, C hidden size, T tokens, K experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hardpoint.errors import UnsupportedModelError
from hardpoint_torch_runtime.layers import Placement, TensorParallel
from hardpoint_transformers_models.division import Cut, Division
from hardpoint_transformers_models.refusal import first_sentence

__all__ = ["ExpertPlacement", "StackedExperts", "divide_experts"]

OUTPUTS, INPUTS = 1, 2
"""Dimensions of a stack [E, outputs, inputs]."""
TRIED_SIZE, TRIED_TOKENS, TRIED_CHOICES = 6, 5, 2
MAX_DEVIATION = 1e-4


@dataclass(frozen=True, slots=True)
class ExpertPlacement(Placement):
    """One expert's matrix in a parameter that holds those of all."""

    expert: int = 0

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter[self.expert].narrow(self.dim, self.target_start, self.length)


@dataclass(frozen=True, slots=True)
class PackedPlacement(Placement):
    """A whole stack whose outputs are those of ``num_parts`` matrices: ``share`` outputs of each from ``begin``."""

    num_parts: int = 1
    begin: int = 0
    share: int = 0

    def source(self, stored: torch.Tensor) -> torch.Tensor:
        parts = stored.unflatten(OUTPUTS, (self.num_parts, -1))
        return parts.narrow(OUTPUTS + 1, self.begin, self.share).flatten(OUTPUTS, OUTPUTS + 1)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """How stacks [E, outputs, inputs] are filled: from ``num_parts`` matrices for each expert, behind one another.

    ``shapes`` are those of the whole model, of which a rank has what ``cuts`` leave of it.
    """

    shapes: dict[str, tuple[int, ...]]
    num_parts: dict[str, int]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    parallel: TensorParallel = field(default_factory=TensorParallel)

    def place(self, parameter: str, shard: str | None) -> Placement:
        """See ``ShardedModule``; a ``shard`` is written ``expert/part``."""
        shape, cut = self.shapes[parameter], self.cuts.get(parameter, Cut.NONE)
        if shard is None:
            return self._whole(shape, cut)
        expert, part = (int(number) for number in shard.split("/"))
        stored = (shape[OUTPUTS] // self.num_parts[parameter], *shape[INPUTS:])
        if cut is Cut.INPUTS:
            length = stored[1] // self.parallel.size
            return ExpertPlacement(stored, 1, self.parallel.rank * length, 0, length, expert=expert)
        length = stored[0] if cut is Cut.NONE else stored[0] // self.parallel.size
        begin = 0 if cut is Cut.NONE else self.parallel.rank * length
        return ExpertPlacement(stored, 0, begin, part * length, length, expert=expert)

    def _whole(self, shape: tuple[int, ...], cut: Cut) -> Placement:
        if cut is Cut.NONE:
            return Placement.whole(shape)
        if cut is Cut.INPUTS:
            length = shape[INPUTS] // self.parallel.size
            return Placement(shape, INPUTS, self.parallel.rank * length, 0, length)
        share = shape[OUTPUTS] // cut.num_parts // self.parallel.size
        length = share * cut.num_parts
        begin = self.parallel.rank * share
        return PackedPlacement(shape, OUTPUTS, 0, 0, length, num_parts=cut.num_parts, begin=begin, share=share)


def divide_experts(
    model: Any, division: Division, stacks: Mapping[str, StackedExperts], parallel: TensorParallel
) -> dict[str, StackedExperts]:
    """Leave one rank's share of every stack that the division's plan names in ``model``, which has no memory yet.

    Gives all stacks, by the modules' names, with those whose stored matrices are known (``stacks``). Raises
    ``UnsupportedModelError`` for experts that do not come to the same in parts, ``ConfigError`` for sizes that the
    ranks do not divide.
    """
    found = dict(stacks)
    if division.size == 1:
        return found
    base, prefix = model.base_model, model.base_model_prefix
    for name, module in base.named_modules():
        cuts = division.cuts(name)
        if not cuts:
            continue
        require_parts_add_up(division, name, module, cuts)
        path = f"{prefix}.{name}"
        shapes = {own: tuple(parameter.shape) for own, parameter in module.named_parameters()}
        stack = found.get(path) or StackedExperts(shapes, {})
        for own, cut in cuts.items():
            if stack.num_parts.get(own, cut.num_parts) != cut.num_parts:
                raise _refusal(division, name, f"stores {own} in {stack.num_parts[own]} parts for each expert")
        found[path] = replace(stack, cuts=cuts, parallel=parallel)
        division.shrink_stacks(name, module)
        module.register_forward_hook(_sum_up(parallel))
    return found


def _sum_up(parallel: TensorParallel) -> Callable[..., torch.Tensor]:
    def hook(module: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
        del module, given
        return parallel.all_reduce(output)

    return hook


def require_parts_add_up(division: Division, name: str, module: torch.nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Raise ``UnsupportedModelError`` where the sum over ranks is not what one rank computes, on small matrices."""
    parameters = dict(module.named_parameters())
    if set(parameters) != set(cuts) or any(parameter.dim() != INPUTS + 1 for parameter in parameters.values()):
        raise _refusal(
            division, name, f"has {', '.join(sorted(parameters))}, of which {', '.join(sorted(cuts))} are cut"
        )
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"), torch.no_grad():
        whole = {
            own: torch.randn(shape, generator=generator)
            for own, shape in _small(parameters, cuts, 2 * division.size).items()
        }
        hidden = torch.randn((TRIED_TOKENS, TRIED_SIZE), generator=generator)
        num_experts = min(len(parameter) for parameter in parameters.values())
        chosen = torch.arange(TRIED_TOKENS * TRIED_CHOICES).view(TRIED_TOKENS, TRIED_CHOICES) % num_experts
        scores = torch.rand((TRIED_TOKENS, TRIED_CHOICES), generator=generator)
        try:
            expected = _with(module, whole)(hidden, chosen, scores)
            parts = [
                _with(module, {own: cut.share(whole[own], rank, division.size) for own, cut in cuts.items()})(
                    hidden, chosen, scores
                )
                for rank in range(division.size)
            ]
        except Exception as error:
            raise _refusal(division, name, f"could not be tried in parts: {first_sentence(error)}") from error
    if not torch.allclose(sum(parts), expected, atol=MAX_DEVIATION, rtol=MAX_DEVIATION):
        raise _refusal(division, name, "computes something else in parts than as a whole")


def _small(
    parameters: Mapping[str, torch.nn.Parameter], cuts: Mapping[str, Cut], inner: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of stacks with ``inner`` for I, as many experts, and little else."""
    intermediate = next((parameters[own].shape[INPUTS] for own, cut in cuts.items() if cut is Cut.INPUTS), 1)
    return {
        own: (len(parameters[own]), TRIED_SIZE, inner)
        if cut is Cut.INPUTS
        else (len(parameters[own]), parameters[own].shape[OUTPUTS] // intermediate * inner, TRIED_SIZE)
        for own, cut in cuts.items()
    }


def _with(module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The module with other matrices; it shares everything else."""
    other = copy.copy(module)
    other._parameters = {own: torch.nn.Parameter(values, requires_grad=False) for own, values in parameters.items()}
    return other


def _refusal(division: Division, name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{division.architecture} cannot be divided among {division.size} ranks: {name} {what}; set "
        "--tensor-parallel-size 1"
    )
