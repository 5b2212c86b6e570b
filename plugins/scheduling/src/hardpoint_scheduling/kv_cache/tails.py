"""Prefix hits that end inside a block: the block is copied for the request that goes on from there."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.errors import ConfigError
from hardpoint.interfaces import BlockHash, KVBlockPool, group_key
from hardpoint_scheduling.kv_cache.groups import KVGroup


class PartialTails:
    """Last blocks of tables, found by the hashes that they are filled up to.

    A block carries one key: that of its complete hash units, until the next one or the whole block replaces it (R3.20).
    Copies are made before the step that adopts them writes anything, so what is copied must have been written by an
    earlier one; blocks are therefore entered after the step that fills them.
    """

    def __init__(self, pool: KVBlockPool, groups: Sequence[KVGroup]) -> None:
        """Raises ``ConfigError`` for more than one group, or one that gives blocks up."""
        if len(groups) != 1 or not groups[0].manager.keeps_all:
            kinds = ", ".join(type(group.spec).__name__ for group in groups)
            raise ConfigError(
                f"prefixes inside blocks are found in one group that keeps all its blocks, but the model has: {kinds}; "
                "leave the tail unit unset"
            )
        self._pool = pool
        self._group = groups[0]
        self._unit = groups[0].block_size // groups[0].scale
        self._copies: list[tuple[int, int]] = []

    def find(self, hashes: Sequence[BlockHash], start: int, max_tokens: int) -> tuple[int, int] | None:
        """The block that goes on behind the whole blocks of the first ``start`` tokens, and how many of its tokens
        count: as many as are cached within ``max_tokens``. None when there is none."""
        first = start // self._unit
        most = min(self._group.scale - 1, max_tokens // self._unit - first, len(hashes) - first)
        for units in range(most, 0, -1):
            block = self._pool.find(group_key(hashes[first + units - 1], self._group.index))
            if block is not None:
                return block, units * self._unit
        return None

    def enter(self, request_id: str, hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Let others find the last block of a request whose first ``num_tokens`` are computed and known."""
        position, rest = divmod(num_tokens, self._group.block_size)
        table = self._group.manager.block_ids(request_id)
        units = min(num_tokens // self._unit, len(hashes))
        if rest >= self._unit and position < len(table) and units > position * self._group.scale:
            self._pool.remember(table[position], group_key(hashes[units - 1], self._group.index))

    def copy(self, source: int, request_id: str, position: int) -> None:
        """Have ``source`` copied into the request's own block at ``position`` of its table."""
        self._copies.append((source, self._group.manager.block_ids(request_id)[position]))

    def take_copies(self) -> list[tuple[int, int]]:
        """Source and destination of every copy since the last call, to be made in this order."""
        taken, self._copies = self._copies, []
        return taken
