"""From the hash of a prefix to the blocks that hold its KV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hardpoint.interfaces import BlockHash, BlockHashWithGroup, group_key


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

    def find_chain(self, hashes: Iterable[BlockHash], group: int) -> list[int]:
        """Blocks of the leading ``hashes`` that all have one in ``group``: a prompt of 100,000 tokens has thousands."""
        blocks: list[int] = []
        find = self._entries.get
        suffix = group_key(BlockHash(b""), group)
        for block_hash in hashes:
            entry = find(BlockHashWithGroup(block_hash + suffix))
            if entry is None:
                break
            blocks.append(entry if isinstance(entry, int) else next(iter(entry)))
        return blocks

    def insert(self, key: BlockHashWithGroup, block: int) -> None:
        entry = self._entries.setdefault(key, block)
        if isinstance(entry, dict):
            entry[block] = None
        elif entry != block:
            self._entries[key] = {entry: None, block: None}

    def remove(self, key: BlockHashWithGroup, block: int) -> bool:
        """Forget ``block`` under ``key``. False, and nothing changed, when it is not there."""
        # Mostly it is the only block of its key: one access of a large table, which costs more than anything else here.
        entry = self._entries.pop(key, None)
        if entry == block:
            return True
        if isinstance(entry, dict):
            found = block in entry
            entry.pop(block, None)
            if entry:
                self._entries[key] = entry
            return found
        if entry is not None:
            self._entries[key] = entry
        return False

    def clear(self) -> None:
        self._entries.clear()
