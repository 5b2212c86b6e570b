"""Tiny mixtures of experts as the ``gguf`` package writes them: one stack of matrices for all experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_testing_torch import TinyModel

__all__ = ["FAMILIES", "Family", "write_experts"]

_EXPERT = re.compile(r"(?P<layer>model\.layers\.\d+)\.(?P<block>\w+)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")
_PARTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True, slots=True)
class Family:
    """``gguf_name`` is that of the architecture in files; queries and keys are stored in pairs where it says so."""

    architecture: str
    gguf_name: str
    config: Mapping[str, Any]
    num_experts: str
    expert_size: str | None
    is_paired: bool


FAMILIES = (
    Family("MixtralForCausalLM", "llama", {"num_local_experts": 4}, "num_local_experts", None, is_paired=True),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        "num_experts",
        "moe_intermediate_size",
        is_paired=False,
    ),
)


def write_experts(
    tiny: TinyModel,
    family: Family,
    path: Path,
    *,
    apart: bool = False,
    replaced: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> TinyModel:
    """``tiny`` as one GGUF file; with ``apart`` in the old layout of a tensor for each expert. Its oracle is kept.

    ``replaced`` are other contents of tensors, by name, with the type they are stored as.
    """
    config = tiny.info.config
    writer = gguf.GGUFWriter(path, family.gguf_name)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(family.config[family.num_experts])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    if family.expert_size is not None:
        writer.add_expert_feed_forward_length(config[family.expert_size])
    for name, array in _tensors(tiny, family, apart).items():
        content, kind = (replaced or {}).get(name, (np.ascontiguousarray(array), None))
        writer.add_tensor(name, content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    artifact = ModelArtifact(name=path.name, root=str(path.parent), files=(path.name,), source="local")
    return replace(tiny, info=msgspec.structs.replace(tiny.info, artifact=artifact, loader="gguf"))


def _tensors(tiny: TinyModel, family: Family, apart: bool) -> dict[str, np.ndarray]:
    config = tiny.info.config
    (arch,) = [key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == family.gguf_name]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tiny.tensors().items():
        array, match = tensor.float().numpy(), _EXPERT.fullmatch(name)
        if match is None:
            stem = name.removesuffix(".weight")
            part = stem.rpartition(".")[2]
            if family.is_paired and part in heads:
                array = _paired(array, heads[part])
            found[f"{names.get_name(stem)}.weight"] = array
        else:
            layer = match["layer"].rpartition(".")[2]
            stacks.setdefault(f"blk.{layer}.ffn_{_PARTS[match['part']]}", {})[int(match["expert"])] = array
    for stem, experts in stacks.items():
        if apart:
            found |= {f"{stem}.{expert}.weight": array for expert, array in experts.items()}
        else:
            found[f"{stem}_exps.weight"] = np.stack([experts[number] for number in range(len(experts))])
    return found


def _paired(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of the two halves of each head in turns."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
