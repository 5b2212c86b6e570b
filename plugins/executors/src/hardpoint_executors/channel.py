"""Frames of bytes over a socket pair: a 32-bit little-endian length, then that many bytes."""

from __future__ import annotations

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

    def limit_sending(self, timeout_s: float) -> None:
        """From now on a send raises ``OSError`` when the other end does not read for that long."""
        seconds = max(timeout_s, 0.001)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def end_reading(self) -> None:
        """Frames that have arrived can still be received; then :meth:`receive` returns None. From any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RD)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Both ends; neither is inherited unless passed on."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(near), Channel(far)
