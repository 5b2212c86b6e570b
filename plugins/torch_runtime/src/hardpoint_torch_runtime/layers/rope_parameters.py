"""Rotary settings from a model configuration, in either of the spellings found in the wild."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError

__all__ = ["RopeParameters"]

SUPPORTED_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
STRETCHING_TYPES = ("dynamic", "llama3", "yarn", "longrope")
OTHER_NAMES: Mapping[str, str] = {"mrope": "default", "su": "longrope"}
"""Older names; what makes a rotation multidimensional is its sections."""
NUM_AXES = 3
"""Positions of a token in an image or video: time, height and width."""
MAX_SHOWN = 120
MAX_TRAINED, MAX_TURNS = 2**31 - 1, 2**31 - 1
"""Tokens of a context, and how often a pair turns within one."""
MIN_TRAINED = 2
"""Tokens; the logarithm of the trained context is a divisor."""


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """``rope_type`` and the fields its frequencies depend on. Lengths in tokens; ``factor`` stretches the context.

    Attributes:
        short_factors, long_factors: of ``longrope``, a divisor per pair, for contexts up to the trained one and above.
        sections: how many pairs turn by each of a token's positions (time, height, width), or empty where a token has
            one position.
        sections_alternate: pairs go to the positions in turns, not in blocks.
    """

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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> RopeParameters:
        """Read ``rope_parameters`` (flat, or per ``layer_type``), or the older ``rope_theta`` with ``rope_scaling``.

        Raises ``UnsupportedModelError`` for an unknown type, ``ModelFormatError`` for a missing or impossible value;
        both name the field.
        """
        given = _settings(config, layer_type)
        rope_type = given.get("rope_type", given.get("type", "default"))
        rope_type = OTHER_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
        if rope_type not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"rope_type {_shown(rope_type)} in the model's config.json is not supported; supported: "
                f"{', '.join(SUPPORTED_TYPES)}"
            )
        required = {"default": (), "longrope": ("short_factor", "long_factor")}.get(rope_type, ("factor",))
        missing = [name for name in required if given.get(name) is None]
        if missing:
            raise ModelFormatError(f"rope_type {rope_type!r} in the model's config.json needs {missing[0]!r}")
        defaults = cls()
        original = _original_length(given, config, rope_type)
        rope = cls(
            theta=_number(given, "rope_theta", _number(config, "rope_theta", defaults.theta)),
            rope_type=rope_type,
            factor=_number(given, "factor", _stretch(config, original) if rope_type == "longrope" else 1.0),
            original_max_position=original,
            low_freq_factor=_number(given, "low_freq_factor", defaults.low_freq_factor),
            high_freq_factor=_number(given, "high_freq_factor", defaults.high_freq_factor),
            beta_fast=_number(given, "beta_fast", defaults.beta_fast),
            beta_slow=_number(given, "beta_slow", defaults.beta_slow),
            attention_factor=_optional(given, "attention_factor"),
            mscale=_optional(given, "mscale"),
            mscale_all_dim=_optional(given, "mscale_all_dim"),
            truncate=_flag(given, "truncate", True),
            partial_factor=_number(
                given, "partial_rotary_factor", _number(config, "partial_rotary_factor", defaults.partial_factor)
            ),
            short_factors=_numbers(given, "short_factor") if rope_type == "longrope" else (),
            long_factors=_numbers(given, "long_factor") if rope_type == "longrope" else (),
            sections=_counts(given, "mrope_section"),
            sections_alternate=_flag(given, "mrope_interleaved", False),
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
            if self.rope_type not in STRETCHING_TYPES or MIN_TRAINED <= (self.original_max_position or 0) <= MAX_TRAINED
            else f"{self.original_max_position} is no length, and rope_type {self.rope_type!r} needs one",
            "beta_fast": _fault_of_turns(self.beta_fast),
            "beta_slow": _fault_of_turns(self.beta_slow),
            "short_factor": _fault_of_divisors(self.short_factors),
            "long_factor": _fault_of_divisors(self.long_factors),
            "mrope_section": None
            if not self.sections or (len(self.sections) == NUM_AXES and min(self.sections) >= 0)
            else f"{list(self.sections)} are not {NUM_AXES} counts",
        }
        found = [f"{name}: {fault}" for name, fault in faults.items() if fault]
        if found:
            raise ModelFormatError(f"rotary settings in the model's config.json: {'; '.join(found)}")


def _settings(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if layer_type is not None and isinstance(given, Mapping) and layer_type in given:
        given = given[layer_type]
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"rotary settings in the model's config.json are {_shown(given)}; an object is needed")
    return given


def _original_length(given: Mapping[str, Any], config: Mapping[str, Any], rope_type: str) -> int | None:
    """The trained context; stretched models that do not state it were trained on the configured one.

    For ``dynamic`` that is the only one: its configured context is the one that it was trained on.
    """
    name = "original_max_position_embeddings"
    length = None
    if rope_type != "dynamic":
        length = _optional(given, name)
        length = _optional(config, name) if length is None else length
    if length is None and rope_type in STRETCHING_TYPES:
        length = _optional(config, "max_position_embeddings")
    return None if length is None else int(length)


def _stretch(config: Mapping[str, Any], original: int | None) -> float:
    """How much longer the configured context is than the trained one."""
    configured = _optional(config, "max_position_embeddings")
    return 1.0 if configured is None or not original else configured / original


def _fault_of_divisors(factors: tuple[float, ...]) -> str | None:
    return None if all(factor > 0 for factor in factors) else f"{min(factors)} is not positive"


def _fault_of_turns(turns: float) -> str | None:
    return None if 0 < turns <= MAX_TURNS else f"{turns} is not above 0 and at most {MAX_TURNS}"


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = fields.get(name)
    if values is None:
        return ()
    if not isinstance(values, list | tuple):
        raise ModelFormatError(f"field {name!r} in the model's config.json is {_shown(values)}; a list is needed")
    return tuple(_number({name: value}, name, math.nan) for value in values)


def _counts(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _numbers(fields, name)
    if any(not value.is_integer() for value in values):
        raise ModelFormatError(
            f"field {name!r} in the model's config.json is {_shown(fields[name])}; whole numbers are needed"
        )
    return tuple(map(int, values))


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelFormatError(f"field {name!r} in the model's config.json is {_shown(value)}; true or false is needed")
    return default if value is None else value


def _shown(value: Any) -> str:
    return repr(value)[:MAX_SHOWN]


def _optional(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The largest integers are no floats, and comparing does not turn them into any.
    if not is_number or not -sys.float_info.max <= value <= sys.float_info.max:
        raise ModelFormatError(f"field {name!r} in the model's config.json is {_shown(value)}; a number is needed")
    return float(value)


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = _optional(fields, name)
    return default if value is None else value
