"""Phi-3 and Phi-4: the Llama decoder with fused projections in the files and a context stretched pair by pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.errors import UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant

__all__ = ["create_phi3", "read_phi3"]

PHI3 = DecoderVariant(qkv_bias=False, output_bias=False, mlp_bias=False, has_sliding_window=True, default_eps=1e-5)
LENGTHS: Mapping[str, Any] = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
"""What holds where a configuration leaves them out, in tokens."""
ROPE_TYPES = ("default", "longrope")


def read_phi3(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for other scalings of the
    rotation than these models have, or for features the decoder does not compute."""
    stated = {name: value for name, value in config.items() if value is not None or name not in LENGTHS}
    read = DecoderConfig.read({**LENGTHS, **stated}, architecture, PHI3)
    if read.rope.rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{architecture}: rope_type is {read.rope.rope_type!r}; supported: {', '.join(map(repr, ROPE_TYPES))}"
        )
    return read


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_phi3(ctx: ModelContext, options: NoOptions) -> Model:
    """``Phi3ForCausalLM``: Phi-3, Phi-3.5 and Phi-4, also those that rotate only a part of each head."""
    del options
    return build_decoder(ctx, read_phi3)
