"""Reading architecture fields from a model's configuration, with errors that name field and value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError

__all__ = ["MAX_INTEGER", "MAX_LAYERS", "ConfigFields", "finite", "shown"]

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000
"""Every layer is built before any tensor is looked for, and no model has nearly as many."""
MAX_SHOWN = 120


def shown(value: Any) -> str:
    """As it would be written in code, cut to what fits a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class ConfigFields:
    """View of ``ModelInfo.config``. JSON null counts as absent."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.raw = config
        self.architecture = architecture

    def present(self) -> dict[str, Any]:
        """The fields that are not null."""
        return {name: value for name, value in self.raw.items() if value is not None}

    def integer(self, name: str, default: int | None = None, most: int = MAX_INTEGER) -> int:
        """Positive integer field; ``ModelFormatError`` if it is absent without default, or anything else."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self._fault(name, value, f"a positive integer is needed, at most {most}")
        return value

    def count(self, name: str, default: int, most: int = MAX_INTEGER) -> int:
        """As :meth:`integer`, but zero is allowed too, which an explicit null means as well."""
        value = self.raw.get(name, default)
        if value is None or (type(value) is int and value == 0):
            return 0
        return self.integer(name, default, most)

    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", most=MAX_LAYERS)

    def number(self, name: str, default: float) -> float:
        """Any finite number."""
        value = self.raw.get(name)
        if value is None:
            return default
        number = finite(value)
        if number is None:
            raise self._fault(name, value, "a number is needed")
        return number

    def positive(self, name: str, default: float) -> float:
        """A number above zero."""
        value = self.number(name, default)
        if value <= 0:
            raise self._fault(name, value, "it must be above 0")
        return value

    def epsilon(self, name: str, default: float) -> float:
        """What norms add to a mean of squares: below zero, it would make them divide by roots that do not exist."""
        value = self.number(name, default)
        if value < 0:
            raise self._fault(name, value, "it must not be below 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._fault(name, value, "true or false is needed")
        return value

    def require(self, name: str, allowed: Sequence[Any], default: Any) -> None:
        """Raise ``UnsupportedModelError`` unless the field has one of the ``allowed`` values."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value not in allowed:
            raise UnsupportedModelError(
                f"{self.architecture}: config field {name!r} is {shown(value)}; supported: "
                f"{', '.join(map(repr, allowed))}"
            )

    def _fault(self, name: str, value: Any, needed: str) -> ModelFormatError:
        return ModelFormatError(f"{self.architecture}: config field {name!r} is {shown(value)}; {needed}")


def finite(value: Any) -> float | None:
    """None for anything but a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
