"""What the ring test runs in a child process."""

from __future__ import annotations

import hashlib
import os
import select

import msgspec

from hardpoint_executors.ring import RingReader


def consume(payload: bytes) -> int:
    """Read frames until an empty one; answer with a digest over all of them through the given descriptor."""
    ring, reader, num_readers, bell, answer = msgspec.msgpack.decode(payload, type=tuple[int, int, int, int, int])
    poll = select.poll()
    poll.register(bell, select.POLLIN)

    def wait(seconds: float) -> bool:
        return not poll.poll(seconds * 1000) or bool(os.read(bell, 1))

    receiver = RingReader(ring, reader, num_readers, wait)
    digest = hashlib.sha256()
    while frame := receiver.receive():
        digest.update(frame)
    os.write(answer, digest.digest())
    return 0 if frame is not None else 1
