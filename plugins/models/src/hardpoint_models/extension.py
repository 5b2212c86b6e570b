"""What other packages add decoder architectures with: the record of a decoder, readers of its fields, the model."""

from __future__ import annotations

from hardpoint_models.building import build_decoder
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant, ExpertsConfig
from hardpoint_models.layer_kinds import local_layers, local_windows, rotations_by_kind
from hardpoint_models.moe import expert_rules, softmax_routing

__all__ = [
    "ConfigFields",
    "DecoderConfig",
    "DecoderVariant",
    "ExpertsConfig",
    "build_decoder",
    "expert_rules",
    "local_layers",
    "local_windows",
    "rotations_by_kind",
    "softmax_routing",
]
