"""Descriptions of models with encoder and decoder: sizes under the usual names, and how answers begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint_model_io.weights.encoder_decoder import DECODER_PROMPT
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

Describe = Callable[..., ModelInfo]


@pytest.fixture
def describe(hf_folder: Callable[..., Path], as_artifact: Callable[[Path], ModelArtifact]) -> Describe:
    def made(generation: dict[str, Any] | None = None, **config: Any) -> ModelInfo:
        both = {"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True, **config}
        root = hf_folder(both)
        if generation is not None:
            (root / "generation_config.json").write_text(json.dumps(generation))
        return SafetensorsWeightLoader().describe(as_artifact(root))

    return made


def prompt(info: ModelInfo) -> list[int]:
    found: list[int] = info.generation[DECODER_PROMPT]
    return found


NO_SIZES = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"))


def test_sizes_get_the_usual_names(describe: Describe) -> None:
    info = describe(**NO_SIZES, d_model=24, decoder_attention_heads=3, max_target_positions=40, bos_token_id=0)
    assert [info.config[name] for name in ("hidden_size", "num_attention_heads")] == [24, 3]
    assert (info.max_position, info.tasks) == (40, ("generate",))


@pytest.mark.parametrize(("told", "wanted"), [(None, 512), (77, 77)])
def test_positions_of_t5_have_no_table(describe: Describe, told: int | None, wanted: int) -> None:
    sizes = {"d_model": 24, "num_heads": 6, "d_kv": 10, "pad_token_id": 0}
    info = describe(**{**NO_SIZES, "model_type": "t5", "n_positions": told, **sizes})
    assert [info.config[name] for name in ("num_attention_heads", "head_dim")] == [6, 10]
    assert info.max_position == wanted


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"decoder_start_token_id": 2}, None, [2]),
        ({"decoder_start_token_id": 2}, {"decoder_start_token_id": 3}, [3]),
        ({"decoder_start_token_id": 2, "forced_bos_token_id": 0}, None, [2, 0]),
        ({"decoder_start_token_id": 2}, {"forced_bos_token_id": 7}, [2, 7]),
        ({"bos_token_id": 5, "pad_token_id": 1}, None, [5]),
        ({"bos_token_id": None, "pad_token_id": 0}, None, [0]),
        ({"decoder_start_token_id": 2, "forced_decoder_ids": [[1, 9], [2, 8]]}, None, [2, 9, 8]),
        ({"decoder_start_token_id": 2, "forced_decoder_ids": [[1, None], [2, 8]]}, None, [2]),
        ({"decoder_start_token_id": 2, "forced_decoder_ids": [[1, 9], [3, 8]], "forced_bos_token_id": 0}, None, [2, 9]),
    ],
)
def test_how_decoders_begin(
    describe: Describe, config: dict[str, Any], generation: dict[str, Any] | None, wanted: list[int]
) -> None:
    assert prompt(describe(generation, **config)) == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"decoder_start_token_id": 100}, r"first tokens are \[100\], but each must be an id below 100"),
        ({"bos_token_id": None, "pad_token_id": None}, r"first tokens are \[None\]"),
        ({"decoder_start_token_id": True}, r"first tokens are \[True\]"),
        ({"decoder_start_token_id": 1, "forced_bos_token_id": -1}, r"first tokens are \[1, -1\]"),
        ({"decoder_start_token_id": 1, "forced_decoder_ids": [3]}, "must be a list of pairs of place and token"),
        ({"decoder_start_token_id": 1, "forced_decoder_ids": {"1": 3}}, "must be a list of pairs"),
    ],
)
def test_what_is_no_token_is_refused(describe: Describe, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        describe(**config)


def test_decoders_alone_have_no_such_prompt(describe: Describe) -> None:
    """Nor may a file make one up."""
    assert DECODER_PROMPT not in describe({DECODER_PROMPT: [1]}, is_encoder_decoder=False).generation
