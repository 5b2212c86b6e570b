"""Rotary settings from a model configuration, in either of the spellings found in the wild."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import UnsupportedModelError

__all__ = ["RopeParameters"]

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")


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

        Raises ``UnsupportedModelError`` naming the field for an unknown type or a missing value.
        """
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if layer_type is not None and isinstance(given.get(layer_type), Mapping):
            given = given[layer_type]
        rope_type = given.get("rope_type", given.get("type", "default"))
        if rope_type not in SUPPORTED_TYPES:
            raise UnsupportedModelError(
                f"rope_type {rope_type!r} in the model's config.json is not supported; supported: "
                f"{', '.join(SUPPORTED_TYPES)}"
            )
        if rope_type != "default" and "factor" not in given:
            raise UnsupportedModelError(f"rope_type {rope_type!r} in the model's config.json needs 'factor'")
        original = given.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        if original is None and rope_type in ("llama3", "yarn"):
            original = config.get("max_position_embeddings")
        defaults = cls()
        return cls(
            theta=float(given.get("rope_theta", config.get("rope_theta", defaults.theta))),
            rope_type=rope_type,
            factor=float(given.get("factor", 1.0)),
            original_max_position=None if original is None else int(original),
            low_freq_factor=float(given.get("low_freq_factor", defaults.low_freq_factor)),
            high_freq_factor=float(given.get("high_freq_factor", defaults.high_freq_factor)),
            beta_fast=float(given.get("beta_fast") or defaults.beta_fast),
            beta_slow=float(given.get("beta_slow") or defaults.beta_slow),
            attention_factor=given.get("attention_factor"),
            mscale=given.get("mscale"),
            mscale_all_dim=given.get("mscale_all_dim"),
            truncate=bool(given.get("truncate", True)),
            partial_factor=float(given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))),
        )
