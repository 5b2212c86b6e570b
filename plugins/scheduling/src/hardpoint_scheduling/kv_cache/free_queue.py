"""Free blocks in the order in which they will be handed out: an intrusive doubly linked list over block ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hardpoint.errors import OutOfBlocksError
from hardpoint.interfaces import BoolArray

_OUTSIDE = -1
"""Successor of an id that is not in the queue; its predecessor means nothing."""


class FreeQueue:
    """All operations are O(1) per block and allocate nothing but the returned list (R3.10).

    The ids ``0 .. num_blocks - 1`` are linked through two preallocated lists. Position ``num_blocks`` is the ring's
    end marker: its successor is the head, its predecessor the tail. Operations take many blocks at once, since a step
    moves hundreds and a call costs more than a link.
    """

    __slots__ = ("_end", "_next", "_prev", "count")

    def __init__(self, num_blocks: int) -> None:
        # Both lists share their integers: a million blocks are built in milliseconds.
        ids = [*range(num_blocks + 1)]
        self._end = num_blocks
        self._next: list[int] = [*ids[1:], 0]
        self._prev: list[int] = [num_blocks, *ids[:num_blocks]]
        self.count = num_blocks

    def __len__(self) -> int:
        return self.count

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _OUTSIDE

    def __iter__(self) -> Iterator[int]:
        """From head (handed out next) to tail."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def pop_many(self, count: int) -> list[int]:
        """Take ``count`` blocks from the head. Raises ``OutOfBlocksError`` and changes nothing when short."""
        if count > self.count:
            raise OutOfBlocksError(f"{count} KV blocks were asked for, but only {self.count} are free")
        following, end = self._next, self._end
        block = following[end]
        taken: list[int] = []
        take = taken.append
        for _ in range(count):
            take(block)
            after = following[block]
            following[block] = _OUTSIDE
            block = after
        following[end] = block
        self._prev[block] = end
        self.count -= len(taken)
        return taken

    def prepend(self, block: int) -> None:
        """Make ``block`` the next to be handed out."""
        self.prepend_many((block,))

    def append(self, block: int) -> None:
        """Make ``block`` the last to be handed out."""
        self.append_many((block,))

    def remove(self, block: int) -> None:
        """Take ``block`` out of the middle. Raises ``ValueError`` if it is not queued."""
        self.remove_many((block,))

    def prepend_many(self, blocks: Iterable[int]) -> None:
        """Each in turn to the head: the last of ``blocks`` is handed out first.

        Raises ``ValueError`` for a block that is queued already; those before it have joined.
        """
        following, previous, end = self._next, self._prev, self._end
        for block in blocks:
            if following[block] != _OUTSIDE:
                raise ValueError(f"block {block} is already in the free queue")
            head = following[end]
            following[block] = head
            previous[block] = end
            previous[head] = following[end] = block
            self.count += 1

    def append_many(self, blocks: Iterable[int]) -> None:
        """Each in turn to the tail: the last of ``blocks`` is handed out last. Raises like :meth:`prepend_many`."""
        following, previous, end = self._next, self._prev, self._end
        for block in blocks:
            if following[block] != _OUTSIDE:
                raise ValueError(f"block {block} is already in the free queue")
            tail = previous[end]
            previous[block] = tail
            following[block] = end
            following[tail] = previous[end] = block
            self.count += 1

    def remove_many(self, blocks: Iterable[int]) -> None:
        """Take blocks out of wherever they are.

        Raises ``ValueError`` for a block that is not queued; those before it have left.
        """
        following, previous = self._next, self._prev
        for block in blocks:
            after, before = following[block], previous[block]
            if after == _OUTSIDE:
                raise ValueError(f"block {block} is not in the free queue")
            following[before] = after
            previous[after] = before
            following[block] = _OUTSIDE
            self.count -= 1

    def check(self, expected: BoolArray) -> None:
        """Raise ``RuntimeError`` unless both directions agree and hold exactly the ids where ``expected`` is True.

        ``expected``: bool [num_blocks]. One pass over the links, the rest as arrays: an idle engine runs this (I3.1).
        """
        following, previous = np.array(self._next), np.array(self._prev)
        queued = following != _OUTSIDE
        members = np.flatnonzero(queued)
        wrong = members[(previous[following[members]] != members) | (following[previous[members]] != members)]
        if len(wrong):
            raise RuntimeError(f"free queue: the links around block {int(wrong[0])} disagree")
        links, block, length = self._next, self._next[self._end], 0
        while block != self._end:
            block = links[block]
            length += 1
        if length != self.count or length != len(members) - 1:
            raise RuntimeError(f"free queue: {self.count} blocks counted, {length} reached, {len(members) - 1} linked")
        if not np.array_equal(queued[:-1], expected):
            raise RuntimeError("free queue: its blocks are not exactly the unreferenced ones")
