"""Safetensors files: the header, checked against the file, and tensors as views of it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.files import map_file

MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 16
MAX_DIM = 1 << 48


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """``name`` is the open-set dtype name; ``array`` the numpy type its bytes are viewed as."""

    name: str
    array: str
    num_bytes: int


_DTYPES = {
    "F64": StoredDtype("float64", "<f8", 8),
    "F32": StoredDtype("float32", "<f4", 4),
    "F16": StoredDtype("float16", "<f2", 2),
    "BF16": StoredDtype("bfloat16", "<u2", 2),
    "F8_E4M3": StoredDtype("float8_e4m3fn", "u1", 1),
    "F8_E5M2": StoredDtype("float8_e5m2", "u1", 1),
    "F8_E8M0": StoredDtype("float8_e8m0fnu", "u1", 1),
    "I64": StoredDtype("int64", "<i8", 8),
    "I32": StoredDtype("int32", "<i4", 4),
    "I16": StoredDtype("int16", "<i2", 2),
    "I8": StoredDtype("int8", "i1", 1),
    "U64": StoredDtype("uint64", "<u8", 8),
    "U32": StoredDtype("uint32", "<u4", 4),
    "U16": StoredDtype("uint16", "<u2", 2),
    "U8": StoredDtype("uint8", "u1", 1),
    "BOOL": StoredDtype("bool", "?", 1),
}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """``offset`` counts from the start of the file, in bytes."""

    name: str
    dtype: StoredDtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    path: str
    tensors: Mapping[str, StoredTensor]
    data: mmap.mmap = field(repr=False)

    def array(self, tensor: StoredTensor) -> np.ndarray:
        """The tensor without copying; bfloat16 and the 8-bit floats as unsigned integers of their width.

        The format does not align tensors, so the view may be unaligned; numpy and torch copy it on first use.
        """
        if tensor.num_bytes == 0:
            return np.empty(tensor.shape, dtype=tensor.dtype.array)
        flat = np.frombuffer(self.data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.view(tensor.dtype.array).reshape(tensor.shape)


def read_safetensors(path: Path) -> SafetensorsFile:
    """Parse and check the header of the file at ``path``.

    Raises ``ModelFormatError`` naming the file for anything malformed, ``UnsupportedModelError`` for an unknown dtype.
    """
    data = map_file(path)
    if len(data) < 8:
        raise _corrupt(path, f"{len(data)} bytes are too few for a header")
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise _corrupt(path, f"the header claims {size} bytes, but the file has {len(data)}")
    start = 8 + size
    try:
        raw = msgspec.json.decode(data[8:start], type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items() if name != "__metadata__"
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _corrupt(path, f"the header cannot be read: {error}") from None
    tensors = [_check_entry(path, name, entry, start) for name, entry in entries.items()]
    _check_tiling(path, tensors, start, len(data))
    return SafetensorsFile(str(path), {tensor.name: tensor for tensor in tensors}, data)


def _check_entry(path: Path, name: str, entry: _Entry, start: int) -> StoredTensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has the dtype {entry.dtype!r}; supported are {', '.join(_DTYPES)}"
        )
    if len(entry.shape) > MAX_DIMS or any(not 0 <= size <= MAX_DIM for size in entry.shape):
        raise _corrupt(path, f"tensor {name!r} has the impossible shape {entry.shape[:MAX_DIMS]}")
    begin, end = entry.data_offsets
    num_bytes = prod(entry.shape) * dtype.num_bytes
    if begin < 0 or end - begin != num_bytes:
        raise _corrupt(path, f"tensor {name!r} needs {num_bytes} bytes, but has the range {begin} to {end}")
    return StoredTensor(name, dtype, tuple(entry.shape), start + begin, num_bytes)


def _check_tiling(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    """The format demands that tensors cover the data section without a gap or an overlap."""
    position = start
    for tensor in sorted(tensors, key=lambda entry: (entry.offset, entry.num_bytes)):
        if tensor.offset != position:
            raise _corrupt(path, f"tensor {tensor.name!r} begins at byte {tensor.offset}, not at {position}")
        position += tensor.num_bytes
    if position != size:
        raise _corrupt(path, f"the tensors end at byte {position}, but the file at {size}")


def _corrupt(path: Path, what: str) -> ModelFormatError:
    return ModelFormatError(f"{path}: {what}; the file is corrupt or truncated, download it again")
