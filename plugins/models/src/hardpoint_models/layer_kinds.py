"""Decoders in which layers with a window and layers without one take turns, each kind with a rotation of its own."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import require_layer_types
from hardpoint_torch_runtime.layers import RopeParameters

__all__ = ["local_layers", "local_windows", "rotations_by_kind"]


def local_layers(fields: ConfigFields, num_layers: int, pattern: int) -> tuple[bool, ...]:
    """Per layer whether it has a window: as ``layer_types`` lists them, or all but every ``pattern``-th."""
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None:
        kinds = require_layer_types(fields, layer_types, num_layers)
        return tuple(kind == "sliding_attention" for kind in kinds)
    return tuple((index + 1) % pattern != 0 for index in range(num_layers))


def local_windows(fields: ConfigFields, is_local: tuple[bool, ...], default: int) -> tuple[int | None, ...]:
    """Per layer its window in tokens. An explicit null leaves windowed layers without a width, which is refused."""
    if not any(is_local):
        return (None,) * len(is_local)
    window = fields.integer("sliding_window", None if "sliding_window" in fields.raw else default)
    return tuple(window if local else None for local in is_local)


def rotations_by_kind(fields: ConfigFields, theta: float, local_theta: float) -> tuple[RopeParameters, RopeParameters]:
    """Rotation of layers without and with a window. Older files scale the former alone; the bases are those that hold
    where a file gives none for the kind."""
    present = fields.present()
    whole = RopeParameters.from_config({"rope_theta": theta, **present}, "full_attention")
    by_kind = present.pop("rope_parameters", {})
    present.pop("rope_scaling", None)
    present["rope_theta"] = local_theta
    if isinstance(by_kind, Mapping) and by_kind.get("sliding_attention"):
        present["rope_parameters"] = by_kind["sliding_attention"]
    return whole, RopeParameters.from_config(present)
