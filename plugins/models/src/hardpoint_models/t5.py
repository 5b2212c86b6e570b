"""T5: positions by learned biases of attention's scores, norms without mean or bias, products that are not scaled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardpoint.errors import ConfigError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields, shown
from hardpoint_models.encdec import TEXT_INPUTS, TextEncoderDecoder, require_whole_model
from hardpoint_models.encdec_config import AttentionShape, EncoderDecoderConfig, RelativePositions, StackConfig
from hardpoint_torch_runtime.layers import ACTIVATIONS

__all__ = ["T5Model", "create_t5", "read_t5"]


def read_t5(config: Mapping[str, Any], architecture: str, max_model_len: int) -> EncoderDecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are not
    computed here."""
    fields = ConfigFields(config, architecture)
    fields.require("is_encoder_decoder", (True,), True)
    activation, is_gated = _feed_forward(fields)
    attention = AttentionShape(fields.integer("num_heads"), fields.integer("d_kv"), 1.0, bias=False)
    num_layers, inner = fields.integer("num_layers", most=MAX_LAYERS), fields.integer("d_ff")
    is_tied, size = fields.flag("tie_word_embeddings", True), fields.integer("d_model")
    return EncoderDecoderConfig(
        hidden_size=size,
        vocab_size=fields.integer("vocab_size"),
        encoder=StackConfig(num_layers, attention, inner),
        decoder=StackConfig(fields.integer("num_decoder_layers", num_layers, MAX_LAYERS), attention, inner),
        activation=activation,
        max_encoder_tokens=max_model_len,
        is_gated=is_gated,
        uses_rms_norm=True,
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-6),
        linear_bias=False,
        # Checkpoints of before the field was there scale where the head is the embedding.
        head_scale=size**-0.5 if fields.flag("scale_decoder_outputs", is_tied) else 1.0,
        is_tied=is_tied,
        relative=_relative(fields),
    )


def _feed_forward(fields: ConfigFields) -> tuple[str, bool]:
    """Activation, and whether it gates; ``gated-gelu`` has always meant the approximation by tanh."""
    told: Any = fields.raw.get("feed_forward_proj") or "relu"
    gated, _, rest = told.partition("-") if isinstance(told, str) else ("", "", "")
    name, is_gated = (rest, True) if gated == "gated" and rest else (told, False)
    name = "gelu_new" if is_gated and name == "gelu" else name
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.architecture}: config field 'feed_forward_proj' is {shown(told)}; supported: an activation, with "
            f"or without 'gated-' before it, out of {', '.join(map(repr, ACTIVATIONS))}"
        )
    return name, is_gated


def _relative(fields: ConfigFields) -> RelativePositions:
    """The encoder has half of the buckets for each side, of which the lower half again have one distance each."""
    buckets = fields.integer("relative_attention_num_buckets", 32)
    farthest = fields.integer("relative_attention_max_distance", 128)
    if buckets % 4 or farthest <= buckets // 2:
        raise ModelFormatError(
            f"{fields.architecture}: relative_attention_num_buckets={buckets} with relative_attention_max_distance="
            f"{farthest}; buckets must be a multiple of 4, and the distance more than half of them"
        )
    return RelativePositions(buckets, farthest)


def _layer_rules(is_gated: bool) -> Iterator[WeightRule]:
    for part, last in (("encoder", 1), ("decoder", 2)):
        stored, held = f"{part}.block.*.layer", f"{part}.layers.*"
        for letter in ("q", "k", "v"):
            yield WeightRule(f"{stored}.0.SelfAttention.{letter}.weight", f"{held}.attention.qkv.weight", letter)
        yield WeightRule(f"{stored}.0.SelfAttention.o.weight", f"{held}.attention.output.weight")
        yield WeightRule(f"{stored}.0.layer_norm.weight", f"{held}.attention_norm.weight")
        yield WeightRule(f"{stored}.{last}.layer_norm.weight", f"{held}.feed_forward_norm.weight")
        block = f"{stored}.{last}.DenseReluDense"
        for name, shard in (("wi_0", "gate"), ("wi_1", "up")) if is_gated else (("wi", "up"),):
            yield WeightRule(f"{block}.{name}.weight", f"{held}.feed_forward.up.weight", shard)
        yield WeightRule(f"{block}.wo.weight", f"{held}.feed_forward.down.weight")
        bias = "layer.0.SelfAttention.relative_attention_bias.weight"
        yield WeightRule(f"{part}.block.0.{bias}", f"{part}.relative_bias.weight")
        yield WeightRule(f"{part}.final_layer_norm.weight", f"{part}.final_norm.weight")
    stored, held = "decoder.block.*.layer.1", "decoder.layers.*.cross_attention"
    # The oldest checkpoints have biases for the encoder's tokens too, which no version of the model has used.
    yield WeightRule("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", None)
    yield WeightRule(f"{stored}.EncDecAttention.q.weight", f"{held}.query.weight")
    for letter in ("k", "v"):
        yield WeightRule(f"{stored}.EncDecAttention.{letter}.weight", f"{held}.key_value.weight", letter)
    yield WeightRule(f"{stored}.EncDecAttention.o.weight", f"{held}.output.weight")
    yield WeightRule(f"{stored}.layer_norm.weight", f"{held}_norm.weight")


class T5Model(TextEncoderDecoder):
    """``T5ForConditionalGeneration``."""

    def weight_rules(self) -> Sequence[WeightRule]:
        return [
            *_layer_rules(self.config.is_gated),
            WeightRule("shared.weight", "shared.weight"),
            WeightRule("encoder.embed_tokens.weight", None),
            WeightRule("decoder.embed_tokens.weight", None),
            *self._head_rules(),
        ]

    def _head_rules(self) -> Iterator[WeightRule]:
        """A head of its own must not be passed over: files that call it tied, and do not scale, may hold one."""
        if not self.config.is_tied:
            yield WeightRule("lm_head.weight", "lm_head.projection.weight")
        elif self.config.head_scale != 1:
            yield WeightRule("lm_head.weight", None)


@plugin("model", capabilities={"tasks": ["generate"], "inputs": TEXT_INPUTS})
def create_t5(ctx: ModelContext, options: NoOptions) -> Model:
    """``T5ForConditionalGeneration``: also Flan-T5 and T5 1.1. Raises ``ConfigError`` for float16."""
    del options
    info, layers = require_whole_model(ctx)
    if layers.dtype_name == "float16":
        raise ConfigError(f"{info.architecture} overflows in float16; set --dtype to bfloat16 or float32")
    return T5Model(info, read_t5(info.config, info.architecture, layers.config.max_model_len), layers)
