"""From the hash of a prefix to the blocks that hold its KV."""

from __future__ import annotations

from collections.abc import Iterator

from hardpoint.interfaces import BlockHashWithGroup


class PrefixIndex:
    """One plain block id per key, promoted to a small map only when a second block with the key arrives (R3.13).

    Most keys have one block, so most entries are bare integers, which the garbage collector never visits.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[BlockHashWithGroup, int | dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[BlockHashWithGroup, int]]:
        for key, entry in self._entries.items():
            for block in (entry,) if isinstance(entry, int) else entry:
                yield key, block

    def find(self, key: BlockHashWithGroup) -> int | None:
        """Any block with ``key``, the oldest first."""
        entry = self._entries.get(key)
        if entry is None or isinstance(entry, int):
            return entry
        return next(iter(entry))

    def insert(self, key: BlockHashWithGroup, block: int) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = block
        elif isinstance(entry, dict):
            entry[block] = None
        elif entry != block:
            self._entries[key] = {entry: None, block: None}

    def remove(self, key: BlockHashWithGroup, block: int) -> bool:
        """Forget ``block`` under ``key``. False, and nothing changed, when it is not there."""
        entry = self._entries.get(key)
        if isinstance(entry, dict):
            if block not in entry:
                return False
            del entry[block]
            if not entry:
                del self._entries[key]
            return True
        if entry is None or entry != block:
            return False
        del self._entries[key]
        return True

    def clear(self) -> None:
        self._entries.clear()
