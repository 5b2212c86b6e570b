"""The rules of the kind ``model`` on architectures with an encoder and a decoder that attends to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2,
}


class TestBart(ModelSuite):
    plugin: ClassVar[str | None] = "BartForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = SIZES
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"activation_function": "of_nobody", "tie_word_embeddings": False}


class TestT5(ModelSuite):
    plugin: ClassVar[str | None] = "T5ForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"d_kv": 10, "d_ff": 40, "num_hidden_layers": 2}
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"feed_forward_proj": "of_nobody"}


class TestWhisper(ModelSuite):
    plugin: ClassVar[str | None] = "WhisperForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        **SIZES,
        "num_mel_bins": 6,
        "max_source_positions": 14,
        "max_target_positions": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "begin_suppress_tokens": None,
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"activation_function": "of_nobody", "tie_word_embeddings": False}
