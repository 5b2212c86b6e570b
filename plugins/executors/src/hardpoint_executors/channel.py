"""A socket pair between engine and worker: answers as frames one way, a bell for the call ring the other way.

A frame is a 32-bit little-endian length, then that many bytes. A ring of the bell is one byte.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct

from hardpoint.ipc import CodecError

__all__ = ["Channel", "channel_pair"]

_HEADER = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 30


class Channel:
    """One end. One thread may send while another receives; neither may be used by two threads at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Take over an inherited end, and keep it from being inherited further."""
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Blocks while the other end does not read. Raises ``OSError`` when it is gone, ``CodecError`` if too big."""
        if len(frame) > _MAX_FRAME_BYTES:
            raise CodecError(f"a message of {len(frame)} bytes is over the limit of {_MAX_FRAME_BYTES}")
        header = _HEADER.pack(len(frame))
        sent = self._socket.sendmsg([header, frame])
        rest = len(header) + len(frame) - sent
        if rest:
            self._socket.sendall((header + frame)[-rest:])

    def receive(self) -> bytes | None:
        """The next frame, or None when the other end is gone, even in the middle of a frame."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        (size,) = _HEADER.unpack(header)
        if size > _MAX_FRAME_BYTES:
            raise CodecError(f"a message announces {size} bytes, over the limit of {_MAX_FRAME_BYTES}")
        return self._read(size)

    def _read(self, size: int) -> bytes | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError:
                return None
            if not count:
                return None
            view = view[count:]
        return bytes(data)

    def ring_bell(self) -> None:
        """Wake the other end out of :meth:`wait_for_bell`. Never blocks: a full socket holds rings enough."""
        with contextlib.suppress(OSError):
            self._socket.send(b"!", socket.MSG_DONTWAIT)

    def wait_for_bell(self, timeout_s: float) -> bool:
        """Sleep until the bell rings or ``timeout_s`` seconds are over; False when the other end is gone."""
        if not self._poll.poll(timeout_s * 1000):
            return True
        try:
            return bool(self._socket.recv(4096))
        except ConnectionResetError:
            return False

    def end_reading(self) -> None:
        """Frames that have arrived can still be received; then :meth:`receive` returns None. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self._socket.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Both ends; neither is inherited unless passed on."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(near), Channel(far)
