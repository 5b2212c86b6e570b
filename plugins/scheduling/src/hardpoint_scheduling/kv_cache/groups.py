"""One KV group as the coordinator sees it, and the longest prefix that all groups have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    CrossAttentionSpec,
    FullAttentionSpec,
    Int32Array,
    KVCacheManager,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MixedSizeSpec,
)
from hardpoint_scheduling.kv_cache.hash_view import ScaledHashes, group_scale, hash_block_size
from hardpoint_scheduling.kv_cache.records import UNLIMITED_TOKENS, PrefixHit


@dataclass(frozen=True, slots=True)
class KVGroup:
    """``block_size`` is the number of tokens per table position, ``scale`` the number of hashes per position.

    ``counts_encoder``: the table covers tokens of an encoder instead of the decoder's.
    """

    index: int
    spec: KVCacheSpec
    manager: KVCacheManager
    block_size: int
    scale: int
    counts_encoder: bool

    @property
    def is_late(self) -> bool:
        """Whether what a step fills can be found only after it."""
        return not self.manager.shares_within_step

    @property
    def finds_step_ends(self) -> bool:
        """Whether prefixes end only where steps did."""
        layer = _first_layer(self.spec)
        return isinstance(layer, MambaSpec) and layer.mode is MambaCacheMode.ALIGN

    @property
    def is_state(self) -> bool:
        """Whether a block holds one state, whatever its size."""
        return _first_layer(self.spec).tokens_per_state <= 0

    @property
    def releases(self) -> bool:
        return type(self.manager).release_unneeded is not KVCacheManager.release_unneeded

    def hashes(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return hashes if self.scale == 1 else ScaledHashes(hashes, self.scale)

    @property
    def max_encoder_tokens(self) -> int:
        """Tokens of an encoder that a table covers at most."""
        layer = _first_layer(self.spec)
        return layer.max_encoder_tokens if isinstance(layer, CrossAttentionSpec) else 0

    def tokens(self, end: int, num_sure: int) -> int:
        """What the manager is to cover in a step up to ``end`` whose tokens from ``num_sure`` on are guesses."""
        return end if self.manager.counts_guesses else num_sure

    def covered(self, end: int, num_sure: int) -> int:
        """Tokens that fit without a further allocation once these are covered. Guesses may go beyond: a manager that
        does not count them has positions for their states, and learns of every sure token behind a block's end.
        """
        if not self.manager.grows:
            return UNLIMITED_TOKENS
        return -(-self.tokens(end, num_sure) // self.block_size) * self.block_size

    def cover_all(self, ends: Int32Array, num_sure: Int32Array, room: Int32Array) -> None:
        """Lower ``room`` to what :meth:`covered` says, element by element."""
        if not self.manager.grows:
            return
        covered = -(-(ends if self.manager.counts_guesses else num_sure) // self.block_size) * self.block_size
        np.minimum(room, covered, out=room)

    def most_blocks(self, num_tokens: int, max_in_flight_tokens: int) -> int:
        """Blocks that a sequence of ``num_tokens`` holds at most at any time (R1.35)."""
        return self.spec.max_blocks(num_tokens, min(num_tokens, max_in_flight_tokens))


def build_groups(
    specs: Sequence[KVCacheSpec],
    managers: Sequence[KVCacheManager],
    match_unit: int | None = None,
    tail_unit: int | None = None,
) -> tuple[tuple[KVGroup, ...], int]:
    """The groups and the number of tokens per hash (R11.24): groups without prefixes have no say in it.

    ``match_unit``: what the operator wants it to be where several groups have one. ``tail_unit``: what it is where
    prefixes may end inside blocks.

    Raises ``ConfigError`` for block sizes that do not go together.
    """
    sizes = [tokens_per_block(spec) for spec in specs]
    cacheable = [size for size, manager in zip(sizes, managers, strict=True) if manager.caches_prefixes]
    hash_size = hash_block_size(cacheable, match_unit) if tail_unit is None else tail_unit
    groups = tuple(
        KVGroup(
            index=index,
            spec=spec,
            manager=manager,
            block_size=size,
            scale=group_scale(size, hash_size) if manager.caches_prefixes else 1,
            counts_encoder=isinstance(_first_layer(spec), CrossAttentionSpec),
        )
        for index, (spec, manager, size) in enumerate(zip(specs, managers, sizes, strict=True))
    )
    return groups, hash_size


def tokens_per_block(spec: KVCacheSpec) -> int:
    """Tokens per table position: where they are dealt out among ranks, each rank's block has its share (R1.34)."""
    layer = _first_layer(spec)
    return layer.block_size * (layer.context_shards if isinstance(layer, FullAttentionSpec) else 1)


def longest_prefix(groups: Sequence[KVGroup], hashes: Sequence[BlockHash], max_tokens: int) -> PrefixHit:
    """The longest hit of at most ``max_tokens`` that every group has (R3.92).

    Each group shortens the question to those after it until nobody does. Any common hit stays below the question, so
    the longest one is found. A group that keeps all its blocks is asked once: it has every shorter hit too.
    """
    order = sorted(groups, key=lambda group: not group.manager.keeps_all)
    found: dict[int, Sequence[int]] = {}
    length, asked = max_tokens, -1
    while length != asked:
        asked = length
        for group in order:
            if group.index not in found or not group.manager.keeps_all:
                found[group.index] = group.manager.find_hit(group.hashes(hashes), length)
            length = min(
                length, len(found[group.index]) * group.block_size, length // group.block_size * group.block_size
            )
        if len(order) == 1:
            break
    return PrefixHit(length, tuple(found[g.index][: length // g.block_size] for g in groups))


def without_skipped(blocks: Sequence[int], num_skipped: int) -> Sequence[int]:
    """A hit of at least ``num_skipped`` positions, the first of which hold the null block (R3.12)."""
    if not num_skipped:
        return blocks
    return [*[NULL_BLOCK_ID] * num_skipped, *blocks[num_skipped:]]


def num_real(blocks: Iterable[int]) -> int:
    """Blocks other than the null block."""
    return sum(1 for block in blocks if block != NULL_BLOCK_ID)


def _first_layer(spec: KVCacheSpec) -> KVCacheSpec:
    """Layers of one group need the same slots, so the first stands for all."""
    return spec.layers[0] if isinstance(spec, MixedSizeSpec) else spec
