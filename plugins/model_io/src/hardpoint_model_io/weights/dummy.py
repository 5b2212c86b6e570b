"""Weight loader ``dummy``: reproducible pseudo-random weights for a ``config.json``, for benchmarks and tests.

A worker that knows the tensors of its model asks for those, whatever the architecture; see :meth:`invent`. The names
and shapes of common decoders are known here as well, for readers without a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightLoaderContext, WeightTensor
from hardpoint.interfaces.plugin import plugin
from hardpoint_model_io.weights.config_json import CONFIG, describe_config
from hardpoint_model_io.weights.sizes import check_sizes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a decoder's tensors differ from those of Llama.

    Attributes:
        normalizes: queries and keys have norms.
        has_bias: those of queries, keys and values, whatever the configuration says.
        is_sandwiched: the feed-forward part has norms of its own on both sides.
        is_tied, head_dim: what holds where the configuration leaves it out; None: the hidden size over the heads.
    """

    normalizes: bool = False
    has_bias: bool = False
    is_sandwiched: bool = False
    is_tied: bool = False
    head_dim: int | None = None


_SUPPORTED: Mapping[str, _Layout] = {
    "LlamaForCausalLM": _Layout(),
    "MistralForCausalLM": _Layout(),
    "Qwen2ForCausalLM": _Layout(has_bias=True),
    "Qwen3ForCausalLM": _Layout(normalizes=True),
    "Gemma3ForCausalLM": _Layout(normalizes=True, is_sandwiched=True, is_tied=True, head_dim=256),
}


class DummyOptions(BaseModel):
    """Options under ``plugins.weight_loader.dummy``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0, description="determines every value, together with the tensor's name")
    scale: float = Field(default=0.02, gt=0, description="standard deviation of matrices")


class DummyWeightLoader(WeightLoader):
    """Used only when named: :meth:`accepts` is False for every artifact, so that no automatic choice lands here."""

    def __init__(self, options: DummyOptions) -> None:
        self._options = options

    def accepts(self, artifact: ModelArtifact) -> bool:
        return False

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        info = describe_config(artifact, "dummy", None)
        # No files that could speak against a size that is no size.
        check_sizes(info.config, (), f"{artifact.root}/{CONFIG}")
        if info.architecture in _SUPPORTED:
            tensor_shapes(info)
        return info

    def num_bytes(self, info: ModelInfo) -> int:
        """0 where only the model knows."""
        shapes = tensor_shapes(info).values() if info.architecture in _SUPPORTED else ()
        return 4 * sum(prod(shape) for shape in shapes)

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        """Raises ``UnsupportedModelError`` for architectures whose tensors only a model knows."""
        return self.invent(tensor_shapes(info).items())

    def invent(self, wanted: Iterable[tuple[str, Shape]]) -> Iterator[WeightTensor]:
        """float32 tensors of the names and shapes given; their values depend on seed, scale, name and shape alone."""
        for name, shape in wanted:
            yield WeightTensor(name, "float32", shape, self._values(name, shape))

    def _values(self, name: str, shape: Shape) -> np.ndarray:
        if name.lower().endswith("norm.weight"):
            return np.ones(shape, dtype=np.float32)
        generator = np.random.default_rng((self._options.seed, zlib.crc32(name.encode())))
        values = generator.standard_normal(shape, dtype=np.float32)
        values *= np.float32(self._options.scale)
        return values


def tensor_shapes(info: ModelInfo) -> dict[str, Shape]:
    """Names and shapes of a decoder's tensors, from its configuration alone.

    Raises ``UnsupportedModelError`` for other architectures, ``ModelFormatError`` naming a missing or bad field.
    """
    if info.architecture not in _SUPPORTED:
        raise UnsupportedModelError(
            f"without its model, dummy weights exist for {', '.join(_SUPPORTED)}, not for {info.architecture!r}; "
            "use real weights"
        )
    layout = _SUPPORTED[info.architecture]
    config, origin = info.config, info.artifact.root
    hidden = _size(config, "hidden_size", origin)
    heads = _size(config, "num_attention_heads", origin)
    head_dim = _size(config, "head_dim", origin, layout.head_dim or hidden // heads)
    query, key_value = heads * head_dim, _size(config, "num_key_value_heads", origin, heads) * head_dim
    wide = _size(config, "intermediate_size", origin)
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if layout.is_sandwiched:
        layer |= {f"{side}_feedforward_layernorm.weight": (hidden,) for side in ("pre", "post")}
    if layout.normalizes:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if layout.has_bias or config.get("attention_bias"):
        layer |= {f"self_attn.{part}_proj.bias": layer[f"self_attn.{part}_proj.weight"][:1] for part in "qkv"}
    if config.get("attention_bias") and not layout.has_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (info.vocab_size, hidden)}
    for index in range(_size(config, "num_hidden_layers", origin)):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", layout.is_tied):
        shapes["lm_head.weight"] = (info.vocab_size, hidden)
    return shapes


def _size(config: Mapping[str, Any], key: str, origin: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 24:
        raise ModelFormatError(f"{origin}/config.json: {key!r} is {value!r}, but must be a positive number")
    return value


@plugin("weight_loader", options=DummyOptions)
def create(ctx: WeightLoaderContext, options: DummyOptions) -> WeightLoader:
    return DummyWeightLoader(options)
