"""What the dense decoder family reads from a configuration, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import WeightRule
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_torch_runtime.layers import LatentSizes, MixtureSizes, RopeParameters, RoutingParameters

__all__ = [
    "Activation",
    "DecoderConfig",
    "DecoderVariant",
    "ExpertsConfig",
    "GateClamp",
    "HeadNorm",
    "LatentConfig",
    "NormPlacement",
    "QueryTemperature",
    "require_grouped_heads",
    "require_layer_types",
]

Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["before", "around", "after"]
HeadNorm = Literal["heads", "projections", "rotated"]
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class DecoderVariant:
    """How members of the family differ. Fields are None where the configuration decides.

    ``default_window`` holds where the configuration does not mention ``sliding_window``; an explicit null means none.
    ``has_window_switch``: windows need ``use_sliding_window``, which is off unless it is set, or a list of layer types.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: HeadNorm | None = None
    norm_placement: NormPlacement = "before"
    has_sliding_window: bool = False
    has_window_switch: bool = False
    default_window: int | None = None
    default_theta: float = 10000.0
    default_eps: float = 1e-6
    is_tied_by_default: bool = False


@dataclass(frozen=True, slots=True)
class GateClamp:
    """Of a gated block: see ``ClampedSwiGLU``."""

    slope: float
    limit: float


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by ``1 + growth * log(1 + (p + 1) // span)``, so that attention over many
    keys stays as sharp as over few."""

    span: int
    growth: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward of the layers in ``layers`` (one entry per layer).

    ``rules`` say where checkpoints keep gates and experts. ``clamp`` is that of the experts' gates, which else are
    plain SiLU.
    """

    sizes: MixtureSizes
    routing: RoutingParameters
    layers: tuple[bool, ...]
    rules: tuple[WeightRule, ...]
    clamp: GateClamp | None = None


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (MLA) in all layers, in place of the one with keys and values of its own.

    ``rules`` say where checkpoints keep the projections.
    """

    sizes: LatentSizes
    rules: tuple[WeightRule, ...]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes are those of the whole model; ``windows`` holds one entry per layer, None for full attention.

    Attributes:
        qk_norm: queries and keys are normalized before they rotate, head by head or all heads of a token at once; or
            head by head after they have ``rotated``, in layers where they do, without weights.
        chunk_sizes: one entry per layer, tokens of the chunks beyond which nothing is seen, or None; empty for none.
        has_sinks: each head has a sink, a logit without a value.
        sees_whole_media: tokens of one image see each other in both directions.
        query_temperature: of layers that do not rotate.
        attention_scale: factor on the products of queries and keys.
        pairs_are_neighbors: entries (2 i, 2 i + 1) of a head rotate together, not those half a head apart.
        local_rope: rotation of the layers in ``local_layers``; None where all layers rotate alike.
        local_layers: one entry per layer.
        rotated_layers: one entry per layer, False where attention sees no positions; empty where all layers rotate.
        norm_offset: what checkpoints leave off the weights of norms.
        norm_placement: what is normalized in a layer: the inputs of attention and feed-forward, their outputs before
            these are added, or both (``around``).
        embedding_scale: factor on token embeddings; given embeddings bear it already.
        input_scale: factor on embeddings, given ones too.
        residual_scale: factor on the outputs of attention and feed-forward when these are added.
        logits_divisor: logits are divided by this.
        attention_soft_cap, logits_soft_cap: ``c`` in ``c * tanh(x / c)`` on scores and on logits, or None.
        latent: if given, ``head_size`` is that of its rotated part, and ``num_kv_heads`` says nothing.
        rules: what to do with tensors that the family knows nothing about; they come before its own rules.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    is_tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: HeadNorm | None
    rope: RopeParameters
    windows: tuple[int | None, ...]
    attention_scale: float
    chunk_sizes: tuple[int | None, ...] = ()
    has_sinks: bool = False
    sees_whole_media: bool = False
    query_temperature: QueryTemperature | None = None
    activation: Activation = "silu"
    pairs_are_neighbors: bool = False
    local_rope: RopeParameters | None = None
    local_layers: tuple[bool, ...] = ()
    rotated_layers: tuple[bool, ...] = ()
    norm_offset: float = 0.0
    norm_placement: NormPlacement = "before"
    embedding_scale: float | None = None
    input_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    rules: tuple[WeightRule, ...] = ()

    def rotation_of(self, layer: int) -> int | None:
        """0 for the rotation of the model, 1 for the local one, None where the layer has none."""
        if self.rotated_layers and not self.rotated_layers[layer]:
            return None
        return int(self.local_rope is not None and self.local_layers[layer])

    @classmethod
    def read(cls, config: Mapping[str, Any], architecture: str, variant: DecoderVariant) -> DecoderConfig:
        """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this
        family does not compute."""
        fields = ConfigFields(config, architecture)
        fields.require("hidden_act", ("silu", "swish"), "silu")
        fields.require("pretraining_tp", (1,), 1)
        hidden_size = fields.integer("hidden_size")
        num_heads, num_kv_heads = require_grouped_heads(fields)
        num_layers = fields.num_layers()
        head_size = fields.integer("head_dim", hidden_size // num_heads)
        attention_bias = fields.flag("attention_bias", False)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            vocab_size=fields.integer("vocab_size"),
            norm_eps=fields.epsilon("rms_norm_eps", variant.default_eps),
            is_tied=fields.flag("tie_word_embeddings", variant.is_tied_by_default),
            qkv_bias=attention_bias if variant.qkv_bias is None else variant.qkv_bias,
            output_bias=attention_bias if variant.output_bias is None else variant.output_bias,
            mlp_bias=fields.flag("mlp_bias", False) if variant.mlp_bias is None else variant.mlp_bias,
            qk_norm=variant.qk_norm,
            norm_placement=variant.norm_placement,
            rope=RopeParameters.from_config({"rope_theta": variant.default_theta, **fields.present()}),
            windows=_windows(fields, num_layers, variant),
            attention_scale=head_size**-0.5,
        )


def require_grouped_heads(fields: ConfigFields) -> tuple[int, int]:
    """Query and KV heads; ``ModelFormatError`` where the former cannot be shared out among the latter."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelFormatError(
            f"{fields.architecture}: num_attention_heads={num_heads} is no multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_heads, num_kv_heads


DEFAULT_FIRST_WINDOWED = 28
"""``max_window_layers`` of the members with a switch, where the configuration leaves it out."""


def _windows(fields: ConfigFields, num_layers: int, variant: DecoderVariant) -> tuple[int | None, ...]:
    """Per layer, from ``layer_types`` if given, else from the older switches."""
    given = fields.raw.get("sliding_window", variant.default_window)
    if not variant.has_sliding_window or given is None or not fields.flag("use_sliding_window", True):
        return (None,) * num_layers
    window = fields.integer("sliding_window", variant.default_window)
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None:
        kinds = require_layer_types(fields, layer_types, num_layers)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not variant.has_window_switch:
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = (
        0 if fields.raw.get("max_window_layers") == 0 else fields.integer("max_window_layers", DEFAULT_FIRST_WINDOWED)
    )
    return tuple(window if layer >= first else None for layer in range(num_layers))


def require_layer_types(fields: ConfigFields, layer_types: Any, num_layers: int) -> Sequence[str]:
    """The entries of ``layer_types``, one per layer: ``full_attention`` or ``sliding_attention``.

    ``ModelFormatError`` for anything but a list of that length, ``UnsupportedModelError`` for other kinds.
    """
    if not isinstance(layer_types, list | tuple) or len(layer_types) != num_layers:
        raise ModelFormatError(
            f"{fields.architecture}: config field 'layer_types' must list {num_layers} layers, not {shown(layer_types)}"
        )
    for kind in layer_types:
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(
                f"{fields.architecture}: config field 'layer_types' holds {shown(kind)}; supported: "
                f"{', '.join(map(repr, LAYER_TYPES))}"
            )
    return layer_types
