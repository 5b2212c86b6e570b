"""What metadata builders learn about the layers of their group, which do not exist yet when builders are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hardpoint.interfaces.attention import AttentionKind, AttentionLayerParams

__all__ = ["GroupTraits", "KnownLayer", "LayerView", "group_traits"]

LayerView = tuple[int | None, int | None]
"""A layer's sliding window and chunk size."""


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
        generations: the different ones. ``views``: the different pairs of window and chunk size, None each for layers
            without.
        uses_alibi, is_local, is_cross: whether any layer has biases, chunks or kept prompts, an encoder's keys.
        has_soft_cap: whether any layer caps its scores.
    """

    num_heads: int
    generations: frozenset[int]
    views: frozenset[LayerView]
    uses_alibi: bool = False
    is_local: bool = False
    is_cross: bool = False
    has_soft_cap: bool = False

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window, _ in self.views)

    @property
    def only_view(self) -> LayerView | None:
        """What all layers see, where they agree (R5.32)."""
        return next(iter(self.views)) if len(self.views) == 1 else None


def group_traits(names: Iterable[str], known: Mapping[str, KnownLayer], generation: int) -> GroupTraits:
    """Of those of ``names`` that are known (R5.32); ``generation`` stands for the others."""
    layers = [known[name] for name in names if name in known]
    params = [layer.params for layer in layers]
    return GroupTraits(
        num_heads=params[0].num_heads if params else 0,
        generations=frozenset(layer.generation for layer in layers) or frozenset({generation}),
        views=frozenset((layer.sliding_window, layer.chunk_size) for layer in params),
        uses_alibi=any(layer.alibi_slopes is not None for layer in params),
        is_local=any(layer.chunk_size is not None or layer.keeps_prompt for layer in params),
        is_cross=any(layer.kind is AttentionKind.ENCODER_DECODER for layer in params),
        has_soft_cap=any(layer.logits_soft_cap is not None for layer in params),
    )
