"""One stored tensor of a GGUF file after another, as the model's checkpoints have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, TypeVar

import numpy as np

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import WeightTensor
from hardpoint_model_io.formats.gguf import GgufFile, GgufTensor
from hardpoint_model_io.formats.gguf_dequant import dequantize
from hardpoint_model_io.formats.gguf_names import MappedName
from hardpoint_model_io.formats.gguf_record import Join, Recompute, Reorder, Reshape, Restore
from hardpoint_model_io.formats.gguf_types import TensorType

__all__ = ["TensorReader"]

_PLAIN_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
ResultT = TypeVar("ResultT")


class TensorReader:
    """Undoes what converters did. ``config`` is that of the model; ``packed`` leaves blocks as they are stored, as far
    as whole rows of them only move. Raises ``ModelFormatError`` naming file and tensor."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any], packed: bool) -> None:
        self._file = file
        self._config = config
        self._packed = packed

    def num_bytes(self, stored: GgufTensor, mapped: MappedName) -> int:
        """Size of what :meth:`read` makes of a tensor."""
        if isinstance(mapped.transform, Restore):
            return 4 * (prod(stored.shape) + mapped.transform.num_rows(self._config) * prod(stored.shape[1:]))
        parts = self._parts(mapped) or [stored]
        is_computed = isinstance(mapped.transform, Recompute) or (
            mapped.join is not None and not self._stays_stored(mapped.join, parts)
        )
        is_unpacked = stored.type.is_packed and not self._packed
        return sum(4 * prod(part.shape) if is_computed or is_unpacked else part.num_bytes for part in parts)

    def read(self, stored: GgufTensor, mapped: MappedName) -> Iterator[WeightTensor]:
        """The tensor; of a stack one expert at a time, so that no more than that is ever unpacked."""
        if mapped.join is not None:
            yield self._joined(mapped, mapped.join)
        elif mapped.is_stack:
            yield from self._unstacked(stored, mapped)
        else:
            yield self._converted(stored, mapped)

    def _unstacked(self, stored: GgufTensor, mapped: MappedName) -> Iterator[WeightTensor]:
        # A matrix for each expert, or a bias.
        num_dims = 2 if stored.name.endswith(".bias") else 3
        if len(stored.shape) != num_dims:
            kind = "matrix" if num_dims == 3 else "bias"
            raise ModelFormatError(
                f"{self._file.path}: tensor {stored.name!r} of shape {list(stored.shape)} is no stack of one {kind} "
                "per expert; download the file again"
            )
        for expert, part in enumerate(self._file.raw(stored)):
            yield self._as_stored(mapped.name.replace("*", str(expert)), part, stored.type, stored.shape[1:])

    def _converted(self, stored: GgufTensor, mapped: MappedName) -> WeightTensor:
        raw, kind, shape = self._file.raw(stored), stored.type, stored.shape
        match mapped.transform:
            case Recompute(values):
                computed = self._checked(stored.name, lambda: values(dequantize(raw, kind, shape)))
                return WeightTensor(mapped.name, "float32", tuple(computed.shape), computed)
            case Restore(num_rows):
                zeros = np.zeros((num_rows(self._config), *shape[1:]), np.float32)
                whole = np.concatenate([zeros, dequantize(raw, kind, shape)])
                return WeightTensor(mapped.name, "float32", tuple(whole.shape), whole)
            case Reshape(change):
                shape = self._checked(stored.name, lambda: change(shape))
                raw = raw.reshape(*shape[:-1], -1)
            case Reorder(rows):
                raw = self._moved(stored.name, raw, shape, rows)
        return self._as_stored(mapped.name, raw, kind, shape)

    def _joined(self, mapped: MappedName, join: Join) -> WeightTensor:
        parts = self._parts(mapped)
        if join.values is not None:
            compute, unpacked = join.values, [self._unpacked(part) for part in parts]
            computed = self._checked(parts[0].name, lambda: compute(self._config, unpacked))
            return WeightTensor(mapped.name, "float32", tuple(computed.shape), computed)
        widths = {part.shape[1:] for part in parts}
        if len(widths) != 1 or len(parts[0].shape) != 2:
            told = " and ".join(f"{part.name!r} {list(part.shape)}" for part in parts)
            raise ModelFormatError(f"{self._file.path}: tensors {told} do not belong together; download the file again")
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        is_alike = self._stays_stored(join, parts)
        kind = parts[0].type if is_alike else None
        pieces = [self._file.raw(part) if is_alike else self._unpacked(part) for part in parts]
        whole = np.concatenate(pieces)
        if join.rows is not None:
            whole = self._moved(parts[0].name, whole, shape, join.rows)
        return (
            WeightTensor(mapped.name, "float32", shape, whole)
            if kind is None
            else (self._as_stored(mapped.name, whole, kind, shape))
        )

    def _stays_stored(self, join: Join, parts: list[GgufTensor]) -> bool:
        """Rows of one type need not be unpacked to lie behind one another."""
        return join.values is None and len({part.type.number for part in parts}) == 1

    def _parts(self, mapped: MappedName) -> list[GgufTensor]:
        return [self._file.tensors[name] for name in mapped.parts]

    def _unpacked(self, stored: GgufTensor) -> np.ndarray:
        return dequantize(self._file.raw(stored), stored.type, stored.shape)

    def _moved(
        self, name: str, raw: np.ndarray, shape: tuple[int, ...], rows: Callable[[Mapping[str, Any], int], np.ndarray]
    ) -> np.ndarray:
        """``raw`` with its rows, or the bytes of a vector's entries, in another order."""
        return self._checked(name, lambda: raw.reshape(shape[0], -1)[rows(self._config, shape[0])].reshape(raw.shape))

    def _checked(self, name: str, compute: Callable[[], ResultT]) -> ResultT:
        try:
            return compute()
        except ValueError as error:
            raise ModelFormatError(
                f"{self._file.path}: tensor {name!r} has {error}; the file is corrupt, download it again"
            ) from error

    def _as_stored(self, name: str, raw: np.ndarray, kind: TensorType, shape: tuple[int, ...]) -> WeightTensor:
        """Plain values as they are; packed ones as they are or as float32."""
        if not kind.is_packed:
            values = raw.view(_PLAIN_DTYPES[kind.storage_name]).reshape(shape)
            return WeightTensor(name, kind.storage_name, shape, values)
        if self._packed:
            return WeightTensor(name, kind.storage_name, shape, raw, lambda: dequantize(raw, kind, shape))
        return WeightTensor(name, "float32", shape, dequantize(raw, kind, shape))
