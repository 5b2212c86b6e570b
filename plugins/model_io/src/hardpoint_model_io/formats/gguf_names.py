"""GGUF architectures as data: how each one's metadata, tensor names and stored layout map to Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hardpoint.errors import UnsupportedModelError


class Transform(Enum):
    """What must be undone when a tensor is read. Row permutations also apply to packed rows; sums need values."""

    UNPERMUTE_QUERY = "unpermute-query"
    UNPERMUTE_KEY = "unpermute-key"
    SUBTRACT_ONE = "subtract-one"


@dataclass(frozen=True, slots=True)
class MetadataField:
    """Metadata ``<architecture>.<key>`` becomes config field ``name``; a required one has no default."""

    key: str
    name: str
    kind: type
    required: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One row of the table.

    Attributes:
        gguf: value of ``general.architecture``.
        architecture: plugin name of kind ``model``.
        model_type: the Hugging Face family name.
        stems: tensor stem to Hugging Face stem; ``blk.N.`` becomes ``<blocks>.N.``. A ``*`` in it is the number of
            an expert: the tensor is a stack of one matrix for each.
        transforms: by tensor stem.
        constants: config fields the format leaves to the architecture.
        marker: metadata key without which the next row of the same ``gguf`` is meant.
        tasks: what models of it can do.
        head_dim_keys: metadata keys that give ``head_dim``, first match; otherwise hidden size over heads.
    """

    gguf: str
    architecture: str
    model_type: str
    stems: Mapping[str, str]
    fields: tuple[MetadataField, ...]
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    marker: str | None = None
    blocks: str = "model.layers"
    tasks: tuple[str, ...] = ("generate", "embed")
    head_dim_keys: tuple[str, ...] = ("attention.key_length",)


_DECODER_FIELDS = (
    MetadataField("embedding_length", "hidden_size", int, required=True),
    MetadataField("block_count", "num_hidden_layers", int, required=True),
    MetadataField("feed_forward_length", "intermediate_size", int, required=True),
    MetadataField("attention.head_count", "num_attention_heads", int, required=True),
    MetadataField("attention.head_count_kv", "num_key_value_heads", int),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
    MetadataField("attention.layer_norm_rms_epsilon", "rms_norm_eps", float, required=True),
    MetadataField("rope.freq_base", "rope_theta", float, default=10_000.0),
    MetadataField("attention.sliding_window", "sliding_window", int),
)

_DECODER_STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.o_proj",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
_QK_NORM_STEMS = {"blk.attn_q_norm": "self_attn.q_norm", "blk.attn_k_norm": "self_attn.k_norm"}
_GEMMA3_STEMS = _DECODER_STEMS | _QK_NORM_STEMS | {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.ffn_norm": "pre_feedforward_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
# Gemma scales by one plus the weight; the file stores the sum.
_GEMMA3_NORMS = {stem: Transform.SUBTRACT_ONE for stem in _GEMMA3_STEMS if stem.endswith("_norm")}

_EXPERT_FIELDS = (
    MetadataField("expert_count", "num_experts", int, required=True),
    MetadataField("expert_used_count", "num_experts_per_tok", int, required=True),
    MetadataField("expert_feed_forward_length", "moe_intermediate_size", int, required=True),
)
_MIXTRAL_FIELDS = (
    MetadataField("expert_count", "num_local_experts", int, required=True),
    MetadataField("expert_used_count", "num_experts_per_tok", int, required=True),
)


def _expert_stems(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    parts = {"blk.ffn_gate_exps": gate, "blk.ffn_up_exps": up, "blk.ffn_down_exps": down}
    return {"blk.ffn_gate_inp": f"{block}.gate", **{stem: f"{block}.experts.*.{part}" for stem, part in parts.items()}}


_ENCODER_FIELDS = (
    MetadataField("embedding_length", "hidden_size", int, required=True),
    MetadataField("block_count", "num_hidden_layers", int, required=True),
    MetadataField("feed_forward_length", "intermediate_size", int, required=True),
    MetadataField("attention.head_count", "num_attention_heads", int, required=True),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
    MetadataField("attention.layer_norm_epsilon", "layer_norm_eps", float, required=True),
)
_BERT_STEMS = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.attn_q": "attention.self.query",
    "blk.attn_k": "attention.self.key",
    "blk.attn_v": "attention.self.value",
    "blk.attn_output": "attention.output.dense",
    "blk.attn_output_norm": "attention.output.LayerNorm",
    "blk.ffn_up": "intermediate.dense",
    "blk.ffn_down": "output.dense",
    "blk.layer_output_norm": "output.LayerNorm",
}

_SILU = {"hidden_act": "silu"}
# The file pairs neighboring rows for its rotary embedding; Hugging Face pairs the two halves of a head.
_PAIRED = {"blk.attn_q": Transform.UNPERMUTE_QUERY, "blk.attn_k": Transform.UNPERMUTE_KEY}
_LLAMA_HEAD_DIM = ("attention.key_length", "rope.dimension_count")
_ROWS = (
    GgufArchitecture(
        gguf="bert",
        architecture="BertModel",
        model_type="bert",
        stems=_BERT_STEMS,
        fields=_ENCODER_FIELDS,
        constants={"hidden_act": "gelu"},
        blocks="encoder.layer",
        tasks=("embed",),
    ),
    GgufArchitecture(
        gguf="llama",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        stems=_DECODER_STEMS | _expert_stems("block_sparse_moe", "w1", "w3", "w2"),
        fields=_DECODER_FIELDS + _MIXTRAL_FIELDS,
        transforms=_PAIRED,
        constants=_SILU,
        marker="expert_count",
        head_dim_keys=_LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="llama",
        architecture="LlamaForCausalLM",
        model_type="llama",
        stems=_DECODER_STEMS,
        fields=_DECODER_FIELDS,
        transforms=_PAIRED,
        constants=_SILU | {"mlp_bias": False},
        head_dim_keys=_LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="qwen2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        stems=_DECODER_STEMS,
        fields=_DECODER_FIELDS,
        constants=_SILU,
    ),
    GgufArchitecture(
        gguf="qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        stems=_DECODER_STEMS | _QK_NORM_STEMS,
        fields=_DECODER_FIELDS,
        constants=_SILU,
    ),
    GgufArchitecture(
        gguf="qwen3moe",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        stems=_DECODER_STEMS | _QK_NORM_STEMS | _expert_stems("mlp", "gate_proj", "up_proj", "down_proj"),
        fields=_DECODER_FIELDS + _EXPERT_FIELDS,
        # The format cannot say otherwise, and whoever reads it renormalizes.
        constants=_SILU | {"norm_topk_prob": True},
    ),
    GgufArchitecture(
        gguf="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        stems=_GEMMA3_STEMS,
        fields=tuple(
            MetadataField(f.key, f.name, f.kind, f.required, 1_000_000.0) if f.name == "rope_theta" else f
            for f in _DECODER_FIELDS
        ),
        transforms=_GEMMA3_NORMS,
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    ),
)

# Tensors that carry no weights: rotary tables, which the configuration expresses instead.
IGNORED_TENSORS = frozenset({"rope_freqs.weight"})
_TENSOR_NAME = re.compile(
    r"(?:(?P<block>blk)\.(?P<layer>\d{1,6})\.)?(?P<stem>[a-z0-9_]+)(?:\.(?P<expert>\d{1,6}))?\.(?P<kind>weight|bias)"
)


def architectures() -> list[str]:
    """Names of the model plugins whose files can be read, in alphabetical order."""
    return sorted({row.architecture for row in _ROWS})


def find_architecture(metadata: Mapping[str, Any], path: str) -> GgufArchitecture:
    """The row for a file's metadata. Raises ``UnsupportedModelError`` naming the file and the known architectures."""
    name = metadata.get("general.architecture")
    for row in _ROWS:
        if row.gguf == name and (row.marker is None or metadata.get(f"{name}.{row.marker}")):
            return row
    known = ", ".join(sorted({row.gguf for row in _ROWS}))
    raise UnsupportedModelError(f"{path}: GGUF architecture {name!r} is not supported; supported are {known}")


@dataclass(frozen=True, slots=True)
class MappedName:
    """Hugging Face name of a stored tensor and what to undo when reading it. A ``*`` in the name stands for the number
    of an expert: the tensor is a stack of one matrix for each."""

    name: str
    transform: Transform | None

    @property
    def is_stack(self) -> bool:
        return "*" in self.name


def map_tensor_name(row: GgufArchitecture, stored: str, path: str) -> MappedName:
    """Raises ``UnsupportedModelError`` naming the tensor when the architecture has no such part."""
    match = _TENSOR_NAME.fullmatch(stored)
    stem, target = "", None
    if match is not None:
        stem = f"blk.{match['stem']}" if match["block"] else match["stem"]
        # Old files hold the matrices of each expert apart.
        target = row.stems.get(stem if match["expert"] is None else f"{stem}_exps")
    if match is None or target is None:
        raise UnsupportedModelError(
            f"{path}: tensor {stored!r} is not part of the architecture {row.gguf!r} as known here"
        )
    if match["expert"] is not None:
        target = target.replace("*", str(int(match["expert"])))
    prefix = f"{row.blocks}.{int(match['layer'])}." if match["block"] else ""
    return MappedName(f"{prefix}{target}.{match['kind']}", row.transforms.get(stem))
