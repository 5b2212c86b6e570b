"""Encoders, alone and beside a decoder, in GGUF files: what converters say of them and change in their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gguf_families import GgufFamily, make_gguf
from gguf_writing import Config, Step, Tensors, renamed
from hardpoint_testing_torch import TinyModel

__all__ = ["ENCODERS", "ENCODER_DECODERS", "JUDGES", "make_stacks"]


def encoder(config: Config) -> dict[str, Any]:
    return {
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "context_length": config["max_position_embeddings"],
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", 1e-5),
        "attention.causal": False,
    }


def bert(config: Config) -> dict[str, Any]:
    return {**encoder(config), "tokenizer.ggml.model": "bert", "pooling_type": 1}


def roberta(config: Config, vocabulary: str = "gpt2") -> dict[str, Any]:
    """The table of positions loses the rows that no token has, and the context as many."""
    padding = config["pad_token_id"]
    return {
        **encoder(config),
        "context_length": config["max_position_embeddings"] - padding - 1,
        "tokenizer.ggml.model": vocabulary,
        "tokenizer.ggml.padding_token_id": padding,
        **({"pooling_type": 4} if "id2label" in config else {}),
    }


def xlm_roberta(config: Config) -> dict[str, Any]:
    return roberta(config, "t5")


def modern_bert(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        **encoder(config),
        "attention.layer_norm_epsilon": config["norm_eps"],
        "attention.sliding_window": config["local_attention"],
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.scaling.type": "none",
    }


def modern_bert_by_layer(config: Config) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    stated = {"attention.sliding_window_pattern": windowed, "hidden_activation": config["hidden_activation"]}
    return {**modern_bert(config), **stated}


def t5(config: Config) -> dict[str, Any]:
    return {
        "context_length": 256,
        "embedding_length": config["d_model"],
        "feed_forward_length": config["d_ff"],
        "block_count": config["num_layers"],
        "decoder_block_count": config["num_decoder_layers"],
        "attention.head_count": config["num_heads"],
        "attention.key_length": config["d_kv"],
        "attention.value_length": config["d_kv"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "attention.relative_buckets_count": config["relative_attention_num_buckets"],
        "decoder_start_token_id": config.get("decoder_start_token_id", 0),
    }


def trimmed(tensors: Tensors, config: Config) -> Tensors:
    """Without the rows of positions up to the padding's."""
    return {
        name: array[config["pad_token_id"] + 1 :] if name.endswith("position_embeddings.weight") else array
        for name, array in tensors.items()
    }


def without(*parts: str) -> Step:
    """Without the tensors that have one of ``parts`` in their names."""

    def step(tensors: Tensors, config: Config) -> Tensors:
        del config
        return {name: array for name, array in tensors.items() if not any(part in name for part in parts)}

    return step


def own_head(config: Config) -> Tensors:
    """A head beside the embedding, which Hugging Face makes for no T5 any more, and reads where a checkpoint has it."""
    drawn = np.random.default_rng(1).standard_normal((config["vocab_size"], config["d_model"]), dtype=np.float32)
    return {"lm_head.weight": drawn / np.float32(config["d_model"] ** 0.5)}


def make_stacks(family: GgufFamily, folder: Path, **changes: Any) -> TinyModel:
    """:func:`make_gguf`, and an oracle with the head that the file has."""
    tiny = make_gguf(family, folder, **changes)
    if (head := family.extra(tiny.info.config).get("lm_head.weight")) is not None:
        tiny.oracle.lm_head.weight = torch.nn.Parameter(torch.from_numpy(head))
    return tiny


_BARE = (trimmed, without("pooler"))
_LABELED = (trimmed, renamed("roberta.", ""))
_MODERN_LABELED = (renamed("model.", ""), renamed("classifier", "classifier.out_proj"))

ENCODERS = (
    GgufFamily("BertModel", "bert", bert, {"num_attention_heads": 8}, (without("pooler"),)),
    GgufFamily("RobertaModel", "bert", roberta, {"pad_token_id": 1}, _BARE, name="roberta"),
    GgufFamily("XLMRobertaModel", "bert", xlm_roberta, {"pad_token_id": 3, "type_vocab_size": 1}, _BARE,
               name="xlm-roberta"),
    GgufFamily("ModernBertModel", "modern-bert", modern_bert, {"num_hidden_layers": 5, "local_attention": 8}),
    GgufFamily("ModernBertModel", "modern-bert", modern_bert_by_layer,
               {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "local_attention": 12,
                "norm_bias": True, "mlp_bias": True, "attention_bias": True, "hidden_activation": "silu"},
               name="by-layer"),
)  # fmt: skip
JUDGES = (
    GgufFamily("RobertaForSequenceClassification", "bert", roberta, {"pad_token_id": 1}, _LABELED, name="roberta"),
    GgufFamily("XLMRobertaForSequenceClassification", "bert", xlm_roberta, {"pad_token_id": 1}, _LABELED,
               name="xlm-roberta"),
    GgufFamily("ModernBertForSequenceClassification", "modern-bert", modern_bert,
               {"num_hidden_layers": 4, "local_attention": 8, "classifier_pooling": "mean"}, _MODERN_LABELED),
)  # fmt: skip
ENCODER_DECODERS = (
    GgufFamily("T5ForConditionalGeneration", "t5", t5, {"d_kv": 12, "d_ff": 80}),
    GgufFamily(
        "T5ForConditionalGeneration",
        "t5",
        t5,
        {"d_kv": 24, "d_ff": 80, "num_hidden_layers": 2, "num_decoder_layers": 4, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False, "relative_attention_num_buckets": 12},
        name="gated",
        extra=own_head,
    ),
)  # fmt: skip
