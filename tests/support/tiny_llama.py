"""A random Llama of a few kilobytes with a tokenizer and a chat template, written without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["CHAT_TEMPLATE", "CONFIG", "CONTROL_TOKENS", "write_tiny_gguf", "write_tiny_llama"]

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; then come 256 tokens of one byte each, and one merged from two of them."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGE = ("a", "b")
_TOKENS = [*CONTROL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(_MERGE)]

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": len(_TOKENS),
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """``config.json`` (with ``changes``), weights, tokenizer and template in ``folder``, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {**CONFIG, **changes})
    save_file(_tensors(seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(_TOKENS)}, merges=[_MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})
    return folder


def write_tiny_gguf(path: Path, *, seed: int = 0, **metadata: Any) -> Path:
    """The same model as one GGUF file. ``metadata`` replaces entries under the architecture's prefix."""
    sizes = {
        "embedding_length": CONFIG["hidden_size"],
        "block_count": CONFIG["num_hidden_layers"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "context_length": CONFIG["max_position_embeddings"],
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**sizes, **metadata}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", CONFIG["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(_TOKENS) - len(CONTROL_TOKENS)))
    writer.add_token_merges([" ".join(_MERGE)])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, array in _tensors(seed).items():
        writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(seed: int) -> dict[str, np.ndarray]:
    """Matrices wide enough that greedy choices are clear and differ from position to position."""
    generator = np.random.default_rng(seed)
    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    narrow = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(1.5 / columns**0.5)

    tensors = {"model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden)}
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": np.ones(hidden, dtype=np.float32),
            f"{layer}.self_attn.q_proj.weight": matrix(hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(narrow, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(narrow, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, hidden),
            f"{layer}.post_attention_layernorm.weight": np.ones(hidden, dtype=np.float32),
            f"{layer}.mlp.gate_proj.weight": matrix(wide, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(wide, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, wide),
        }
    tensors["model.norm.weight"] = np.ones(hidden, dtype=np.float32)
    return tensors


_GGUF_STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    for theirs, ours in _GGUF_STEMS.items():
        name = name.replace(theirs, ours)
    return name


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
