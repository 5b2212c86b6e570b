"""What metadata builders learn about the layers of their group, which do not exist yet when builders are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hardpoint.interfaces.attention import AttentionKind, AttentionLayerParams

__all__ = ["GroupTraits", "KnownLayer", "group_traits"]


@dataclass(frozen=True, slots=True)
class KnownLayer:
    """A layer with the generation that serves it."""

    params: AttentionLayerParams
    generation: int


@dataclass(frozen=True, slots=True)
class GroupTraits:
    """Layers of a group taken together.

    Attributes:
        num_heads: query heads; 0 while no layer is known.
        generations, windows: the different ones. ``windows`` has None for layers that see everything.
        uses_alibi, is_local, is_cross: whether any layer has biases, chunks or kept prompts, an encoder's keys.
        has_soft_cap: whether any layer caps its scores.
    """

    num_heads: int
    generations: frozenset[int]
    windows: frozenset[int | None]
    uses_alibi: bool = False
    is_local: bool = False
    is_cross: bool = False
    has_soft_cap: bool = False

    @property
    def only_window(self) -> int | None:
        """The window of all layers; meaningful where ``windows`` has one entry."""
        return next(iter(self.windows), None)


def group_traits(names: Iterable[str], known: Mapping[str, KnownLayer], generation: int) -> GroupTraits:
    """Of those of ``names`` that are known (R5.32); ``generation`` stands for the others."""
    layers = [known[name] for name in names if name in known]
    params = [layer.params for layer in layers]
    return GroupTraits(
        num_heads=params[0].num_heads if params else 0,
        generations=frozenset(layer.generation for layer in layers) or frozenset({generation}),
        windows=frozenset(layer.sliding_window for layer in params),
        uses_alibi=any(layer.alibi_slopes is not None for layer in params),
        is_local=any(layer.chunk_size is not None or layer.keeps_prompt for layer in params),
        is_cross=any(layer.kind is AttentionKind.ENCODER_DECODER for layer in params),
        has_soft_cap=any(layer.logits_soft_cap is not None for layer in params),
    )
