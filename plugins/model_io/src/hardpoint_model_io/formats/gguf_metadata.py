"""Typed values of a GGUF file's metadata; every error names the file and the key."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufArray, GgufFile

__all__ = ["MAX_VALUE", "Metadata"]

MAX_VALUE = 1 << 30
MAX_LAYERS = 10_000
"""No model has nearly as many, and what is said of each is listed."""


class Metadata:
    """What ``file`` says under ``<architecture>.``, and which tensors it holds. Keys are given without that prefix.

    Everything raises ``ModelFormatError`` for a value that is absent without a default, of another type, or no usable
    number: out of ``least`` .. ``MAX_VALUE``, infinite or no number at all.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    @property
    def path(self) -> str:
        return self.file.path

    def key(self, suffix: str) -> str:
        return f"{self.architecture}.{suffix}"

    def raw(self, suffix: str) -> Any:
        """None where absent."""
        return self.file.metadata.get(self.key(suffix))

    def integer(self, suffix: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._scalar(suffix)
        if value is None and default is not None:
            return default
        self._require_number(suffix, value, least, whole=True)
        return int(value)

    def number(self, suffix: str, default: float | None = None, *, least: float | None = None) -> float:
        """Above zero, or at least ``least``. Stored as float32: the nearest short decimal is what the model's author
        wrote (1e-05, not 9.99e-06)."""
        value = self._scalar(suffix)
        if value is None and default is not None:
            return default
        self._require_number(suffix, value, least, whole=False)
        return float(str(np.float32(value)))

    def flag(self, suffix: str, default: bool) -> bool:
        value = self.raw(suffix)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.path}: metadata {self.key(suffix)!r} is {value!r}, not true or false")
        return value

    def text(self, suffix: str) -> str | None:
        value = self.raw(suffix)
        if value is not None and not isinstance(value, str):
            raise ModelFormatError(f"{self.path}: metadata {self.key(suffix)!r} is {value!r}, not a text")
        return value

    def per_layer(self, suffix: str, num_layers: int) -> list[int]:
        """One count for each layer, 0 among them; where the file has a single one it is that of all."""
        if not isinstance(self.raw(suffix), GgufArray):
            return [self.integer(suffix, least=0)] * num_layers
        values = self.file.numbers(self.key(suffix))
        if values.size != num_layers or values.dtype.kind not in "iub" or np.any(values < 0):
            raise ModelFormatError(
                f"{self.path}: metadata {self.key(suffix)!r} must hold a count for each of the {num_layers} layers"
            )
        return [int(value) for value in values]

    def num_layers(self) -> int:
        count = self.integer("block_count")
        if count > MAX_LAYERS:
            raise ModelFormatError(
                f"{self.path}: metadata {self.key('block_count')!r} is {count}, more layers than any model has"
            )
        return count

    def has(self, *tensors: str) -> bool:
        """Whether the file holds one of ``tensors``."""
        return any(name in self.file.tensors for name in tensors)

    def layers_with(self, part: str) -> set[int]:
        """Numbers of the layers that have the tensor ``blk.<number>.<part>``."""
        pattern = re.compile(rf"blk\.(\d{{1,6}})\.{re.escape(part)}")
        found = (pattern.fullmatch(name) for name in self.file.tensors)
        return {int(match[1]) for match in found if match is not None}

    def _scalar(self, suffix: str) -> Any:
        """Of an array the one value that all layers have, those apart that have none (0) of what others have."""
        value = self.raw(suffix)
        if not isinstance(value, GgufArray):
            return value
        distinct = np.unique(self.file.numbers(self.key(suffix)))
        distinct = distinct[distinct != 0] if distinct.size > 1 else distinct
        if distinct.size != 1:
            raise UnsupportedModelError(
                f"{self.path}: metadata {self.key(suffix)!r} differs between layers, which is not supported"
            )
        return distinct[0].item()

    def _require_number(self, suffix: str, value: Any, least: float | None, *, whole: bool) -> None:
        if value is None:
            raise ModelFormatError(f"{self.path}: metadata {self.key(suffix)!r} is missing; the file is incomplete")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_kind = is_number and (isinstance(value, int) or not whole)
        if not is_kind or not (value > 0 if least is None else value >= least) or not value <= MAX_VALUE:
            raise ModelFormatError(f"{self.path}: metadata {self.key(suffix)!r} is {value!r}, not a usable number")
