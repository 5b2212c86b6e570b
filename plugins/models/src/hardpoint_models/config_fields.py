"""Reading architecture fields from a model's configuration, with errors that name field and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError

__all__ = ["ConfigFields"]


class ConfigFields:
    """View of ``ModelInfo.config``. JSON null counts as absent."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.raw = config
        self.architecture = architecture

    def integer(self, name: str, default: int | None = None) -> int:
        """Positive integer field; ``ModelFormatError`` if it is absent without default, or anything else."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFormatError(
                f"{self.architecture}: config field {name!r} is {value!r}; a positive integer is needed"
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFormatError(f"{self.architecture}: config field {name!r} is {value!r}; a number is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelFormatError(f"{self.architecture}: config field {name!r} is {value!r}; true or false is needed")
        return value

    def require(self, name: str, allowed: Sequence[Any], default: Any) -> None:
        """Raise ``UnsupportedModelError`` unless the field has one of the ``allowed`` values."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise UnsupportedModelError(
                f"{self.architecture}: config field {name!r} is {value!r}; supported: {', '.join(map(repr, allowed))}"
            )
