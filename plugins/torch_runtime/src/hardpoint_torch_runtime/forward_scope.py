"""Entering a forward: adds to a step's facts what the worker, its ranks and its platform know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from hardpoint.interfaces.model import Model
from hardpoint_torch_runtime.forward_context import (
    BatchDescriptor,
    DataParallelMetadata,
    ForwardContext,
    GraphMode,
    LayerTurns,
    set_forward_context,
)
from hardpoint_torch_runtime.layers.moe import MixtureOfExperts
from hardpoint_torch_runtime.layers.uncompiled import UncompiledLayer

__all__ = ["ForwardScopes", "RankTokens", "StaticContext"]

RankTokens = Callable[[int], Sequence[int]]
"""This rank's token count, padding included, to that of every data-parallel rank; all ranks call it together."""

ContextExtras = Callable[[ForwardContext], Mapping[str, Any]]
"""A platform's own entries for a forward, from what is known of it so far."""


@dataclass(frozen=True, slots=True)
class StaticContext:
    """What holds for every forward of a model. ``moe_layers`` are in the order in which they run."""

    layers: Mapping[str, UncompiledLayer] = field(default_factory=dict)
    moe_layers: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Model) -> StaticContext:
        """Gathered from ``named_layers()``, which must list layers in the order in which they run.

        Raises ``ValueError`` for two layers with one name.
        """
        layers: dict[str, UncompiledLayer] = {}
        for _, part in model.named_layers():
            for module in part.modules():
                if not isinstance(module, UncompiledLayer):
                    continue
                if layers.setdefault(module.name, module) is not module:
                    raise ValueError(f"two layers of the model are named {module.name!r}; names must be unique")
        mixtures = tuple(name for name, layer in layers.items() if isinstance(layer, MixtureOfExperts))
        return cls(MappingProxyType(layers), mixtures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardScopes:
    """Enters the forwards of one model on one worker.

    Attributes:
        rank_tokens: asked in every forward where it is given: data parallelism is active.
        data_parallel_rank: this rank among those that ``rank_tokens`` counts.
        sequence_parallel_size: above 1 where ranks share out the tokens of mixtures of experts.
        extras: the platform's entries, asked in every forward.
    """

    static: StaticContext = StaticContext()
    rank_tokens: RankTokens | None = None
    data_parallel_rank: int = 0
    sequence_parallel_size: int = 1
    extras: ContextExtras | None = None

    @contextmanager
    def enter(
        self, facts: ForwardContext, *, num_padded: int | None = None, is_replay: bool = False
    ) -> Iterator[ForwardContext]:
        """Make ``facts``, completed, the active context.

        ``num_padded`` is T where padding was added. ``is_replay``: a graph runs, and no layer asks for its turn.
        Raises ``ValueError`` when an entry of ``facts.extras`` is the platform's, ``RuntimeError`` when a forward
        ended without an error before all mixtures of experts had their turns.
        """
        context = self.complete(facts, num_padded=num_padded)
        with set_forward_context(context):
            yield context
        if context.moe_turns is not None and not is_replay:
            context.moe_turns.check_complete()

    def complete(self, facts: ForwardContext, *, num_padded: int | None = None) -> ForwardContext:
        """``facts`` with layers, turns, descriptor, ranks and the platform's entries. Turns start anew.

        ``facts`` themselves where they have the layers already and there is nothing else: that is most steps.
        """
        if facts.uncompiled_layers is self.static.layers and self.adds_nothing and facts.graph_mode is GraphMode.NONE:
            return facts
        num_tokens = facts.num_tokens if num_padded is None else num_padded
        descriptor = facts.batch_descriptor
        if descriptor is None and facts.graph_mode is not GraphMode.NONE:
            descriptor = BatchDescriptor(num_tokens)
        layers: Mapping[str, torch.nn.Module] = self.static.layers
        context = replace(
            facts,
            batch_descriptor=descriptor,
            uncompiled_layers={**layers, **facts.uncompiled_layers} if facts.uncompiled_layers else layers,
            moe_turns=LayerTurns(self.static.moe_layers) if self.static.moe_layers else None,
            data_parallel=self._ranks(num_tokens),
        )
        return context if self.extras is None else replace(context, extras=self._merged(context))

    @property
    def adds_nothing(self) -> bool:
        """Whether no forward has turns, ranks or entries of a platform."""
        return (
            not self.static.moe_layers
            and self.extras is None
            and self.rank_tokens is None
            and self.sequence_parallel_size == 1
        )

    def _ranks(self, num_tokens: int) -> DataParallelMetadata | None:
        if self.rank_tokens is None and self.sequence_parallel_size == 1:
            return None
        counts = (num_tokens,) if self.rank_tokens is None else tuple(self.rank_tokens(num_tokens))
        return DataParallelMetadata(self.data_parallel_rank, counts, self.sequence_parallel_size)

    def _merged(self, context: ForwardContext) -> dict[str, Any]:
        given = self.extras(context) if self.extras is not None else {}
        taken = sorted(given.keys() & context.extras.keys())
        if taken:
            raise ValueError(f"the platform adds entries to the forward context that exist already: {', '.join(taken)}")
        return {**context.extras, **given}
