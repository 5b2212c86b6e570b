"""The configurations in which decoders with layer norms and plain feed-forward blocks are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_testing_torch import ParityCase

__all__ = ["CLASSIC_CASES"]

_LINEAR: Mapping[str, Any] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC: Mapping[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
"""The usual ones are beyond a tiny vocabulary."""

CLASSIC_CASES: tuple[ParityCase, ...] = (
    ParityCase("BloomForCausalLM"),
    ParityCase(
        "BloomForCausalLM",
        {"hidden_size": 60, "num_attention_heads": 12, "vocab_size": 157, "tie_word_embeddings": False},
        "slopes for twelve heads, odd sizes, untied",
    ),
    ParityCase("FalconForCausalLM"),
    ParityCase(
        "FalconForCausalLM",
        {
            "new_decoder_architecture": True,
            "num_attention_heads": 6,
            "num_kv_heads": 2,
            "bias": True,
            "tie_word_embeddings": False,
            "ffn_hidden_size": 84,
            "rope_parameters": _LINEAR,
        },
        "groups of three heads, two norms, biases, untied, scaled rotation",
    ),
    ParityCase(
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "num_attention_heads": 6, "bias": True},
        "slopes for six heads, no shared heads, blocks in a row, biases",
    ),
    ParityCase("GPT2LMHeadModel", _TOKENS),
    ParityCase(
        "GPT2LMHeadModel",
        {
            **_TOKENS,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "n_inner": 88,
            "vocab_size": 157,
            "activation_function": "relu",
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
        "odd sizes, scores scaled by layer, untied",
    ),
    ParityCase("GPTBigCodeForCausalLM", _TOKENS),
    ParityCase(
        "GPTBigCodeForCausalLM",
        {
            **_TOKENS,
            "multi_query": False,
            "hidden_size": 60,
            "num_attention_heads": 6,
            "n_inner": 88,
            "vocab_size": 157,
        },
        "odd sizes, a KV head for each query head",
    ),
    ParityCase("GPTNeoXForCausalLM", {"num_attention_heads": 6}),
    ParityCase(
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
            "rope_parameters": {**_LINEAR, "partial_rotary_factor": 0.6},
        },
        "blocks in a row, six of ten values rotate, scaled, no attention biases, tied",
    ),
    ParityCase("MptForCausalLM", {"max_seq_len": 256}),
    ParityCase(
        "MptForCausalLM",
        {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.4},
            "tie_word_embeddings": False,
        },
        "slopes for six heads, clipped, untied",
    ),
    ParityCase("OPTForCausalLM", {"ffn_dim": 80}),
    ParityCase(
        "OPTForCausalLM",
        {
            "ffn_dim": 84,
            "num_attention_heads": 6,
            "word_embed_proj_dim": 28,
            "do_layer_norm_before": False,
            "activation_function": "gelu",
        },
        "narrow embeddings, norms behind the blocks",
    ),
    ParityCase(
        "OPTForCausalLM",
        {"ffn_dim": 84, "enable_bias": False, "_remove_final_layer_norm": True, "tie_word_embeddings": False},
        "no biases, no final norm, untied",
    ),
    ParityCase("PhiForCausalLM"),
    ParityCase(
        "PhiForCausalLM",
        {
            "hidden_size": 60,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 157,
            "rope_parameters": {**_DYNAMIC, "partial_rotary_factor": 0.4},
        },
        "odd sizes, four of ten values rotate, stretched",
    ),
    ParityCase("Starcoder2ForCausalLM", _TOKENS),
    ParityCase(
        "Starcoder2ForCausalLM",
        {
            **_TOKENS,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "sliding_window": 7,
            "use_bias": False,
            "tie_word_embeddings": False,
        },
        "odd heads, windows of 7, no biases, untied",
    ),
)
