"""MessagePack for typed structs, with numpy arrays as (dtype, shape, raw bytes). The only format on a socket.

An array is one extension value of type 1: dtype code, number of dimensions, then each dimension as a little-endian
64-bit count, then the elements in C order, little-endian. Any other extension type is an error, and no type on the
wire can name code to run.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
import typing
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from hardpoint.errors import HardpointError

T = TypeVar("T")

_ARRAY = 1
_MAX_DIMENSIONS = 8
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    map(np.dtype, ("?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"))
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NAMES = ", ".join(dtype.name for dtype in _DTYPES)


class CodecError(HardpointError):
    """Bytes that are not a valid message of the expected type, or a value that has no wire form."""


def encode(obj: Any) -> bytes:
    """MessagePack form of a struct, builtin or array. Raises ``CodecError`` for a value without one."""
    try:
        return _encoder.encode(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"a {type(obj).__name__} cannot be sent: {error}") from error


class Decoder(Generic[T]):
    """Decodes messages of one type; build it once. Arrays come back writable, aligned and owned by the caller.

    Array fields annotated with a scalar type (``Int32Array``) accept that dtype only.
    """

    def __init__(self, expected: type[T] | Any) -> None:
        self._name = getattr(expected, "__name__", str(expected))
        self._decode = msgspec.msgpack.Decoder(expected, ext_hook=_decode_extension, dec_hook=_check_custom).decode

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Raises ``CodecError``, and nothing else, for anything that is not a message of the type."""
        try:
            return typing.cast("T", self._decode(data))
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CodecError(f"not a valid {self._name} message: {error}") from error


def _encode_custom(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(value))
    raise TypeError(f"values of type {type(value).__name__} have no wire form")


def _array_bytes(array: np.ndarray) -> bytes:
    code = _CODES.get(array.dtype)
    if code is None:
        raise TypeError(f"arrays of dtype {array.dtype} have no wire form; allowed: {_NAMES}")
    if array.ndim > _MAX_DIMENSIONS:
        raise TypeError(f"an array of {array.ndim} dimensions has no wire form; at most {_MAX_DIMENSIONS}")
    return struct.pack(f"<BB{array.ndim}Q", code, array.ndim, *array.shape) + array.tobytes()


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"extension type {code} is unknown")
    if len(data) < 2 or data[0] >= len(_DTYPES) or data[1] > _MAX_DIMENSIONS:
        raise ValueError("an array has no valid header")
    dtype, ndim = _DTYPES[data[0]], data[1]
    start = 2 + 8 * ndim
    if len(data) < start:
        raise ValueError("an array's shape is cut short")
    shape = struct.unpack_from(f"<{ndim}Q", data, 2)
    size = math.prod(shape)
    if size * dtype.itemsize != len(data) - start or any(extent > sys.maxsize for extent in shape):
        raise ValueError(f"an array of shape {shape} and dtype {dtype.name} has {len(data) - start} bytes of elements")
    if dtype.kind == "b" and size and np.frombuffer(data, np.uint8, size, start).max() > 1:
        raise ValueError("a bool array holds other bytes than 0 and 1")
    # Copied: the message's buffer is read-only, unaligned here, and must not be kept alive by one array.
    return np.frombuffer(data, dtype, size, start).reshape(shape).astype(dtype.newbyteorder("="))


def _check_custom(expected: Any, value: Any) -> Any:
    wanted = _wanted_dtype(expected)
    if not isinstance(value, np.ndarray):
        raise ValueError(f"expected an array, got {type(value).__name__}")
    if wanted is not None and value.dtype != wanted:
        raise ValueError(f"expected an array of {wanted.name}, got {value.dtype.name}")
    return value


@functools.cache
def _wanted_dtype(annotation: Any) -> np.dtype[Any] | None:
    """``npt.NDArray[S]`` demands dtype S, a bare ``np.ndarray`` takes any."""
    origin = typing.get_origin(annotation) or annotation
    if not (isinstance(origin, type) and issubclass(origin, np.ndarray)):
        raise TypeError(f"{annotation} cannot be part of a message")
    parameters = typing.get_args(annotation)
    scalar = typing.get_args(parameters[1])[0] if parameters else None
    return np.dtype(scalar) if isinstance(scalar, type) and scalar is not np.generic else None


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_custom)
