"""Families of models in GGUF files: a tiny configuration, what converters say of it and change in its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import msgspec

from gguf_descriptions import (
    all_heads,
    bamba,
    classic,
    decoder,
    deepseek,
    experts,
    falcon,
    falcon_groups,
    gemma2,
    gpt_oss,
    granite,
    granite_hybrid,
    granite_moe,
    jamba,
    llama4,
    long_factors,
    mamba2,
    mpt,
    neox,
    olmo3,
    phi3,
    qwen3_next,
    rotated_classic,
    selective,
    sinks,
    whole_deepseek,
)
from gguf_writing import (
    Config,
    Step,
    Tensors,
    add_one_to_norms,
    decays,
    dense_of_one,
    fused,
    pair_rotated_rows,
    renamed,
    size_of,
    split_delta,
    split_latent,
    split_stack,
    squeeze,
    stack_experts,
    transposed,
    write_file,
)
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_testing_torch import TinyModel, make_tiny_model

__all__ = ["FAMILIES", "GgufFamily", "make_gguf"]

Describe = Callable[[Config], dict[str, Any]]
SIZES: Mapping[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """``describe`` gives metadata without the architecture's prefix, ``extra`` further tensors.

    ``is_known_to_transformers``: their own reader of GGUF files takes the architecture with the sizes given here; it
    knows neither caps of scores nor sizes of shared experts, for one.
    """

    architecture: str
    gguf: str
    describe: Describe
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    name: str = ""
    is_known_to_transformers: bool = False
    extra: Callable[[Config], Tensors] = lambda config: {}

    def __str__(self) -> str:
        return f"{self.gguf}{'-' if self.name else ''}{self.name}"


def make_gguf(
    family: GgufFamily,
    folder: Path,
    *,
    kind: gguf.GGMLQuantizationType | None = None,
    changes: Mapping[str, Any] | None = None,
    name: str = "tiny.gguf",
) -> TinyModel:
    """A tiny model of ``family`` as GGUF file in ``folder``, beside its oracle.

    ``changes`` to the metadata; None leaves a key out.
    """
    tiny = make_tiny_model(family.architecture, folder, **{**SIZES, **family.config})
    config, tensors = tiny.info.config, {key: value.float().numpy() for key, value in tiny.tensors().items()}
    for step in family.steps:
        tensors = step(tensors, config)
    tensors |= family.extra(config)
    metadata = {**family.describe(config), **(changes or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    num_layers = max(
        size_of(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"), config.get("num_decoder_layers") or 0
    )
    write_file(folder / name, family.gguf, metadata, tensors, num_layers, kind)
    artifact = ModelArtifact(name=name, root=str(folder), files=(name,), source="local")
    return replace(tiny, info=msgspec.structs.replace(tiny.info, artifact=artifact, loader="gguf"))


_FACTORS = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 5.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
}
_HEADED = {"num_heads": 16, "head_dim": 8, "state_size": 8}
_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

DENSE = (
    GgufFamily("LlamaForCausalLM", "llama", decoder, steps=(pair_rotated_rows,), is_known_to_transformers=True),
    GgufFamily(
        "LlamaForCausalLM",
        "llama",
        decoder,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        (pair_rotated_rows,),
        name="biases",
    ),
    GgufFamily("SmolLM3ForCausalLM", "smollm3", decoder, {"num_hidden_layers": 4}, (pair_rotated_rows,)),
    GgufFamily("GraniteForCausalLM", "granite", granite, _FACTORS, (pair_rotated_rows,)),
    GgufFamily("Olmo2ForCausalLM", "olmo2", decoder, {"rope_parameters": _YARN, "num_key_value_heads": 1}),
    GgufFamily(
        "Olmo3ForCausalLM",
        "olmo2",
        olmo3,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        name="windows",
    ),
    GgufFamily("Phi3ForCausalLM", "phi3", phi3, {"sliding_window": 7}),
    GgufFamily(
        "Phi3ForCausalLM",
        "phi3",
        phi3,
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 1000, "tie_word_embeddings": True},
        name="longrope",
        extra=long_factors,
    ),
    GgufFamily(
        "Gemma2ForCausalLM",
        "gemma2",
        gemma2,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7, "final_logit_softcapping": 6.0,
         "attn_logit_softcapping": 3.0},
        (add_one_to_norms,),
    ),
)  # fmt: skip
CLASSIC = (
    GgufFamily("GPT2LMHeadModel", "gpt2", classic, {"n_inner": 96},
               (transposed("c_attn", "c_proj", "c_fc"),)),
    GgufFamily("GPTBigCodeForCausalLM", "starcoder", lambda c: {**classic(c), "attention.head_count_kv": 1}),
    GgufFamily("GPTNeoXForCausalLM", "gptneox", neox, steps=(fused("query_key_value", all_heads),)),
    GgufFamily("GPTNeoXForCausalLM", "gptneox", neox, {"use_parallel_residual": False, "tie_word_embeddings": True},
               (fused("query_key_value", all_heads),), name="in-a-row"),
    GgufFamily("BloomForCausalLM", "bloom", classic,
               steps=(fused("query_key_value", all_heads), renamed("transformer.", "")),
               is_known_to_transformers=True),
    GgufFamily("FalconForCausalLM", "falcon", falcon, {"new_decoder_architecture": False},
               (fused("query_key_value", falcon_groups),), is_known_to_transformers=True),
    GgufFamily("FalconForCausalLM", "falcon", falcon, {"new_decoder_architecture": True, "num_kv_heads": 2},
               (fused("query_key_value", falcon_groups),), name="two-norms"),
    GgufFamily("MptForCausalLM", "mpt", mpt, {"attn_config": {"clip_qkv": 0.5}}),
    GgufFamily("PhiForCausalLM", "phi2", rotated_classic),
    GgufFamily("Starcoder2ForCausalLM", "starcoder2", rotated_classic, is_known_to_transformers=True),
)  # fmt: skip
MIXTURES = (
    GgufFamily("Qwen2MoeForCausalLM", "qwen2moe", experts, {**_MOE, "shared_expert_intermediate_size": 64},
               (stack_experts, squeeze)),
    GgufFamily("GraniteMoeForCausalLM", "granitemoe", granite_moe,
               {**_FACTORS, "num_local_experts": 4, "num_experts_per_tok": 2},
               (pair_rotated_rows, split_stack("block_sparse_moe", r"\.weight"))),
    GgufFamily("GptOssForCausalLM", "gpt-oss", gpt_oss,
               {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},
               (split_stack("mlp.experts", turned=True, alternates=True),
                split_stack("mlp.experts", "_bias", kind="bias", alternates=True), sinks)),
)  # fmt: skip
RECURRENT = (
    GgufFamily(
        "MambaForCausalLM",
        "mamba",
        selective,
        {"time_step_rank": 5, "intermediate_size": 128},
        (decays(), squeeze),
        is_known_to_transformers=True,
    ),
    GgufFamily(
        "Mamba2ForCausalLM",
        "mamba2",
        mamba2,
        {**_HEADED, "expand": 2, "n_groups": 2},
        (decays(groups=2), squeeze),
    ),
    GgufFamily(
        "JambaForCausalLM",
        "jamba",
        jamba,
        {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 5},
        (decays(), dense_of_one, stack_experts, squeeze),
    ),
    GgufFamily(
        "BambaForCausalLM",
        "granitehybrid",
        bamba,
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2},
        (pair_rotated_rows, decays(groups=2), squeeze),
        name="bamba",
    ),
    GgufFamily(
        "GraniteMoeHybridForCausalLM",
        "granitehybrid",
        granite_hybrid,
        {**_FACTORS, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 8,
         "mamba_d_state": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
        (pair_rotated_rows, decays(groups=1), split_stack("block_sparse_moe", r"\.weight"),
         split_stack("shared_mlp", r"\.weight", to="shexp"), squeeze),
    ),
    GgufFamily(
        "GraniteMoeHybridForCausalLM",
        "granitehybrid",
        granite_hybrid,
        {**_FACTORS, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_heads": 8,
         "mamba_d_state": 8, "num_local_experts": 0, "shared_intermediate_size": 32},
        (pair_rotated_rows, decays(groups=1), split_stack("shared_mlp", r"\.weight", to=""), squeeze),
        name="dense",
    ),
    GgufFamily(
        "Qwen3NextForCausalLM",
        "qwen3next",
        qwen3_next,
        {**_MOE, "shared_expert_intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 32,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 8, "norm_topk_prob": True},
        (add_one_to_norms, decays(), split_delta, stack_experts, squeeze),
    ),
)  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
LARGE = (
    GgufFamily(
        "DeepseekV2ForCausalLM",
        "deepseek2",
        deepseek,
        {**_LATENT, **_GREEDY},
        (stack_experts, split_latent),
    ),
    GgufFamily(
        "DeepseekV2ForCausalLM",
        "deepseek2",
        whole_deepseek,
        {**_LATENT, **_GREEDY, "q_lora_rank": None},
        (stack_experts,),
        name="whole",
    ),
    GgufFamily(
        "DeepseekV3ForCausalLM",
        "deepseek2",
        deepseek,
        {**_LATENT, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
         "rope_parameters": {**_YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
        (stack_experts, split_latent, renamed("_correction_bias", "_correction.bias")),
        name="v3",
    ),
    GgufFamily(
        "Llama4ForCausalLM",
        "llama4",
        llama4,
        {"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
         "num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192},
        (split_stack("feed_forward.experts", turned=True),),
    ),
)  # fmt: skip
FAMILIES = (*DENSE, *CLASSIC, *MIXTURES, *RECURRENT, *LARGE)
