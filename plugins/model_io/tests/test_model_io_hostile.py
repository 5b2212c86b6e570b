"""Files made to harm, or found as nobody expects them: each is read, or refused soon and by name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.sources.local import LocalSource
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider
from hardpoint_model_io.weights.gguf import GgufWeightLoader
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

AsArtifact = Callable[[Path], ModelArtifact]
MakeFolder = Callable[..., Path]
WriteGguf = Callable[..., Path]
LlamaTensors = Callable[..., dict[str, np.ndarray]]
SIZES = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4,
         "attention.head_count_kv": 2, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip


def test_numbers_that_json_lacks_are_read_as_python_writes_them(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    """Published Mamba-2 checkpoints have steps without an upper limit."""
    folder = hf_folder({"time_step_limit": [0.0, math.inf], "other": math.nan})
    assert "Infinity" in (folder / "config.json").read_text()
    config = SafetensorsWeightLoader().describe(as_artifact(folder)).config
    assert config["time_step_limit"] == [0.0, math.inf]
    assert math.isnan(config["other"])


@pytest.mark.parametrize("text", ['{"a": Infinity', "Infinity", '{"a": infinity}', '{"a": NaN, "b": ' + "[" * 100_000])
def test_they_excuse_nothing_else(hf_folder: MakeFolder, as_artifact: AsArtifact, text: str) -> None:
    folder = hf_folder()
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"config\.json is not a valid JSON object"):
        SafetensorsWeightLoader().describe(as_artifact(folder))


def test_a_part_of_a_divided_gguf_model_says_how_to_join(gguf_file: WriteGguf, as_artifact: AsArtifact) -> None:
    """The first part has all metadata, and would else be said to lack tensors."""
    path = gguf_file("m-00001-of-00002.gguf", others={"split.no": 0, "split.count": 2})
    with pytest.raises(UnsupportedModelError, match="one of the 2 parts of a model.*llama-gguf-split --merge"):
        GgufWeightLoader().describe(as_artifact(path))
    whole = gguf_file("whole.gguf", others={"split.no": 0, "split.count": 1})
    assert GgufWeightLoader().describe(as_artifact(whole)).architecture == "LlamaForCausalLM"


def test_a_folder_of_parts_is_no_choice_of_models(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"m-{number:05}-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="--merge m-00001-of-00003.gguf") as caught:
        LocalSource().resolve(str(tmp_path), None)
    assert str(tmp_path) in str(caught.value)


def test_rotary_tensors_of_a_family_that_does_not_rotate_have_no_effect(
    gguf_file: WriteGguf, as_artifact: AsArtifact
) -> None:
    sizes = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4,
             "context_length": 128, "attention.layer_norm_epsilon": 1e-5, "rope.scaling.type": "yarn"}  # fmt: skip
    tensors = {"token_embd.weight": np.ones((8, 32), np.float32), "rope_freqs.weight": np.ones(4, np.float32)}
    path = gguf_file(architecture="gpt2", metadata=sizes, tensors=tensors)
    assert "rope_scaling" not in GgufWeightLoader().describe(as_artifact(path)).config


@pytest.mark.parametrize("shape", [(1 << 17,), (2, 2)])
def test_rotary_factors_are_a_list_that_fits_a_head(
    gguf_file: WriteGguf, as_artifact: AsArtifact, make_llama_tensors: LlamaTensors, shape: tuple[int, ...]
) -> None:
    """Millions of them are not unpacked first."""
    named: list[dict[str, Any]] = [
        {"rope_freqs.weight": np.ones(shape, np.float32)},
        {f"rope_factors_{which}.weight": np.ones(shape, np.float32) for which in ("long", "short")},
    ]
    sizes = {**SIZES, "rope.scaling.original_context_length": 64}
    for factors in named:
        path = gguf_file(metadata=sizes, tensors={**make_llama_tensors(), **factors})
        with pytest.raises(ModelFormatError, match="is no list of rotary factors") as caught:
            GgufWeightLoader().describe(as_artifact(path))
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [1_000, 1_000_000])
def test_long_tokens_are_merged_or_refused_soon(gguf_file: WriteGguf, as_artifact: AsArtifact, length: int) -> None:
    """Merges are derived from all ways to cut a token in two."""
    vocabulary: dict[str, Any] = {"ggml.model": "llama", "ggml.tokens": ["a", "a" * length], "ggml.scores": [0.0, 1.0],
                                  "ggml.token_type": [1, 1]}  # fmt: skip
    artifact = as_artifact(gguf_file(vocabulary=vocabulary))
    started = time.perf_counter()
    if length > 1_024:
        with pytest.raises(ModelFormatError, match="a token of the vocabulary has 1000000 characters"):
            GgufTokenizerProvider().load(artifact)
    else:
        assert GgufTokenizerProvider().load(artifact).vocab_size == 2
    assert time.perf_counter() - started < 1
