"""What a scheduler and the coordinator of KV groups tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Blocks = tuple[Sequence[int], ...]
"""Block ids per group; groups may differ in length and block size (R3.15)."""

UNLIMITED_TOKENS = 2**31 - 1
"""Room of a request in a model that keeps no KV."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks, per group, that hold the first ``num_tokens`` tokens. Positions whose content no later token reads
    hold the null block. ``num_tail_tokens`` of the tokens are in a last block that is used in part.
    """

    num_tokens: int
    blocks: Blocks
    num_tail_tokens: int = 0

    def without_tail(self) -> PrefixHit:
        """The whole blocks alone."""
        if not self.num_tail_tokens:
            return self
        return PrefixHit(self.num_tokens - self.num_tail_tokens, tuple(blocks[:-1] for blocks in self.blocks))


@dataclass(frozen=True, slots=True)
class Segments:
    """Token counts of one admission, in sequence order (R3.70). The hit is passed beside it.

    ``whole``: length of the whole sequence, for the gate that wants all of it to fit. ``encoder``: tokens of the
    request's encoder inputs, for layers that attend to them.
    """

    hit: int
    external: int
    new: int
    lookahead: int
    whole: int
    encoder: int = 0

    @property
    def computed(self) -> int:
        """Tokens whose KV exists or arrives from elsewhere."""
        return self.hit + self.external

    def clipped(self, max_model_len: int) -> Segments:
        """None of them reaches further than ``max_model_len`` tokens (R3.72)."""
        if self.computed + self.new <= max_model_len:
            return self
        external = min(self.external, max_model_len - self.hit)
        return replace(self, external=external, new=min(self.new, max_model_len - self.hit - external))


@dataclass(frozen=True, slots=True)
class Gates:
    """What admission leaves alone. ``reserved_blocks`` must stay free after the allocation (R3.73-R3.75)."""

    full_sequence_must_fit: bool = False
    reserved_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks that the first ``num_rows`` rows of a batch got: ``ids[group][row]``, in the order in which they came."""

    num_rows: int
    ids: tuple[Sequence[Sequence[int]], ...]

    def row(self, index: int) -> Blocks:
        """What one row got, per group."""
        return tuple(group[index] for group in self.ids)
