"""Rotary settings from a model configuration, in either of the spellings found in the wild."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError

__all__ = ["RopeParameters"]

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")
STRETCHING_TYPES = ("llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """``rope_type`` and the fields its frequencies depend on. Lengths in tokens; ``factor`` stretches the context."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_factor: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> RopeParameters:
        """Read ``rope_parameters`` (flat, or per ``layer_type``), or the older ``rope_theta`` with ``rope_scaling``.

        Raises ``UnsupportedModelError`` for an unknown type, ``ModelFormatError`` for a missing or impossible value;
        both name the field.
        """
        given = _settings(config, layer_type)
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"rope_type {rope_type!r} in the model's config.json is not supported; supported: "
                f"{', '.join(SUPPORTED_TYPES)}"
            )
        if rope_type != "default" and "factor" not in given:
            raise ModelFormatError(f"rope_type {rope_type!r} in the model's config.json needs 'factor'")
        defaults = cls()
        rope = cls(
            theta=_number(given, "rope_theta", _number(config, "rope_theta", defaults.theta)),
            rope_type=rope_type,
            factor=_number(given, "factor", 1.0),
            original_max_position=_original_length(given, config, rope_type),
            low_freq_factor=_number(given, "low_freq_factor", defaults.low_freq_factor),
            high_freq_factor=_number(given, "high_freq_factor", defaults.high_freq_factor),
            beta_fast=_number(given, "beta_fast", defaults.beta_fast),
            beta_slow=_number(given, "beta_slow", defaults.beta_slow),
            attention_factor=_optional(given, "attention_factor"),
            mscale=_optional(given, "mscale"),
            mscale_all_dim=_optional(given, "mscale_all_dim"),
            truncate=bool(given.get("truncate", True)),
            partial_factor=_number(
                given, "partial_rotary_factor", _number(config, "partial_rotary_factor", defaults.partial_factor)
            ),
        )
        rope.check()
        return rope

    @property
    def original_length(self) -> int:
        """The trained context of a stretched model, in tokens; ``ModelFormatError`` where none is known."""
        if self.original_max_position is None:
            raise ModelFormatError(f"rope_type {self.rope_type!r} needs original_max_position_embeddings")
        return self.original_max_position

    def check(self) -> None:
        """Raise ``ModelFormatError`` naming a value no frequencies can be computed from."""
        faults = {
            "rope_theta": None if self.theta > 1 else f"{self.theta} is not above 1",
            "factor": None if self.factor > 0 else f"{self.factor} is not positive",
            "partial_rotary_factor": None
            if 0 < self.partial_factor <= 1
            else f"{self.partial_factor} is not in (0, 1]",
            "high_freq_factor": None
            if self.high_freq_factor > self.low_freq_factor
            else f"{self.high_freq_factor} is not above low_freq_factor={self.low_freq_factor}",
            "original_max_position_embeddings": None
            if self.rope_type not in STRETCHING_TYPES or (self.original_max_position or 0) > 0
            else f"{self.original_max_position} is no length, and rope_type {self.rope_type!r} needs one",
        }
        found = [f"{name}: {fault}" for name, fault in faults.items() if fault]
        if found:
            raise ModelFormatError(f"rotary settings in the model's config.json: {'; '.join(found)}")


def _settings(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if layer_type is not None and isinstance(given, Mapping) and layer_type in given:
        given = given[layer_type]
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"rotary settings in the model's config.json are {given!r}; an object is needed")
    return given


def _original_length(given: Mapping[str, Any], config: Mapping[str, Any], rope_type: str) -> int | None:
    """The trained context; stretched models that do not state it were trained on the configured one."""
    name = "original_max_position_embeddings"
    length = _optional(given, name)
    if length is None:
        length = _optional(config, name)
    if length is None and rope_type in STRETCHING_TYPES:
        length = _optional(config, "max_position_embeddings")
    return None if length is None else int(length)


def _optional(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelFormatError(f"field {name!r} in the model's config.json is {value!r}; a number is needed")
    return float(value)


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = _optional(fields, name)
    return default if value is None else value
