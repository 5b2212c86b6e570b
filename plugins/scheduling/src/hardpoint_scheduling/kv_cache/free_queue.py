"""Free blocks in the order in which they will be handed out: an intrusive doubly linked list over block ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hardpoint.errors import OutOfBlocksError
from hardpoint.interfaces import BoolArray

_OUTSIDE = -1
"""Link value of an id that is not in the queue."""


class FreeQueue:
    """All operations are O(1) per block and allocate nothing but the returned list (R3.10).

    The ids ``0 .. num_blocks - 1`` are linked through two preallocated lists. Position ``num_blocks`` is the ring's
    end marker: its successor is the head, its predecessor the tail.
    """

    __slots__ = ("_end", "_next", "_prev", "count")

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
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
        following, previous, end = self._next, self._prev, self._end
        block = following[end]
        taken = []
        for _ in range(count):
            taken.append(block)
            after = following[block]
            following[block] = previous[block] = _OUTSIDE
            block = after
        following[end] = block
        previous[block] = end
        self.count -= count
        return taken

    def prepend(self, block: int) -> None:
        """Make ``block`` the next to be handed out."""
        self._insert(block, self._end, self._next[self._end])

    def append(self, block: int) -> None:
        """Make ``block`` the last to be handed out."""
        self._insert(block, self._prev[self._end], self._end)

    def remove(self, block: int) -> None:
        """Take ``block`` out of the middle. Raises ``ValueError`` if it is not queued."""
        after, before = self._next[block], self._prev[block]
        if after == _OUTSIDE:
            raise ValueError(f"block {block} is not in the free queue")
        self._next[before] = after
        self._prev[after] = before
        self._next[block] = self._prev[block] = _OUTSIDE
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

    def _insert(self, block: int, before: int, after: int) -> None:
        if self._next[block] != _OUTSIDE:
            raise ValueError(f"block {block} is already in the free queue")
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self.count += 1
