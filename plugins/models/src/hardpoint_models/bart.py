"""BART: an encoder and a decoder over one vocabulary, learned positions, norms behind each block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields
from hardpoint_models.encdec import TEXT_INPUTS, TextEncoderDecoder, require_whole_model
from hardpoint_models.encdec_config import EncoderDecoderConfig, StackConfig, divided
from hardpoint_torch_runtime.layers import ACTIVATIONS

__all__ = ["BartModel", "bart_layer_rules", "create_bart", "read_bart"]


def read_bart(config: Mapping[str, Any], architecture: str, max_model_len: int) -> EncoderDecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are not
    computed here."""
    fields = ConfigFields(config, architecture)
    fields.require("activation_function", tuple(ACTIVATIONS), "gelu")
    fields.require("tie_word_embeddings", (True,), True)
    fields.require("is_encoder_decoder", (True,), True)
    size, positions = fields.integer("d_model"), fields.integer("max_position_embeddings")

    def stack(name: str) -> StackConfig:
        return StackConfig(
            fields.integer(f"{name}_layers", most=MAX_LAYERS),
            divided(fields, size, f"{name}_attention_heads"),
            fields.integer(f"{name}_ffn_dim"),
            positions,
        )

    return EncoderDecoderConfig(
        hidden_size=size,
        vocab_size=fields.integer("vocab_size"),
        encoder=stack("encoder"),
        decoder=stack("decoder"),
        activation=config.get("activation_function") or "gelu",
        max_encoder_tokens=min(positions, max_model_len),
        norms_first=False,
        position_offset=2,
        embedding_scale=math.sqrt(size) if fields.flag("scale_embedding", False) else 1.0,
        has_logit_bias=True,
    )


_SELF: Mapping[bool, Mapping[str, str]] = {
    True: {"q": "qkv", "k": "qkv", "v": "qkv"},
    False: {"q": "query_value", "k": "key", "v": "query_value"},
}
_CROSS: Mapping[bool, Mapping[str, str]] = {
    True: {"k": "key_value", "v": "key_value"},
    False: {"k": "key", "v": "value"},
}
"""By whether projections to keys have a bias: which layer holds a projection."""


def bart_layer_rules(key_bias: bool = True) -> Iterator[WeightRule]:
    """Names that BART and those after it give to layers. ``key_bias``: projections to keys have one."""
    for part in ("encoder", "decoder"):
        stored, held = f"model.{part}.layers.*", f"{part}.layers.*"
        for letter, home in _SELF[key_bias].items():
            shard = None if home == "key" else letter
            yield WeightRule(f"{stored}.self_attn.{letter}_proj.*", f"{held}.attention.{home}.*", shard)
        yield WeightRule(f"{stored}.self_attn.out_proj.*", f"{held}.attention.output.*")
        yield WeightRule(f"{stored}.self_attn_layer_norm.*", f"{held}.attention_norm.*")
        yield WeightRule(f"{stored}.fc1.*", f"{held}.feed_forward.up.*")
        yield WeightRule(f"{stored}.fc2.*", f"{held}.feed_forward.down.*")
        yield WeightRule(f"{stored}.final_layer_norm.*", f"{held}.feed_forward_norm.*")
        yield WeightRule(f"model.{part}.embed_positions.weight", f"{part}.positions.weight")
    stored, held = "model.decoder.layers.*.encoder_attn", "decoder.layers.*.cross_attention"
    yield WeightRule(f"{stored}.q_proj.*", f"{held}.query.*")
    for letter, home in _CROSS[key_bias].items():
        shard = letter if home == "key_value" else None
        yield WeightRule(f"{stored}.{letter}_proj.*", f"{held}.{home}.*", shard)
    yield WeightRule(f"{stored}.out_proj.*", f"{held}.output.*")
    yield WeightRule(f"{stored}_layer_norm.*", f"{held}_norm.*")


class BartModel(TextEncoderDecoder):
    """``BartForConditionalGeneration``."""

    def weight_rules(self) -> Sequence[WeightRule]:
        return [
            *bart_layer_rules(),
            *(
                WeightRule(f"model.{part}.layernorm_embedding.*", f"{part}.embedding_norm.*")
                for part in ("encoder", "decoder")
            ),
            WeightRule("model.shared.weight", "shared.weight"),
            WeightRule("final_logits_bias", "logit_bias", optional=True),
            # One table under other names.
            *(
                WeightRule(name, None)
                for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
            ),
        ]


@plugin("model", capabilities={"tasks": ["generate"], "inputs": TEXT_INPUTS})
def create_bart(ctx: ModelContext, options: NoOptions) -> Model:
    """``BartForConditionalGeneration``."""
    del options
    info, layers = require_whole_model(ctx)
    config = read_bart(info.config, info.architecture, layers.config.max_model_len)
    return BartModel(info, config, layers)
