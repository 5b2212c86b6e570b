"""What Qwen2-VL and Qwen2.5-VL read of their towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields, shown
from hardpoint_models.qwen2_vl_tower import QwenTowerConfig
from hardpoint_models.siglip_config import section
from hardpoint_torch_runtime.layers import ACTIVATIONS

__all__ = ["read_qwen2_5_tower", "read_qwen2_tower"]

MAX_SIDE = 1024
"""Of patches, in pixels, and of what is merged of them: every patch is a row of as many values as it has pixels."""
_COMMON: Mapping[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2: Mapping[str, Any] = {**_COMMON, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4}
_QWEN2_5: Mapping[str, Any] = {
    **_COMMON,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "tokens_per_second": 4,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}


def _fields(config: Mapping[str, Any], architecture: str, defaults: Mapping[str, Any]) -> ConfigFields:
    given = section(config, "vision_config", architecture)
    known = {name: value for name, value in given.items() if value is not None}
    # An older name of the same.
    if "in_chans" in known:
        known.setdefault("in_channels", known["in_chans"])
    fields = ConfigFields({**defaults, **known}, f"{architecture}, vision_config")
    rope = known.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", "axial") != "axial" or rope.get("rope_theta", 1e4) != 1e4:
        raise UnsupportedModelError(
            f"{architecture}: vision_config has rope_parameters {shown(rope)}; supported: 'axial' with rope_theta 10000"
        )
    return fields


def _sizes(fields: ConfigFields, width: int) -> dict[str, Any]:
    num_heads = fields.integer("num_heads")
    if width % num_heads or (width // num_heads) % 4:
        raise ModelFormatError(
            f"{fields.architecture}: {num_heads} heads of a width of {width} are not multiples of 4 wide, of which two "
            "pairs turn by rows and by columns"
        )
    return {
        "width": width,
        "num_heads": num_heads,
        "depth": fields.integer("depth", most=MAX_LAYERS),
        "num_channels": fields.integer("in_channels", most=64),
        "patch_size": fields.integer("patch_size", most=MAX_SIDE),
        "frames_per_patch": fields.integer("temporal_patch_size", most=64),
        "merge_size": fields.integer("spatial_merge_size", most=64),
    }


def _require_output(fields: ConfigFields, name: str, hidden_size: int) -> None:
    given = fields.integer(name, hidden_size)
    if given != hidden_size:
        raise ModelFormatError(
            f"{fields.architecture}: {name}={given}, but the language model's hidden_size is {hidden_size}"
        )


def read_qwen2_tower(config: Mapping[str, Any], architecture: str, hidden_size: int) -> QwenTowerConfig:
    """Raises ``ModelFormatError`` for malformed fields, ``UnsupportedModelError`` for what is not computed here."""
    fields = _fields(config, architecture, _QWEN2)
    fields.require("hidden_act", tuple(ACTIVATIONS), None)
    _require_output(fields, "hidden_size", hidden_size)
    width = fields.integer("embed_dim")
    return QwenTowerConfig(
        **_sizes(fields, width),
        intermediate_size=width * fields.integer("mlp_ratio", most=1024),
        output_size=hidden_size,
        activation=fields.raw["hidden_act"],
    )


def read_qwen2_5_tower(config: Mapping[str, Any], architecture: str, hidden_size: int) -> tuple[QwenTowerConfig, int]:
    """The tower, and positions per second of videos. Raises as :func:`read_qwen2_tower`."""
    fields = _fields(config, architecture, _QWEN2_5)
    fields.require("hidden_act", ("silu",), None)
    _require_output(fields, "out_hidden_size", hidden_size)
    sizes = _sizes(fields, fields.integer("hidden_size"))
    window = fields.integer("window_size") // (sizes["merge_size"] * sizes["patch_size"])
    if window < 1:
        raise ModelFormatError(
            f"{fields.architecture}: windows of {fields.raw['window_size']} pixels are smaller than what is merged "
            f"({sizes['merge_size']} patches of {sizes['patch_size']} pixels)"
        )
    tower = QwenTowerConfig(
        **sizes,
        intermediate_size=fields.integer("intermediate_size"),
        output_size=hidden_size,
        activation="silu",
        is_gated=True,
        window=window,
        whole_layers=_whole_layers(fields),
    )
    return tower, fields.integer("tokens_per_second", most=10_000)


def _whole_layers(fields: ConfigFields) -> frozenset[int]:
    given = fields.raw["fullatt_block_indexes"]
    if not isinstance(given, list | tuple) or not all(type(one) is int and one >= 0 for one in given):
        raise ModelFormatError(
            f"{fields.architecture}: config field 'fullatt_block_indexes' is {shown(given)}; a list of numbers of "
            "layers is needed"
        )
    return frozenset(given)
