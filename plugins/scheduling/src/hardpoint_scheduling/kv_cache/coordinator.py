"""Blocks of a request across all KV groups: lookup, admission, growth, release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from math import lcm

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces import NULL_BLOCK_ID, BlockHash, Int32Array, KVCacheConfig, group_key, spec_from_wire
from hardpoint_scheduling.kv_cache.admitting import Admission, needed_to_admit, tokens_to_admit
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.groups import KVGroup, build_groups, longest_prefix, num_real, without_skipped
from hardpoint_scheduling.kv_cache.records import UNLIMITED_TOKENS as UNLIMITED_TOKENS
from hardpoint_scheduling.kv_cache.records import Blocks as Blocks
from hardpoint_scheduling.kv_cache.records import Gates as Gates
from hardpoint_scheduling.kv_cache.records import Growth as Growth
from hardpoint_scheduling.kv_cache.records import PrefixHit as PrefixHit
from hardpoint_scheduling.kv_cache.records import Segments as Segments
from hardpoint_scheduling.kv_cache.registry import SpecRegistry
from hardpoint_scheduling.kv_cache.tails import PartialTails


class KVCoordinator:
    """The scheduler's only way to KV blocks. Every method keeps all groups in step: all grow, or none."""

    def __init__(
        self,
        config: KVCacheConfig,
        registry: SpecRegistry,
        *,
        max_model_len: int,
        prefix_caching: bool = True,
        max_in_flight_tokens: int = UNLIMITED_TOKENS,
        match_unit: int | None = None,
        tail_unit: int | None = None,
    ) -> None:
        """``max_in_flight_tokens``: most tokens of one request that steps under way compute, lookahead included; what
        groups hold besides a window or state depends on it. ``match_unit``: tokens per hash where groups differ.
        ``tail_unit``: tokens per hash of the only group, in whose blocks a prefix may then end at any multiple of it;
        :meth:`take_block_copies` says what workers have to copy for that (None: whole blocks).

        Raises ``ConfigError`` when a group's spec has no manager or its block size does not fit the others.
        """
        specs = [spec_from_wire(group.spec, registry.classes()) for group in config.groups]
        for group, spec in zip(config.groups, specs, strict=True):
            registry.check(dict.fromkeys(group.layer_names, spec))
        self.pool = BlockPool(config.num_blocks)
        self.max_model_len = max_model_len
        self.max_in_flight_tokens = max_in_flight_tokens
        managers = [
            registry.manager_for(type(spec), group.role)(self.pool, index, spec)
            for index, (group, spec) in enumerate(zip(config.groups, specs, strict=True))
        ]
        self._groups, self.hash_block_size = build_groups(specs, managers, match_unit, tail_unit)
        self.prefix_caching = prefix_caching and bool(specs) and all(m.caches_prefixes for m in managers)
        self.needs_whole_prompts = any(manager.needs_whole_prompts for manager in managers)
        self._releasing = tuple(group.manager for group in self._groups if group.releases)
        # R1.33: a step that ends between block ends leaves no state to find.
        self.step_alignment = lcm(*(g.block_size for g in self._groups if g.finds_step_ends and self.prefix_caching))
        self._tails = PartialTails(self.pool, self._groups) if self.prefix_caching and tail_unit is not None else None
        self._late_groups = tuple(group for group in self._groups if group.is_late)
        # Blocks that the current step fills and that others find after it: request, its hashes, its length.
        self._late: dict[str, list[tuple[Sequence[BlockHash], int]]] = {}
        # Groups share memory: what a recurrent state leaves in a page may be no number at all to those who read it as
        # keys and values.
        states = {group.index for group in self._groups if group.is_state}
        self._zeroed = {group.index for group in self._groups} - states if states else set[int]()
        self._to_zero: list[int] = []
        self._holders: dict[str, None] = {}
        self._largest_fit = self._find_largest_fit()

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def largest_sequence(self) -> int:
        """Tokens of the longest sequence whose KV fits an otherwise empty pool, at most ``max_model_len``."""
        return self._largest_fit

    @property
    def max_encoder_tokens(self) -> int | None:
        """Most tokens of an encoder that one request may have; None where no layer keeps any."""
        return min((group.max_encoder_tokens for group in self._groups if group.counts_encoder), default=None)

    @property
    def keeps_all(self) -> bool:
        """Whether tables made to go on from some token serve one that goes on from an earlier token as well."""
        return all(group.manager.keeps_all for group in self._groups)

    @property
    def tells_guesses_apart(self) -> bool:
        """Whether ``num_sure`` makes a difference: states after guesses have positions of their own."""
        return any(not group.manager.counts_guesses for group in self._groups)

    def covered(self, num_tokens: int, num_sure: int | None = None) -> int:
        """Tokens that fit without a further allocation once ``num_tokens`` are covered.

        ``num_sure``: how many of them are neither guesses nor lookahead (None: all).
        """
        sure = num_tokens if num_sure is None else num_sure
        return min((group.covered(num_tokens, sure) for group in self._groups), default=UNLIMITED_TOKENS)

    def covered_all(self, num_tokens: Int32Array, num_sure: Int32Array | None = None) -> Int32Array:
        """:meth:`covered` for many lengths at once, int32."""
        room = np.full(len(num_tokens), UNLIMITED_TOKENS, dtype=np.int32)
        for group in self._groups:
            group.cover_all(num_tokens, num_tokens if num_sure is None else num_sure, room)
        return room

    def end_with_lookahead(self, end: int, lookahead: int) -> int:
        """Where an allocation up to ``end`` stops. Lookahead is a wish: it never asks for more than the pool holds."""
        return min(max(end, min(end + lookahead, self._largest_fit)), self.max_model_len)

    def find_prefix(self, hashes: Sequence[BlockHash], num_tokens: int) -> PrefixHit:
        """The longest prefix cached in every group, at most ``num_tokens - 1`` tokens (R3.91), in whole blocks unless
        there is a tail unit."""
        if not self.prefix_caching:
            return self.no_hit()
        hit = longest_prefix(self._groups, hashes, num_tokens - 1)
        tail = None if self._tails is None else self._tails.find(hashes, hit.num_tokens, num_tokens - 1)
        if tail is None:
            return hit
        return PrefixHit(hit.num_tokens + tail[1], ([*hit.blocks[0], tail[0]],), tail[1])

    def aligned_end(self, computed: int, end: int) -> int:
        """Where a step that goes on from ``computed`` had better stop at the latest ``end``: at the last block end of
        states that are found only there, if the step reaches one."""
        aligned = end // self.step_alignment * self.step_alignment
        return aligned if aligned > computed else end

    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, tuple(() for _ in self._groups))

    def allocate_slots(self, request_id: str, segments: Segments, hit: PrefixHit, gates: Gates) -> Blocks | None:
        """Admit a request without blocks: adopt ``hit``, then allocate for the rest. Returns its whole tables.

        None, and nothing changed, when the blocks or a gate do not allow it (R3.71). Raises ``ValueError`` when there
        is nothing to compute or load (R3.72).
        """
        if segments.new <= 0 and segments.external <= 0:
            raise ValueError(f"request {request_id}: neither new nor external tokens to allocate for")
        segments = segments.clipped(self.max_model_len)
        computed = segments.computed
        end = self.end_with_lookahead(computed + max(segments.new, 0), segments.lookahead)
        admission: Admission = [
            (group, without_skipped(blocks, group.manager.num_skipped_blocks(computed)))
            for group, blocks in zip(self._groups, hit.without_tail().blocks, strict=True)
        ]
        whole = min(max(segments.whole, end), self.max_model_len) if gates.full_sequence_must_fit else None
        needed = needed_to_admit(request_id, admission, segments, end, whole, self.max_in_flight_tokens)
        idle = sum(self.pool.count_idle(blocks) for _, blocks in admission)
        if needed + idle + gates.reserved_blocks > self.pool.num_free:
            return None
        for group, blocks in admission:
            if blocks:
                group.manager.adopt(request_id, blocks)
        for group in self._groups:
            if segments.external and group.manager.grows:
                # What is loaded needs its own positions, also where a step that computed it would leave them out.
                self._note_new(group, group.manager.allocate(request_id, computed))
            self._note_new(group, group.manager.allocate(request_id, tokens_to_admit(group, segments, end)))
        if hit.num_tail_tokens and self._tails is not None:
            self._tails.copy(hit.blocks[0][-1], request_id, len(hit.blocks[0]) - 1)
        self._holders[request_id] = None
        return self.block_ids(request_id)

    def blocks_to_grow(self, request_id: str, num_tokens: int) -> int:
        """Blocks that a request takes at most until it has ``num_tokens``, besides those it holds (R3.75)."""
        needed = 0
        for group in self._groups:
            more = group.manager.blocks_needed(request_id, num_tokens, 0) if group.manager.grows else 0
            if more and not group.manager.keeps_all:
                held = num_real(group.manager.block_ids(request_id))
                more = max(group.most_blocks(num_tokens, self.max_in_flight_tokens) - held, 0)
            needed += more
        return needed

    def covers_exactly(self, request_id: str, num_tokens: int) -> bool:
        """Whether the blocks of a request cover ``num_tokens`` and not one more."""
        growing = [group.manager for group in self._groups if group.manager.grows]
        exact = [manager for manager in growing if manager.counts_guesses]
        if any(manager.blocks_needed(request_id, num_tokens, 0) for manager in exact):
            return False
        # Of positions for guesses nobody can tell how many tokens they are good for.
        return (
            len(exact) < len(growing) or not exact or any(m.blocks_needed(request_id, num_tokens + 1, 0) for m in exact)
        )

    def grow(self, request_id: str, num_tokens: int, num_sure: int | None = None) -> Blocks | None:
        """Cover ``num_tokens`` of a request that holds blocks, of which ``num_sure`` are neither guesses nor lookahead
        (None: all). Returns the new ids, None when they are not there."""
        sure = num_tokens if num_sure is None else num_sure
        wanted = [(group.manager, group.tokens(num_tokens, sure)) for group in self._groups]
        needed = sum(manager.blocks_needed(request_id, count, 0) for manager, count in wanted if manager.grows)
        if needed > self.pool.num_free:
            return None
        new = tuple(manager.allocate(request_id, count) if manager.grows else () for manager, count in wanted)
        for group, blocks in zip(self._groups, new, strict=True) if self._zeroed else ():
            self._note_new(group, blocks)
        return new

    def grow_many(
        self,
        request_ids: Sequence[str],
        ends: Sequence[int],
        processed: Sequence[int] | None = None,
        num_sure: Sequence[int] | None = None,
    ) -> Growth:
        """:meth:`grow` for distinct requests in their order, up to the first that does not get its blocks.

        ``processed``: per row what :meth:`release_unneeded` takes; given, each row gives up before it takes (R3.71).
        The result's ``num_rows`` is the index of the row that came away empty, or the number of rows.
        """
        for manager in self._releasing if processed is not None else ():
            manager.release_unneeded_many(request_ids, processed or ())
        sure = ends if num_sure is None else num_sure
        wanted = [(group, ends if group.manager.counts_guesses else sure) for group in self._groups]
        if len(wanted) == 1 and wanted[0][0].manager.grows:
            rows = wanted[0][0].manager.allocate_many(request_ids, wanted[0][1], self.pool.num_free)
            return Growth(len(rows), (rows,))
        needed = sum(
            sum(map(group.manager.blocks_needed, request_ids, tokens, repeat(0)))
            for group, tokens in wanted
            if group.manager.grows
        )
        if needed > self.pool.num_free:
            return self._grow_some(request_ids, ends, sure)
        nothing: list[Sequence[int]] = [()] * len(request_ids)
        ids = tuple(
            group.manager.allocate_many(request_ids, tokens, needed) if group.manager.grows else nothing
            for group, tokens in wanted
        )
        for group, of_group in zip(self._groups, ids, strict=True) if self._zeroed else ():
            for blocks in of_group:
                self._note_new(group, blocks)
        return Growth(len(request_ids), ids)

    def _grow_some(self, request_ids: Sequence[str], ends: Sequence[int], num_sure: Sequence[int]) -> Growth:
        """Row by row, since there is not enough for all of them."""
        grown: list[Blocks] = []
        for request_id, end, sure in zip(request_ids, ends, num_sure, strict=True):
            blocks = self.grow(request_id, end, sure)
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

    def take_blocks_to_zero(self) -> list[int]:
        """Blocks handed out since the last call that workers have to clear first."""
        taken, self._to_zero = self._to_zero, []
        return taken

    def take_block_copies(self) -> list[tuple[int, int]]:
        """Source and destination block of every copy since the last call. Workers make them in this order, before they
        clear or write anything (R3.64)."""
        return [] if self._tails is None else self._tails.take_copies()

    def begin_step(self) -> None:
        """To be called before a step is planned: what the one before fills can be found from now on."""
        for request_id in list(self._late):
            self._enter_late(request_id)

    def enter_full_blocks(self, request_id: str, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Let later requests find the complete blocks among the first ``num_tokens``."""
        self.enter_full_blocks_many((request_id,), (hashes,), (num_tokens,))

    def enter_full_blocks_many(
        self, request_ids: Sequence[str], hashes: Sequence[Sequence[BlockHash]], ends: Sequence[int]
    ) -> None:
        """:meth:`enter_full_blocks` for many requests, each with its hashes."""
        late = self._late_groups or self._tails
        for request_id, of_request, end in zip(request_ids, hashes, ends, strict=True) if late else ():
            self._late.setdefault(request_id, []).append((of_request, end))
        if self.pool.log is not None:
            # Request by request, so that the log knows whose block each is.
            for request_id, of_request, end in zip(request_ids, hashes, ends, strict=True):
                self.pool.log.entering(request_id, of_request)
                for group in self._groups:
                    if not group.is_late:
                        group.manager.cache_full_blocks(request_id, group.hashes(of_request), end)
            return
        for group in self._groups:
            if group.is_late:
                continue
            own = hashes if group.scale == 1 else [group.hashes(of_request) for of_request in hashes]
            group.manager.cache_full_blocks_many(request_ids, own, ends)

    def free(self, request_id: str) -> None:
        """Give up all blocks. A request without blocks is not an error."""
        self._enter_late(request_id)
        for group in self._groups:
            group.manager.free(request_id)
        self._holders.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Take the blocks out of the prefix index: their content cannot be trusted. They stay allocated."""
        self._late.pop(request_id, None)
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
        """Per group, leading blocks of ``request_id`` that every holder shares (R3.97); 0 with fewer than two, and in
        groups that give leading blocks up."""
        holders = len(self._holders)
        if holders < 2:
            return (0,) * len(self._groups)
        return tuple(
            self._shared_lead(group.manager.block_ids(request_id), holders) if group.manager.keeps_all else 0
            for group in self._groups
        )

    def group_block_sizes(self) -> tuple[int, ...]:
        return tuple(group.block_size for group in self._groups)

    def reset(self) -> bool:
        return self.pool.reset()

    def tables(self) -> Mapping[str, Blocks]:
        """All tables, for integrity checks."""
        return {request_id: self.block_ids(request_id) for request_id in self._holders}

    def _note_new(self, group: KVGroup, blocks: Sequence[int]) -> None:
        if group.index in self._zeroed:
            self._to_zero.extend(block for block in blocks if block != NULL_BLOCK_ID)

    def _enter_late(self, request_id: str) -> None:
        for hashes, num_tokens in self._late.pop(request_id, ()):
            if self.pool.log is not None:
                self.pool.log.entering(request_id, hashes)
            for group in self._late_groups:
                group.manager.cache_full_blocks(request_id, group.hashes(hashes), num_tokens)
            if self._tails is not None:
                self._tails.enter(request_id, hashes, num_tokens)

    def _shared_lead(self, blocks: Sequence[int], holders: int) -> int:
        count = 0
        for block in blocks:
            if self.pool.references(block) < holders:
                break
            count += 1
        return count

    def _find_largest_fit(self) -> int:
        fits, fails = 0, self.max_model_len + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            most = sum(group.most_blocks(middle, self.max_in_flight_tokens) for group in self._groups)
            if most <= self.pool.num_usable:
                fits = middle
            else:
                fails = middle
        if fits == 0:
            raise ConfigError(
                f"{self.pool.num_blocks} KV cache blocks (the null block included) do not hold a single token of "
                f"{len(self._groups)} KV groups; raise --num-kv-blocks or --kv-cache-memory"
            )
        return fits
