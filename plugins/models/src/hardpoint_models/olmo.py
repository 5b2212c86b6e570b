"""OLMo 2 and 3: only outputs are normalized, and all heads of a query or key at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant
from hardpoint_models.layer_kinds import local_layers, local_windows, rotations_by_kind

__all__ = ["create_olmo2", "create_olmo3", "read_olmo2", "read_olmo3"]

OLMO2 = DecoderVariant(mlp_bias=False, qk_norm="projections", norm_placement="after", default_eps=1e-5)
OLMO3_THETA, OLMO3_WINDOW, OLMO3_PATTERN = 500_000.0, 4096, 4
"""Every so many layers one attends to everything, where the configuration lists no layer types."""


def read_olmo2(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features the decoder
    does not compute."""
    return DecoderConfig.read(config, architecture, OLMO2)


def read_olmo3(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """OLMo 2 with windows in most layers; only layers without one have their context stretched. Raises as
    :func:`read_olmo2`."""
    fields = ConfigFields(config, architecture)
    plain = {name: value for name, value in fields.present().items() if name not in ("rope_parameters", "rope_scaling")}
    dense = DecoderConfig.read(plain, architecture, OLMO2)
    is_local = local_layers(fields, dense.num_layers, OLMO3_PATTERN)
    rope, local_rope = rotations_by_kind(fields, OLMO3_THETA, fields.number("rope_theta", OLMO3_THETA))
    return replace(
        dense,
        windows=local_windows(fields, is_local, OLMO3_WINDOW),
        rope=rope,
        local_rope=local_rope,
        local_layers=is_local,
    )


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_olmo2(ctx: ModelContext, options: NoOptions) -> Model:
    """``Olmo2ForCausalLM``."""
    del options
    return build_decoder(ctx, read_olmo2)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_olmo3(ctx: ModelContext, options: NoOptions) -> Model:
    """``Olmo3ForCausalLM``: three layers with a window to one without, unless the configuration lists others."""
    del options
    return build_decoder(ctx, read_olmo3)
