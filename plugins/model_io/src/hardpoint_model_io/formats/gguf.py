"""GGUF files (versions 2 and 3, little-endian): header, metadata and tensor table, over a read-only memory map.

Nothing is allocated on the file's word: every count, length, offset and size is checked against the bytes present and
against plain caps first. Metadata arrays stay in the file until asked for, so reading a header with a large vocabulary
costs milliseconds.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hardpoint.errors import ModelFormatError
from hardpoint_model_io.files import map_file
from hardpoint_model_io.formats.gguf_cursor import ARRAY, MAX_ARRAY_LENGTH, MAX_KEY_BYTES, SCALARS, STRING, Cursor
from hardpoint_model_io.formats.gguf_types import TensorType, tensor_type

MAGIC = b"GGUF"
MAX_TENSORS = 200_000
MAX_METADATA = 20_000
MAX_NAME_BYTES = 1_024
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 16

_SETTLED_NS = 2_000_000_000
"""A file changed more recently may change again within the resolution of its time stamp, and is read anew each time."""
_ARRAY_DTYPES = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
                 12: "<f8"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A metadata array left in the file: ``count`` elements of value type ``kind`` from byte ``position`` on."""

    kind: int
    count: int
    position: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table. ``shape`` is in row-major order; ``offset`` counts from the start of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header. ``metadata`` values are Python scalars, strings or :class:`GgufArray`."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap = field(repr=False)

    def strings(self, key: str) -> list[bytes]:
        """Elements of a string array as bytes. Raises ``ModelFormatError`` if absent or of another type."""
        array = self._array(key)
        if array.kind != STRING:
            raise ModelFormatError(f"{self.path}: metadata {key!r} must be an array of strings")
        return Cursor(self.data, self.path, array.position).strings(array.count, key)

    def numbers(self, key: str) -> np.ndarray:
        """A numeric array, as a view of the file. Raises ``ModelFormatError`` if absent or of another type."""
        array = self._array(key)
        if array.kind not in _ARRAY_DTYPES:
            raise ModelFormatError(f"{self.path}: metadata {key!r} must be an array of numbers")
        return np.frombuffer(self.data, dtype=_ARRAY_DTYPES[array.kind], count=array.count, offset=array.position)

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The stored bytes of ``tensor`` without copying: uint8 ``[*shape[:-1], bytes per row]``."""
        flat = np.frombuffer(self.data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        row_bytes = tensor.shape[-1] // tensor.type.block_size * tensor.type.block_bytes
        return flat.reshape(*tensor.shape[:-1], row_bytes)

    def _array(self, key: str) -> GgufArray:
        value = self.metadata.get(key)
        if not isinstance(value, GgufArray):
            state = "is missing" if value is None else "is not an array"
            raise ModelFormatError(f"{self.path}: metadata {key!r} {state}; the file is incomplete, download it again")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of the GGUF file at ``path``; once as long as the file stays as it is, since description,
    tokenizer and weights all start from it.

    Raises ``ModelFormatError`` naming the file for anything malformed, ``UnsupportedModelError`` for a tensor type
    that cannot be read.
    """
    try:
        found = path.stat()
    except OSError:
        return _parse(path)  # which tells what is wrong
    if time.time_ns() - found.st_mtime_ns < _SETTLED_NS:
        return _parse(path)
    return _parse_once(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=4)
def _parse_once(path: Path, identity: tuple[int, ...]) -> GgufFile:
    del identity
    return _parse(path)


def _parse(path: Path) -> GgufFile:
    cursor = Cursor(map_file(path), str(path))
    num_tensors, num_metadata = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.text("metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, key)
    alignment = _alignment(cursor, metadata)
    rows = [_read_tensor_row(cursor) for _ in range(num_tensors)]
    data_start = cursor.position + -cursor.position % alignment
    tensors = _place_tensors(cursor, rows, data_start, alignment)
    return GgufFile(str(path), metadata, tensors, cursor.data)


def _read_preamble(cursor: Cursor) -> tuple[int, int]:
    start = cursor.take(4, "the magic number")
    if cursor.data[start : start + 4] != MAGIC:
        raise ModelFormatError(f"{cursor.path} is not a GGUF file: it does not begin with 'GGUF'; download it again")
    version = cursor.u32("version")
    if version not in (2, 3):
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 and version else ""
        raise ModelFormatError(
            f"{cursor.path}: GGUF version {version}{hint} is not supported; convert the file to version 3, "
            "little-endian"
        )
    num_tensors = cursor.u64("tensor count")
    num_metadata = cursor.u64("metadata count")
    # The smallest row of each table takes 24 and 13 bytes.
    if num_tensors > min(MAX_TENSORS, cursor.remaining // 24):
        raise cursor.fail(f"the header claims {num_tensors} tensors, more than the file can hold")
    if num_metadata > min(MAX_METADATA, cursor.remaining // 13):
        raise cursor.fail(f"the header claims {num_metadata} metadata entries, more than the file can hold")
    return num_tensors, num_metadata


def _read_value(cursor: Cursor, key: str) -> Any:
    kind = cursor.u32(f"type of {key!r}")
    if kind == STRING:
        return cursor.text(f"value of {key!r}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    scalar = SCALARS.get(kind)
    if scalar is None:
        raise cursor.fail(f"metadata {key!r} has the unknown value type {kind}")
    return scalar.unpack_from(cursor.data, cursor.take(scalar.size, f"value of {key!r}"))[0]


def _read_array(cursor: Cursor, key: str) -> GgufArray:
    kind = cursor.u32(f"element type of {key!r}")
    count = cursor.u64(f"length of {key!r}")
    if count > MAX_ARRAY_LENGTH:
        raise cursor.fail(f"array {key!r} claims {count} elements, more than the {MAX_ARRAY_LENGTH} allowed")
    array = GgufArray(kind, count, cursor.position)
    if kind == STRING:
        cursor.skip_strings(count, repr(key))
    elif kind in SCALARS:
        cursor.take(count * SCALARS[kind].size, f"array {key!r}")
    else:
        raise cursor.fail(f"array {key!r} has elements of the unsupported type {kind}")
    return array


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"general.alignment is {value!r}, but must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensor_row(cursor: Cursor) -> GgufTensor:
    """A row whose offset still counts from the start of the data section."""
    name = cursor.text("tensor name", MAX_NAME_BYTES)
    num_dims = cursor.u32(f"dimension count of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    # The file lists the fastest-varying dimension first.
    shape = tuple(cursor.u64(f"dimension of {name!r}") for _ in range(num_dims))[::-1]
    kind = tensor_type(cursor.u32(f"type of {name!r}"), name, cursor.path)
    offset = cursor.u64(f"offset of {name!r}")
    if min(shape) < 1 or prod(shape) > MAX_ELEMENTS:
        raise cursor.fail(f"tensor {name!r} has the impossible shape {list(shape)}")
    if shape[-1] % kind.block_size:
        raise cursor.fail(
            f"tensor {name!r} has rows of {shape[-1]} elements, no multiple of the {kind.block_size} of {kind.name}"
        )
    return GgufTensor(name, kind, shape, offset, prod(shape) // kind.block_size * kind.block_bytes)


def _place_tensors(cursor: Cursor, rows: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
    """Absolute offsets, after checking that tensors are aligned, inside the file, distinct and disjoint."""
    placed: dict[str, GgufTensor] = {}
    size = len(cursor.data)
    for row in rows:
        begin = start + row.offset
        if row.offset % alignment:
            raise cursor.fail(f"tensor {row.name!r} is not aligned to {alignment} bytes")
        if begin + row.num_bytes > size:
            raise cursor.fail(
                f"tensor {row.name!r} should end at byte {begin + row.num_bytes}, but the file has only {size}"
            )
        if row.name in placed:
            raise cursor.fail(f"tensor {row.name!r} occurs twice")
        placed[row.name] = GgufTensor(row.name, row.type, row.shape, begin, row.num_bytes)
    previous: GgufTensor | None = None
    for tensor in sorted(placed.values(), key=lambda entry: entry.offset):
        if previous is not None and tensor.offset < previous.offset + previous.num_bytes:
            raise cursor.fail(f"tensors {previous.name!r} and {tensor.name!r} overlap")
        previous = tensor
    return placed
