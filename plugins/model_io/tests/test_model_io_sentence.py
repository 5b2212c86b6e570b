"""What the files of sentence encoders say about embeddings, and what they must not say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_model_io.sources.layout import folder_artifact
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

MakeFolder = Callable[..., Path]
OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{OLD}.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{OLD}.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{OLD}.Normalize"}
MEAN = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def describe(root: Path, modules: Any, pooling: Any = None, limits: Any = None) -> ModelInfo:
    (root / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (root / "1_Pooling").mkdir()
        (root / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if limits is not None:
        (root / "sentence_bert_config.json").write_text(json.dumps(limits))
    return SafetensorsWeightLoader().describe(folder_artifact("model", str(root), "test"))


def settings(method: str | None, normalizes: bool, *others: str) -> dict[str, Any]:
    return {"pooling_method": method, "normalizes": normalizes, "other_modules": list(others)}


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        (MEAN, "mean"),
        ({**MEAN, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({**MEAN, "pooling_mode_max_tokens": True}, "mean+max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
    ],
)
def test_the_pooling_of_a_folder(hf_folder: MakeFolder, pooling: dict[str, Any], method: str) -> None:
    info = describe(hf_folder(), [TRANSFORMER, POOLING], pooling)
    assert info.config["sentence_embedding"] == settings(method, False)


def test_normalization_and_what_else_follows(hf_folder: MakeFolder) -> None:
    dense = {"type": f"{OLD}.Dense", "path": "3_Dense"}
    info = describe(hf_folder(), [TRANSFORMER, POOLING, NORMALIZE, dense], MEAN)
    assert info.config["sentence_embedding"] == settings("mean", True, "Dense")


def test_modules_are_known_by_class_wherever_it_lives(hf_folder: MakeFolder) -> None:
    modules = [{"type": f"{NEW}.transformer.Transformer"}, {"type": f"{NEW}.pooling.Pooling", "path": "1_Pooling"}]
    assert describe(hf_folder(), modules, MEAN).config["sentence_embedding"] == settings("mean", False)


def test_a_folder_without_pooling_has_no_method(hf_folder: MakeFolder) -> None:
    assert describe(hf_folder(), [TRANSFORMER]).config["sentence_embedding"] == settings(None, False)


def test_only_the_files_beside_it_say_so(hf_folder: MakeFolder) -> None:
    """A configuration cannot pretend to know."""
    root = hf_folder({"sentence_embedding": {"pooling_method": "mean"}})
    info = SafetensorsWeightLoader().describe(folder_artifact("model", str(root), "test"))
    assert "sentence_embedding" not in info.config


@pytest.mark.parametrize(
    ("pooling", "modules", "tasks"),
    [
        ({"pooling_mode_lasttoken": True}, [POOLING, NORMALIZE], ("generate", "embed")),
        ({"pooling_mode_lasttoken": True}, [POOLING], ("generate", "embed")),
        (MEAN, [POOLING, NORMALIZE], ("generate", "embed")),
        ({"pooling_mode_max_tokens": True}, [POOLING], ("generate",)),
        ({"pooling_mode_lasttoken": True}, [POOLING, NORMALIZE, {"type": f"{OLD}.Dense"}], ("generate",)),
    ],
)
def test_decoders_embed_as_their_files_say_or_not_at_all(
    hf_folder: MakeFolder, pooling: dict[str, Any], modules: list[dict[str, Any]], tasks: tuple[str, ...]
) -> None:
    assert describe(hf_folder({"tie_word_embeddings": True}), [TRANSFORMER, *modules], pooling).tasks == tasks


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"max_seq_length": 64}, 64), ({"max_seq_length": 4096}, 128), ({"max_seq_length": None}, 128), ({}, 128)],
)  # fmt: skip
def test_texts_are_no_longer_than_the_model_was_made_for(
    hf_folder: MakeFolder, limits: dict[str, Any], expected: int
) -> None:
    assert describe(hf_folder(), [TRANSFORMER, POOLING], MEAN, limits).max_position == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "limits", "message"),
    [
        ({}, None, None, "modules.json is not a list of modules"),
        ([{"path": ""}], None, None, "modules.json is not a list of modules"),
        ([TRANSFORMER, POOLING], None, None, "1_Pooling/config.json is missing, though modules.json says"),
        ([{**POOLING, "path": "../elsewhere"}], None, None, r"\.\./elsewhere/config.json is missing"),
        ([POOLING], {"pooling_mode_mean_tokens": False}, None, "turns on no pooling; known are pooling_mode_cls_token"),
        ([POOLING], ["mean"], None, "is not a valid JSON object"),
        ([POOLING], MEAN, {"max_seq_length": 0}, "'max_seq_length' is 0, but must be a positive number or null"),
        ([POOLING], MEAN, {"max_seq_length": True}, "'max_seq_length' is True"),
    ],
)
def test_damaged_files_are_named(hf_folder: MakeFolder, modules: Any, pooling: Any, limits: Any, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        describe(hf_folder(), modules, pooling, limits)
