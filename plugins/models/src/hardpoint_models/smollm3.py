"""SmolLM3: the Llama decoder in which every fourth layer attends without positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant

__all__ = ["create_smollm3", "read_smollm3"]

SMOLLM3 = DecoderVariant(is_tied_by_default=True, has_sliding_window=True, default_theta=2_000_000.0)
DEFAULT_INTERVAL = 4
"""Every so many layers one does not rotate, where the configuration lists none."""


def read_smollm3(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Windows are off unless asked for, and hold in layers without positions where no layer types are listed.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features the decoder does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    rotated = _rotated_layers(fields)
    has_window = fields.flag("use_sliding_window", False)
    kinds = ["full_attention" if rotates else "sliding_attention" for rotates in rotated]
    listed = kinds if fields.raw.get("layer_types") is None else fields.raw["layer_types"]
    stated = {**config, "use_sliding_window": has_window, "layer_types": listed}
    return replace(DecoderConfig.read(stated, architecture, SMOLLM3), rotated_layers=rotated)


def _rotated_layers(fields: ConfigFields) -> tuple[bool, ...]:
    num_layers = fields.num_layers()
    given = fields.raw.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(given, list | tuple) or len(given) < num_layers or any(one not in (0, 1) for one in given):
        raise ModelFormatError(
            f"{fields.architecture}: config field 'no_rope_layers' is {shown(given)}; a 0 or 1 for each of "
            f"{num_layers} layers is needed, 0 where heads do not rotate"
        )
    return tuple(map(bool, given[:num_layers]))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_smollm3(ctx: ModelContext, options: NoOptions) -> Model:
    """``SmolLM3ForCausalLM``."""
    del options
    return build_decoder(ctx, read_smollm3)
