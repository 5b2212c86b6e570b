"""A position in a GGUF file that never moves past its end."""

from __future__ import annotations

import mmap
import struct

from hardpoint.errors import ModelFormatError

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 64 * 1024 * 1024
MAX_ARRAY_LENGTH = 16 * 1024 * 1024
"""Elements of one metadata array; the largest real ones are vocabularies of about 300,000 entries."""

STRING = 8
ARRAY = 9
# Struct codes of the scalar value types by number.
SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: _U32,
    5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"), 10: _U64, 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip


class Cursor:
    """Reads little-endian values; every length is checked against the bytes left before it is used.

    Raises ``ModelFormatError`` naming the file and the offset.
    """

    def __init__(self, data: mmap.mmap, path: str, position: int = 0) -> None:
        self.data = data
        self.path = path
        self.position = position
        self._end = len(data)

    @property
    def remaining(self) -> int:
        return self._end - self.position

    def fail(self, what: str) -> ModelFormatError:
        return ModelFormatError(
            f"{self.path}: {what} (at byte {self.position}); the file is corrupt or truncated, download it again"
        )

    def take(self, size: int, what: str) -> int:
        """Advance over ``size`` bytes and return where they began."""
        if size > self._end - self.position:
            raise self.fail(f"{what} needs {size} bytes, but only {self.remaining} are left")
        start = self.position
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def text(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        size = self.u64(f"length of {what}")
        if size > limit:
            raise self.fail(f"{what} claims {size} bytes, more than the {limit} allowed")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Advance over ``count`` strings, checking each length; a vocabulary's worth takes milliseconds."""
        unpack, data, end, position = _U64.unpack_from, self.data, self._end, self.position
        for index in range(count):
            # Eight bytes for a length must be there, and then that many bytes.
            after = position + 8
            if after > end or (after := after + unpack(data, position)[0]) > end:
                self.position = position
                raise self.fail(f"entry {index} of {what} leads past the end of the file")
            position = after
        self.position = position

    def strings(self, count: int, what: str) -> list[bytes]:
        """``count`` strings as bytes; the range was checked by :meth:`skip_strings` before."""
        unpack, data, position = _U64.unpack_from, self.data, self.position
        found = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            found.append(data[start:position])
        self.position = position
        if self.position > self._end:
            raise self.fail(f"{what} leads past the end of the file")
        return found
