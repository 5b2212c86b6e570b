"""Values of any record type for property tests, made from the type's own description. Needs hypothesis."""

from __future__ import annotations

import enum
import functools
import math
import types
import typing
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

__all__ = ["same", "values"]

INT64 = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | INT64 | FLOATS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32")


@st.composite
def arrays(draw: st.DrawFn, dtype: Any = None) -> np.ndarray:
    kind = np.dtype(dtype if dtype is not None else draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * kind.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if kind.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, kind).reshape(shape)


SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    type(None): st.none(),
    bool: st.booleans(),
    int: INT64,
    float: FLOATS,
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    Any: JSON_LIKE,
    np.ndarray: arrays(),
}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """A strategy for the values of a type annotation, within the limits that it states."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) and not typing.get_args(annotation):
        return _records(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if isinstance(annotation, typing.NewType):
        return values(annotation.__supertype__)
    if annotation in SCALARS or annotation is None:
        return SCALARS[annotation if annotation is not None else type(None)]
    origin, parameters = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _limited(parameters[0], parameters[1])
    if origin is np.ndarray:
        return arrays(typing.get_args(parameters[1])[0])
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values(option) for option in parameters])
    if origin is tuple and parameters[-1:] == (...,):
        return st.lists(values(parameters[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, parameters))
    if origin is frozenset:
        return st.frozensets(values(parameters[0]), max_size=2)
    if origin is list:
        return st.lists(values(parameters[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values(parameters[0]), values(parameters[1]), max_size=2)
    raise TypeError(f"no values for {annotation}")


def _limited(annotation: Any, limits: msgspec.Meta) -> st.SearchStrategy[Any]:
    if annotation is str:
        return st.text(max_size=min(limits.max_length or 8, 8))
    numbers: dict[str, Any] = {"min_value": limits.ge if limits.gt is None else limits.gt, "max_value": limits.le}
    if annotation is int:
        return st.integers(**numbers)
    return st.floats(**numbers, exclude_min=limits.gt is not None, allow_nan=False)


@functools.cache
def _records(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Deferred, and one for each type: records may hold others of their own type."""

    def built() -> st.SearchStrategy[Any]:
        hints = typing.get_type_hints(kind, include_extras=True)
        return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})

    return st.deferred(built)


def same(left: Any, right: Any) -> bool:
    """Equality that looks into arrays: type, dtype, shape and bytes."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
        )
    if isinstance(left, msgspec.Struct):
        names = left.__struct_fields__
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and bool(left == right)
