"""Blocks of a request across all KV groups: lookup, admission, growth, release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    BlockHash,
    Int32Array,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    group_key,
    spec_from_wire,
)
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.hash_view import ScaledHashes, group_scale, hash_block_size
from hardpoint_scheduling.kv_cache.registry import SpecRegistry

Blocks = tuple[Sequence[int], ...]
"""Block ids per group; groups may differ in length and block size (R3.15)."""

UNLIMITED_TOKENS = 2**31 - 1
"""Room of a request in a model that keeps no KV."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks, per group, that hold the first ``num_tokens`` tokens.

    ``num_tail_tokens`` of them are in a last block that is used in part.
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

    ``whole``: length of the whole sequence, for the gate that wants all of it to fit.
    """

    hit: int
    external: int
    new: int
    lookahead: int
    whole: int


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


@dataclass(frozen=True, slots=True)
class _Group:
    manager: KVCacheManager
    block_size: int
    scale: int

    def hashes(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return hashes if self.scale == 1 else ScaledHashes(hashes, self.scale)


class KVCoordinator:
    """The scheduler's only way to KV blocks. Every method keeps all groups in step: all grow, or none."""

    def __init__(
        self, config: KVCacheConfig, registry: SpecRegistry, *, max_model_len: int, prefix_caching: bool = True
    ) -> None:
        """Raises ``ConfigError`` when a group's spec has no manager or its block size does not fit the others."""
        specs = [spec_from_wire(group.spec, registry.classes()) for group in config.groups]
        for group, spec in zip(config.groups, specs, strict=True):
            registry.check(dict.fromkeys(group.layer_names, spec))
        self.pool = BlockPool(config.num_blocks)
        self.prefix_caching = prefix_caching and bool(specs)
        self.max_model_len = max_model_len
        self.hash_block_size = hash_block_size([spec.block_size for spec in specs])
        self._groups = tuple(self._group(registry, index, spec) for index, spec in enumerate(specs))
        self._releasing = tuple(
            group.manager
            for group in self._groups
            if type(group.manager).release_unneeded is not KVCacheManager.release_unneeded
        )
        self._holders: dict[str, None] = {}
        self._largest_fit = self._find_largest_fit(specs)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def largest_sequence(self) -> int:
        """Tokens of the longest sequence whose KV fits an otherwise empty pool, at most ``max_model_len``."""
        return self._largest_fit

    def covered(self, num_tokens: int) -> int:
        """Tokens that fit without a further allocation once ``num_tokens`` are covered."""
        return min((-(-num_tokens // g.block_size) * g.block_size for g in self._groups), default=UNLIMITED_TOKENS)

    def covered_all(self, num_tokens: Int32Array) -> Int32Array:
        """:meth:`covered` for many lengths at once, int32."""
        room = np.full(len(num_tokens), UNLIMITED_TOKENS, dtype=np.int32)
        for group in self._groups:
            np.minimum(room, -(-num_tokens // group.block_size) * group.block_size, out=room)
        return room

    def end_with_lookahead(self, end: int, lookahead: int) -> int:
        """Where an allocation up to ``end`` stops. Lookahead is a wish: it never asks for more than the pool holds."""
        return max(end, min(end + lookahead, self._largest_fit))

    def find_prefix(self, hashes: Sequence[BlockHash], num_tokens: int) -> PrefixHit:
        """The longest prefix cached in every group, in whole blocks and at most ``num_tokens - 1`` tokens (R3.91)."""
        if not self.prefix_caching:
            return self.no_hit()
        length = num_tokens - 1
        while True:
            found = []
            for group in self._groups:
                blocks = group.manager.find_hit(group.hashes(hashes), length)
                found.append(blocks)
                # R3.92: a group that has less shortens the question to all others.
                length = min(length, len(blocks) * group.block_size)
            if all(len(b) * g.block_size == length for b, g in zip(found, self._groups, strict=True)):
                return PrefixHit(length, tuple(found))

    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, tuple(() for _ in self._groups))

    def blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Blocks that :meth:`grow` would take from the pool."""
        return self._needed(request_id, num_tokens, self.no_hit().blocks)

    def allocate_slots(self, request_id: str, segments: Segments, hit: PrefixHit, gates: Gates) -> Blocks | None:
        """Admit a request without blocks: adopt ``hit``, then allocate for the rest. Returns its whole tables.

        None, and nothing changed, when the blocks or a gate do not allow it (R3.71). Raises ``ValueError`` when there
        is nothing to compute or load (R3.72).
        """
        if segments.new <= 0 and segments.external <= 0:
            raise ValueError(f"request {request_id}: neither new nor external tokens to allocate for")
        end = self.end_with_lookahead(segments.hit + segments.external + segments.new, segments.lookahead)
        whole = max(segments.whole, end) if gates.full_sequence_must_fit else end
        idle = sum(self.pool.count_idle(blocks) for blocks in hit.blocks)
        if self._needed(request_id, whole, hit.blocks) + idle + gates.reserved_blocks > self.pool.num_free:
            return None
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            if blocks:
                group.manager.adopt(request_id, blocks)
        for group in self._groups:
            group.manager.allocate(request_id, end)
        self._holders[request_id] = None
        return self.block_ids(request_id)

    def grow(self, request_id: str, num_tokens: int) -> Blocks | None:
        """Cover ``num_tokens`` of a request that holds blocks. Returns the new ids, None when they are not there."""
        groups = self._groups
        if len(groups) == 1:
            manager, num_free = groups[0].manager, self.pool.num_free
            if manager.blocks_needed(request_id, num_tokens, 0) > num_free:
                return None
            return (manager.allocate(request_id, num_tokens),)
        if self._needed(request_id, num_tokens, ((),) * len(groups)) > self.pool.num_free:
            return None
        return tuple(group.manager.allocate(request_id, num_tokens) for group in groups)

    def grow_many(
        self, request_ids: Sequence[str], ends: Sequence[int], processed: Sequence[int] | None = None
    ) -> Growth:
        """:meth:`grow` for distinct requests in their order, up to the first that does not get its blocks.

        ``processed``: per row what :meth:`release_unneeded` takes; given, each row gives up before it takes (R3.71).
        The result's ``num_rows`` is the index of the row that came away empty, or the number of rows.
        """
        releases = processed is not None and self.releases
        if len(self._groups) == 1 and not releases:
            rows = self._groups[0].manager.allocate_many(request_ids, ends, self.pool.num_free)
            return Growth(len(rows), (rows,))
        grown: list[Blocks] = []
        for position, (request_id, end) in enumerate(zip(request_ids, ends, strict=True)):
            if processed is not None and releases:
                self.release_unneeded(request_id, processed[position])
            blocks = self.grow(request_id, end)
            if blocks is None:
                break
            grown.append(blocks)
        return Growth(len(grown), tuple([blocks[group] for blocks in grown] for group in range(len(self._groups))))

    @property
    def releases(self) -> bool:
        """Whether any group gives blocks up before a request ends."""
        return bool(self._releasing)

    def release_unneeded(self, request_id: str, num_processed_tokens: int) -> None:
        """Give up blocks that no later token reads. Tokens behind ``num_processed_tokens`` may still be in flight or be
        taken back, so they do not count (R3.77)."""
        for manager in self._releasing:
            manager.release_unneeded(request_id, num_processed_tokens)

    def enter_full_blocks(self, request_id: str, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Let later requests find the complete blocks among the first ``num_tokens``."""
        if self.pool.log is not None:
            self.pool.log.entering(request_id, hashes)
        for group in self._groups:
            group.manager.cache_full_blocks(request_id, group.hashes(hashes), num_tokens)

    def enter_full_blocks_many(
        self, request_ids: Sequence[str], hashes: Sequence[Sequence[BlockHash]], ends: Sequence[int]
    ) -> None:
        """:meth:`enter_full_blocks` for many requests, each with its hashes."""
        if self.pool.log is not None:
            # Request by request, so that the log knows whose block each is.
            for request_id, of_request, end in zip(request_ids, hashes, ends, strict=True):
                self.enter_full_blocks(request_id, of_request, end)
            return
        for group in self._groups:
            enter = group.manager.cache_full_blocks
            own = hashes if group.scale == 1 else [group.hashes(of_request) for of_request in hashes]
            for request_id, of_request, end in zip(request_ids, own, ends, strict=True):
                enter(request_id, of_request, end)

    def free(self, request_id: str) -> None:
        """Give up all blocks. A request without blocks is not an error."""
        for group in self._groups:
            group.manager.free(request_id)
        self._holders.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Take the blocks out of the prefix index: their content cannot be trusted. They stay allocated."""
        for blocks in self.block_ids(request_id):
            for block in blocks:
                self.pool.forget(block)

    def forget_hashes(self, hashes: Sequence[BlockHash]) -> None:
        """Take every block with one of ``hashes`` out of the prefix index, whoever holds it or has let it go."""
        for index, group in enumerate(self._groups):
            for block_hash in group.hashes(hashes):
                key = group_key(block_hash, index)
                while (block := self.pool.find(key)) is not None:
                    self.pool.forget(block)

    def holds(self, request_id: str) -> bool:
        return request_id in self._holders

    def block_ids(self, request_id: str) -> Blocks:
        return tuple(group.manager.block_ids(request_id) for group in self._groups)

    def num_common_blocks(self, request_id: str) -> tuple[int, ...]:
        """Per group, leading blocks of ``request_id`` that every holder shares (R3.97); 0 with fewer than two."""
        holders = len(self._holders)
        if holders < 2:
            return (0,) * len(self._groups)
        return tuple(self._shared_lead(blocks, holders) for blocks in self.block_ids(request_id))

    def group_block_sizes(self) -> tuple[int, ...]:
        return tuple(group.block_size for group in self._groups)

    def reset(self) -> bool:
        return self.pool.reset()

    def tables(self) -> Mapping[str, Blocks]:
        """All tables, for integrity checks."""
        return {request_id: self.block_ids(request_id) for request_id in self._holders}

    def _group(self, registry: SpecRegistry, index: int, spec: KVCacheSpec) -> _Group:
        manager = registry.manager_for(type(spec))(self.pool, index, spec)
        return _Group(manager, spec.block_size, group_scale(spec.block_size, self.hash_block_size))

    def _needed(self, request_id: str, num_tokens: int, hits: Sequence[Sequence[int]]) -> int:
        return sum(
            group.manager.blocks_needed(request_id, num_tokens, len(blocks))
            for group, blocks in zip(self._groups, hits, strict=True)
        )

    def _shared_lead(self, blocks: Sequence[int], holders: int) -> int:
        count = 0
        for block in blocks:
            if self.pool.references(block) < holders:
                break
            count += 1
        return count

    def _find_largest_fit(self, specs: Sequence[KVCacheSpec]) -> int:
        fits, fails = 0, self.max_model_len + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if sum(spec.max_blocks(middle, middle) for spec in specs) <= self.pool.num_usable:
                fits = middle
            else:
                fails = middle
        if fits == 0:
            raise ConfigError(
                f"{self.pool.num_blocks} KV cache blocks (the null block included) do not hold a single token of "
                f"{len(specs)} KV groups; raise --num-kv-blocks or --kv-cache-memory"
            )
        return fits
