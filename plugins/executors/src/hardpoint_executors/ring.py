"""Messages from one process to several through shared memory that has no name.

The memory is a ring of slots behind a few counters, each on a cache line of its own::

    written | taken, asleep (reader 0) | taken, asleep (reader 1) | ... | slot 0 | slot 1 | ...

Slot ``n % num_slots`` holds part n, ``taken <= written <= taken + num_slots`` for every reader, and only its owner
writes a counter. Since the memory lives as long as its descriptors, nothing is left over however a process ends.
A waiting reader spins briefly, then sleeps until its bell rings; the bell is the caller's.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable

from hardpoint.ipc import CodecError, anonymous_file

__all__ = ["RingReader", "RingWriter"]

_NUM_SLOTS = 16
_SLOT_BYTES = 1 << 16
_PART = struct.Struct("<II")  # Bytes in this part, bytes still to come after it.
_ROOM = _SLOT_BYTES - _PART.size
_MAX_FRAME_BYTES = 1 << 30
_LINE_WORDS = 8
_SPIN_S = 5e-5
_NAP_S = 5e-4
_MAX_SLEEP_S = 0.5


class _Ring:
    """The mapped memory; reader r's counters are ``taken(r)`` and the word after it."""

    def __init__(self, descriptor: int, num_readers: int) -> None:
        self._start = -(-(1 + num_readers) * _LINE_WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(descriptor, self._start + _NUM_SLOTS * _SLOT_BYTES)
        self._bytes = memoryview(self._memory)
        self._words = self._bytes[: self._start].cast("Q")
        self._barrier = threading.Lock()

    def _taken(self, reader: int) -> int:
        return (1 + reader) * _LINE_WORDS

    def _slot(self, part: int) -> memoryview:
        start = self._start + part % _NUM_SLOTS * _SLOT_BYTES
        return self._bytes[start : start + _SLOT_BYTES]

    def _fence(self) -> None:
        """Order memory accesses around this call, also on processors that reorder stores."""
        for _ in range(2):
            with self._barrier:
                continue

    def close(self) -> None:
        """Unmap the memory. Idempotent."""
        self._words.release()
        self._bytes.release()
        self._memory.close()


class RingWriter(_Ring):
    """The sending end, for one thread. ``ring_bell(reader)`` must wake that reader and may not block."""

    def __init__(self, num_readers: int, ring_bell: Callable[[int], None]) -> None:
        self.descriptor = anonymous_file("hardpoint-ring", (1 + num_readers) * mmap.PAGESIZE + _NUM_SLOTS * _SLOT_BYTES)
        super().__init__(self.descriptor, num_readers)
        self._active = frozenset(range(num_readers))
        self._retiring = threading.Lock()
        self._ring_bell = ring_bell

    def send(self, frame: bytes, timeout_s: float | None = None) -> None:
        """Waits while a reader lags a whole ring behind.

        Raises ``TimeoutError`` after ``timeout_s`` seconds of it: a reader then has part of a message and the ring can
        not be used any more. Raises ``CodecError`` for a frame over 1 GiB.
        """
        if len(frame) > _MAX_FRAME_BYTES:
            raise CodecError(f"a message of {len(frame)} bytes is over the limit of {_MAX_FRAME_BYTES}")
        view = memoryview(frame)
        while True:
            part, view = view[:_ROOM], view[_ROOM:]
            self._send_part(part, len(view), timeout_s)
            if not view:
                return

    def retire(self, reader: int) -> None:
        """Wait for ``reader`` no more. From any thread."""
        with self._retiring:
            self._active -= {reader}

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            super().close()

    def _send_part(self, part: memoryview, num_following: int, timeout_s: float | None) -> None:
        number = self._words[0]
        self._wait_for_room(number, timeout_s)
        slot = self._slot(number)
        slot[: _PART.size] = _PART.pack(len(part), num_following)
        slot[_PART.size : _PART.size + len(part)] = part
        self._fence()
        self._words[0] = number + 1
        self._fence()
        for reader in self._active:
            if self._words[self._taken(reader) + 1]:
                self._ring_bell(reader)

    def _wait_for_room(self, number: int, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while any(self._words[self._taken(reader)] + _NUM_SLOTS <= number for reader in self._active):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"a reader has not taken a message for {timeout_s:g} s")
            time.sleep(_NAP_S)


class RingReader(_Ring):
    """Receiving end ``reader`` of ``num_readers``. Takes over ``descriptor``.

    ``wait(seconds)`` sleeps until the bell rings and returns False once the writer is gone for good.
    """

    def __init__(self, descriptor: int, reader: int, num_readers: int, wait: Callable[[float], bool]) -> None:
        super().__init__(descriptor, num_readers)
        os.close(descriptor)
        self._index = self._taken(reader)
        self._wait = wait

    def receive(self) -> bytes | None:
        """The next frame; None when the writer is gone. Raises ``CodecError`` for memory that makes no sense."""
        frame = bytearray()
        while self._wait_for_part():
            number = self._words[self._index]
            slot = self._slot(number)
            size, num_following = _PART.unpack_from(slot)
            if size > _ROOM or len(frame) + size + num_following > _MAX_FRAME_BYTES:
                raise CodecError(f"a part of {size} bytes before {num_following} more cannot be in the ring")
            frame += slot[_PART.size : _PART.size + size]
            self._fence()
            self._words[self._index] = number + 1
            if not num_following:
                return bytes(frame)
        return None

    def _has_part(self) -> bool:
        if self._words[0] == self._words[self._index]:
            return False
        self._fence()
        return True

    def _wait_for_part(self) -> bool:
        until = time.perf_counter() + _SPIN_S
        while not self._has_part():
            if time.perf_counter() > until:
                return self._sleep_for_part()
            os.sched_yield()
        return True

    def _sleep_for_part(self) -> bool:
        """Announce the sleep before looking once more, so that a part written meanwhile is not slept through."""
        is_there = True
        while True:
            self._words[self._index + 1] = 1
            self._fence()
            if self._has_part() or not is_there:
                self._words[self._index + 1] = 0
                return self._has_part()
            is_there = self._wait(_MAX_SLEEP_S)
