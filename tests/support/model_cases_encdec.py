"""Cases of models with an encoder and a decoder that attends to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_testing_torch import ParityCase

__all__ = ["ENCODER_DECODER_CASES"]

_BART: Mapping[str, Any] = {
    # What is tiny by default has names of its own here, which are also the encoder's.
    "num_hidden_layers": 2,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
}
_T5: Mapping[str, Any] = {"d_kv": 12, "d_ff": 80, "num_hidden_layers": 2, "relative_attention_max_distance": 40}
_WHISPER: Mapping[str, Any] = {
    **_BART,
    "num_mel_bins": 10,
    "max_source_positions": 22,
    "max_target_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "decoder_start_token_id": 3,
    "begin_suppress_tokens": None,
}

ENCODER_DECODER_CASES: tuple[ParityCase, ...] = (
    ParityCase("BartForConditionalGeneration", _BART),
    ParityCase(
        "BartForConditionalGeneration",
        {
            **_BART,
            "hidden_size": 36,
            "num_attention_heads": 2,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 42,
            "activation_function": "relu",
            "scale_embedding": True,
            "vocab_size": 97,
        },
        "odd sizes, scaled embeddings",
        block_size=16,
    ),
    # Scores that are not scaled magnify roundings; transformers computing in bfloat16 itself is as far off.
    ParityCase("T5ForConditionalGeneration", _T5, limits={"bfloat16": 0.08}),
    ParityCase(
        "T5ForConditionalGeneration",
        {
            **_T5,
            "d_kv": 6,
            "num_attention_heads": 6,
            "num_decoder_layers": 3,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "relative_attention_num_buckets": 12,
            "relative_attention_max_distance": 17,
            "vocab_size": 97,
        },
        "heads unlike the hidden size, gated, unscaled, few buckets",
        limits={"bfloat16": 0.3},
    ),
    ParityCase("WhisperForConditionalGeneration", _WHISPER),
    ParityCase(
        "WhisperForConditionalGeneration",
        {
            **_WHISPER,
            "hidden_size": 36,
            "num_attention_heads": 6,
            "decoder_attention_heads": 2,
            "decoder_layers": 1,
            "num_mel_bins": 7,
            "max_source_positions": 9,
            "activation_function": "relu",
            "vocab_size": 97,
        },
        "odd sizes, one decoder layer",
        block_size=16,
    ),
)
