"""What models with encoder and decoder read from a configuration, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.errors import ConfigError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model
from hardpoint.interfaces.request import Feature
from hardpoint_models.bart import create_bart, read_bart
from hardpoint_models.encdec import EncoderDecoderModel
from hardpoint_models.encdec_config import EncoderDecoderConfig
from hardpoint_models.t5 import create_t5, read_t5
from hardpoint_models.whisper import WhisperModel, create_whisper, read_whisper
from hardpoint_testing_torch import PlainAttentionBackend, create_model, make_tiny_model, worker_config

BART: dict[str, Any] = {
    "d_model": 24,
    "vocab_size": 90,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5: dict[str, Any] = {"d_model": 24, "vocab_size": 90, "d_kv": 10, "d_ff": 40, "num_layers": 2, "num_heads": 6}
WHISPER: dict[str, Any] = {
    **{name: value for name, value in BART.items() if name != "max_position_embeddings"},
    "num_mel_bins": 6,
    "max_source_positions": 14,
    "max_target_positions": 32,
}


def bart(**changes: Any) -> EncoderDecoderConfig:
    return read_bart({**BART, **changes}, "Bart", 40)


def t5(**changes: Any) -> EncoderDecoderConfig:
    return read_t5({**T5, **changes}, "T5", 40)


def whisper(**changes: Any) -> EncoderDecoderConfig:
    return read_whisper({**WHISPER, **changes}, "Whisper")


def test_bart() -> None:
    config = bart(scale_embedding=True)
    assert (config.encoder.attention.head_size, config.decoder.attention.head_size) == (6, 12)
    assert (config.encoder.num_positions, config.position_offset, config.max_encoder_tokens) == (64, 2, 40)
    assert config.embedding_scale == 24**0.5
    assert bart().embedding_scale == 1
    assert read_bart(BART, "Bart", 1000).max_encoder_tokens == 64


def test_t5() -> None:
    config = t5(num_decoder_layers=3)
    assert (config.encoder.num_layers, config.decoder.num_layers, t5().decoder.num_layers) == (2, 3, 2)
    assert (config.activation, config.is_gated, config.encoder.attention.scale) == ("relu", False, 1.0)
    assert config.max_encoder_tokens == 40


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("relu", ("relu", False)),
        ("gated-gelu", ("gelu_new", True)),
        ("gated-silu", ("silu", True)),
        ("gelu", ("gelu", False)),
    ],
)
def test_feed_forward_blocks_of_t5(told: str, wanted: tuple[str, bool]) -> None:
    config = t5(feed_forward_proj=told)
    assert (config.activation, config.is_gated) == wanted


@pytest.mark.parametrize(
    ("changes", "is_tied", "scales"),
    [
        ({}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False),
    ],
)
def test_heads_of_t5(changes: dict[str, Any], is_tied: bool, scales: bool) -> None:
    config = t5(**changes)
    assert (config.is_tied, config.head_scale != 1) == (is_tied, scales)


def test_whisper() -> None:
    config = whisper()
    assert (config.encoder.num_positions, config.decoder.num_positions, config.max_encoder_tokens) == (14, 32, 14)
    assert (config.num_mel_bins, config.encoder.attention.key_bias) == (6, False)


READERS: dict[str, tuple[Callable[..., EncoderDecoderConfig], dict[str, Any]]] = {
    "bart": (bart, BART),
    "t5": (t5, T5),
    "whisper": (whisper, WHISPER),
}


@pytest.mark.parametrize("value", [None, 0, -3, "many", True, 2.5])
@pytest.mark.parametrize(
    ("family", "field"), [(name, field) for name, (_, sizes) in READERS.items() for field in sizes]
)
def test_sizes_are_positive_numbers(family: str, field: str, value: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"config field '{field}' is {value!r}"):
        READERS[family][0](**{field: value})


@pytest.mark.parametrize(
    ("read", "changes", "message"),
    [
        (bart, {"activation_function": "swishy"}, "'activation_function' is 'swishy'; supported: 'gelu'"),
        (bart, {"tie_word_embeddings": False}, "'tie_word_embeddings' is False; supported: True"),
        (bart, {"is_encoder_decoder": False}, "'is_encoder_decoder' is False"),
        (t5, {"feed_forward_proj": "gated-swishy"}, "'feed_forward_proj' is 'gated-swishy'; supported: an activation"),
        (t5, {"feed_forward_proj": 3}, "'feed_forward_proj' is 3"),
        (t5, {"feed_forward_proj": "gated-"}, "'feed_forward_proj' is 'gated-'"),
        (whisper, {"scale_embedding": True}, "'scale_embedding' is True; supported: False"),
        (whisper, {"tie_word_embeddings": False}, "'tie_word_embeddings' is False"),
    ],
)
def test_what_is_not_computed_is_refused(
    read: Callable[..., EncoderDecoderConfig], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    ("read", "changes", "message"),
    [
        (bart, {"encoder_attention_heads": 5}, "d_model=24 is no multiple of encoder_attention_heads=5"),
        (whisper, {"decoder_attention_heads": 7}, "d_model=24 is no multiple of decoder_attention_heads=7"),
        (t5, {"relative_attention_num_buckets": 6}, "buckets must be a multiple of 4"),
        (t5, {"relative_attention_max_distance": 16}, "the distance more than half of them"),
        (t5, {"layer_norm_epsilon": -1}, "'layer_norm_epsilon' is -1"),
    ],
)
def test_what_cannot_be_is_refused(
    read: Callable[..., EncoderDecoderConfig], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        read(**changes)


def built(factory: Any, architecture: str, tmp_path: Any, dtype: str = "float32", **config: Any) -> Model:
    # Tiny models have a size by default under another name, which would win.
    sizes = {"hidden_size": config.pop("d_model"), **config}
    info = make_tiny_model(architecture, tmp_path, **sizes).info
    return create_model(factory, worker_config(info, dtype=dtype), PlainAttentionBackend())[0]


def text(ids: Any, **fields: Any) -> Feature:
    array = np.asarray(ids, dtype=fields.pop("dtype", np.int32))
    known = {"offset": 0, "length": 1, "num_encoder_tokens": array.size, "data": {"token_ids": array}}
    return Feature(modality="text", content_hash="x", **{**known, **fields})


def test_inputs_of_text_are_checked_before_they_are_used(tmp_path: Any) -> None:
    model = built(create_bart, "BartForConditionalGeneration", tmp_path, **BART)
    assert isinstance(model, EncoderDecoderModel)
    assert model.refuse_input(text([3, 89])) is None
    for feature, message in (
        (text([90]), "holds ids outside 0 to 89"),
        (text([-1]), "holds ids outside"),
        (text([]), "has 0 tokens; allowed: 1 to 64"),
        (text([1] * 65), "has 65 tokens; allowed: 1 to 64"),
        (text([[1]]), r"must be int32 \[1\] as num_encoder_tokens says, not int32 \[1, 1\]".replace("\\", "")),
        (text([1], dtype=np.int64), "not int64 [1]"),
        (text([1, 2], num_encoder_tokens=3), "must be int32 [3]"),
        (text([1], data={}), "takes token ids under 'token_ids'; the request brings nothing"),
        (text([1], data={"input_features": np.zeros(2)}), "the request brings input_features"),
    ):
        assert message in (model.refuse_input(feature) or "taken")


def test_spectrograms_are_checked_before_they_are_used(tmp_path: Any) -> None:
    sizes = {**WHISPER, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "begin_suppress_tokens": None}
    model = built(create_whisper, "WhisperForConditionalGeneration", tmp_path, **sizes)
    assert isinstance(model, WhisperModel)

    def sound(
        shape: tuple[int, ...] = (6, 28), dtype: Any = np.float32, tokens: int = 14, fill: float = 0.5
    ) -> Feature:
        data = {"input_features": np.full(shape, fill, dtype=dtype)}
        return Feature(modality="audio", content_hash="x", offset=0, length=1, num_encoder_tokens=tokens, data=data)

    assert model.refuse_input(sound()) is None
    for feature, message in (
        (sound((6, 27)), "must be float32 [6, 28] (mel bins, frames), not float32 [6, 27]"),
        (sound((28, 6)), "not float32 [28, 6]"),
        (sound(dtype=np.float64), "not float64 [6, 28]"),
        (sound(tokens=13), "takes 14 encoder tokens, but num_encoder_tokens is 13"),
        (sound(fill=float("nan")), "values that are not finite"),
        (text([1]), "takes a log-mel spectrogram under 'input_features'; the request brings token_ids"),
    ):
        assert message in (model.refuse_input(feature) or "taken")
    with torch.inference_mode():
        (output,) = model.encode([model.example_input(5)])
    assert output.shape == (14, 24)


def test_t5_is_not_computed_in_float16(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="overflows in float16; set --dtype to bfloat16 or float32"):
        built(create_t5, "T5ForConditionalGeneration", tmp_path, "float16", **T5)
