"""Idefics 3, SmolVLM and Gemma 3 with images: configurations, inputs, and embeddings beside Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from case_parts import SIGLIP_TOWER
from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.gemma3_vision import create_gemma3_vision, read_gemma3_text, read_gemma3_vision
from hardpoint_models.idefics3 import create_smolvlm, fold_patches, read_idefics3
from hardpoint_models.vision_language import VisionLanguageModel, make_feature
from hardpoint_testing_torch import StateDictLoader, make_tiny_model, relative_error, worker_config
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import LayerToolkit, load_weights

SMOLVLM: Mapping[str, Any] = {
    "text_config": {"model_type": "llama"},
    "vision_config": SIGLIP_TOWER,
    "image_token_id": 7,
    "scale_factor": 2,
}
GEMMA3_TEXT: Mapping[str, Any] = {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "head_dim": 16,
}
GEMMA3: Mapping[str, Any] = {
    "text_config": GEMMA3_TEXT,
    "vision_config": {**SIGLIP_TOWER, "model_type": "siglip_vision_model", "vision_use_head": True},
    "image_token_index": 7,
    "mm_tokens_per_image": 4,
}
# What the files of the first releases say, which leave most to the defaults of the library they were saved with.
GEMMA3_4B: Mapping[str, Any] = {
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def build(tiny: TinyModel, create: Callable[..., Model], rename: Callable[[str], str] = str) -> VisionLanguageModel:
    config = worker_config(tiny.info)
    toolkit = LayerToolkit.create(
        config, device=torch.device("cpu"), dtype=torch.float32, attention_backend=ReferenceBackend()
    )
    roles = frozenset({ProcessRole.WORKER})
    context = ModelContext(name=tiny.info.architecture, api_version=1, roles=roles, config=config, layers=toolkit)
    model = create(context, NoOptions())
    stored = {rename(name): tensor for name, tensor in tiny.tensors().items()}
    load_weights(model, StateDictLoader(stored), tiny.info, show_progress=False)
    assert isinstance(model, VisionLanguageModel)
    return model


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, VisionLanguageModel]:
    folder = tmp_path_factory.mktemp("smolvlm")
    tiny = make_tiny_model("SmolVLMForConditionalGeneration", folder, **SMOLVLM)
    return tiny, build(tiny, create_smolvlm)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def gemma_text(**changes: Any) -> dict[str, Any]:
    return {**GEMMA3, "text_config": {**GEMMA3_TEXT, **changes}}


def tower(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, "vision_config": {**base["vision_config"], **changes}}


def read_gemma(config: Mapping[str, Any]) -> Any:
    return read_gemma3_vision(config, "Gemma3", read_gemma3_text(config, "Gemma3"))


def test_published_files_leave_most_to_defaults() -> None:
    text = read_gemma3_text(GEMMA3_4B, "Gemma3ForConditionalGeneration")
    sizes = (text.vocab_size, text.num_heads, text.num_kv_heads, text.head_size, text.is_tied, text.sees_whole_media)
    assert sizes == (262_208, 8, 4, 256, True, True)
    read = read_gemma(GEMMA3_4B)
    assert (read.tower.grid, read.square, read.num_tokens, read.tower.num_channels) == (64, 4, 256, 3)
    small = {
        "model_type": "idefics3",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    }
    idefics = read_idefics3({"vision_config": small, "scale_factor": 4}, "Idefics3", 128_259)
    assert (idefics.tower.num_layers, idefics.image_token, idefics.num_tokens(idefics.tower.grid)) == (12, 128_257, 64)


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        (tower(GEMMA3, model_type="clip_vision_model"), UnsupportedModelError, "model_type"),
        (tower(GEMMA3, hidden_act="of_nobody"), UnsupportedModelError, "hidden_act"),
        (tower(GEMMA3, image_size=8192), ModelFormatError, "image_size"),
        ({**GEMMA3, "vision_config": None}, ModelFormatError, "vision_config"),
        ({**GEMMA3, "text_config": [1]}, ModelFormatError, "text_config"),
        ({**GEMMA3, "mm_tokens_per_image": 5}, ModelFormatError, "mm_tokens_per_image"),
        ({**GEMMA3, "mm_tokens_per_image": 36}, ModelFormatError, "mm_tokens_per_image"),
        ({**GEMMA3, "image_token_index": 262_208}, ModelFormatError, "image_token_index"),
        ({**GEMMA3, "tie_word_embeddings": "yes"}, ModelFormatError, "tie_word_embeddings"),
        (gemma_text(sliding_window=3), UnsupportedModelError, "mm_tokens_per_image"),
        (gemma_text(use_bidirectional_attention=True), UnsupportedModelError, "use_bidirectional_attention"),
        (gemma_text(model_type="llama"), UnsupportedModelError, "model_type"),
    ],
)
def test_gemma3_refuses_by_name(config: Mapping[str, Any], error: type[Exception], named: str) -> None:
    read_gemma(GEMMA3)
    with pytest.raises(error, match=named):
        read_gemma(config)


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        (tower(SMOLVLM, model_type="siglip_vision_model"), UnsupportedModelError, "model_type"),
        (tower(SMOLVLM, use_base_siglip=True), UnsupportedModelError, "use_base_siglip"),
        (tower(SMOLVLM, image_size=[16, 16]), UnsupportedModelError, "image_size"),
        ({**SMOLVLM, "scale_factor": 3}, ModelFormatError, "scale_factor"),
        ({**SMOLVLM, "scale_factor": 0}, ModelFormatError, "scale_factor"),
        ({**SMOLVLM, "image_token_id": 160}, ModelFormatError, "image_token_id"),
        ({**SMOLVLM, "vision_config": "x"}, ModelFormatError, "vision_config"),
    ],
)
def test_smolvlm_refuses_by_name(config: Mapping[str, Any], error: type[Exception], named: str) -> None:
    read_idefics3(SMOLVLM, "SmolVLM", 160)
    with pytest.raises(error, match=named):
        read_idefics3(config, "SmolVLM", 160)


@pytest.mark.parametrize(("grid", "scale"), [(4, 2), (6, 3), (6, 2), (4, 4), (3, 1)])
def test_patches_fold_as_in_the_models(grid: int, scale: int, smolvlm: tuple[TinyModel, VisionLanguageModel]) -> None:
    states = torch.from_numpy(noise(2, grid**2, 5))
    connector = smolvlm[0].oracle.model.connector
    assert torch.equal(fold_patches(states, scale), connector.pixel_shuffle(states, scale))


@torch.inference_mode()
def test_tiles_of_zeros_fill_up(smolvlm: tuple[TinyModel, VisionLanguageModel]) -> None:
    """Several tiles in one feature, smaller ones in another; all beside each other, as Hugging Face has them."""
    tiny, model = smolvlm
    pixels, mask = noise(4, 3, 16, 16), np.ones((4, 16, 16), dtype=np.int64)
    pixels[1] = 0
    mask[2, 9:], mask[3, :, 5:] = 0, 0
    several = make_feature({"pixel_values": pixels, "pixel_attention_mask": mask}, 12)
    small = make_feature({"pixel_values": noise(3, 8, 8)}, 1)
    gray = make_feature({"pixel_values": np.zeros((2, 3, 16, 16), dtype=np.float32)}, 4)
    features = [several, small, gray]
    assert [model.refuse_input(feature) for feature in features] == [None] * 3
    found = model.encode(features)
    assert [len(part) for part in found] == [feature.length for feature in features]
    for feature, part in zip(features, found, strict=True):
        given = {name: torch.from_numpy(array) for name, array in feature.data.items()}
        given = {name: array[None] if feature is not small else array[None, None] for name, array in given.items()}
        (expected,) = tiny.oracle.get_image_features(**given).pooler_output
        assert relative_error(part, expected) < 1e-5


@pytest.mark.parametrize(
    ("data", "length", "said"),
    [
        ({}, 4, "no array 'pixel_values'"),
        ({"pixel_values": noise(3, 16, 16), "more": noise(1)}, 4, "it brings more, pixel_values"),
        ({"pixel_values": noise(3, 16, 16).astype(np.float64)}, 4, "float64"),
        ({"pixel_values": noise(3, 16, 12)}, 4, "12"),
        ({"pixel_values": noise(1, 16, 16)}, 4, r"float32 \[3, 16, 16\] is needed"),
        ({"pixel_values": noise(3, 24, 24)}, 9, "at most 16 pixels"),
        ({"pixel_values": noise(3, 12, 12)}, 2, "a multiple of 2"),
        ({"pixel_values": noise(16, 16)}, 4, r"\[16, 16\]"),
        ({"pixel_values": noise(3, 16, 16)}, 5, "1 tiles of this size take 4"),
        ({"pixel_values": noise(2, 3, 16, 16)}, 4, "2 tiles of this size take 4"),
        ({"pixel_values": noise(0, 3, 16, 16)}, 4, "0"),
        ({"pixel_values": noise(99, 3, 16, 16)}, 4, "99 tiles"),
        ({"pixel_values": np.full((3, 16, 16), np.nan, dtype=np.float32)}, 4, "not finite"),
        ({"pixel_values": noise(3, 16, 16), "pixel_attention_mask": np.ones((8, 8), dtype=bool)}, 4, "pixel_attention"),
        ({"pixel_values": noise(3, 16, 16), "pixel_attention_mask": np.ones((16, 16))}, 4, "float64"),
        ({"pixel_values": noise(3, 16, 16), "pixel_attention_mask": np.full((16, 16), 2)}, 4, "other than 0 and 1"),
        ({"pixel_values": noise(3, 16, 16), "pixel_attention_mask": np.zeros((16, 16), dtype=bool)}, 4, "first row"),
    ],
)
def test_other_tiles_are_refused(
    data: dict[str, np.ndarray], length: int, said: str, smolvlm: tuple[TinyModel, VisionLanguageModel]
) -> None:
    reason = smolvlm[1].refuse_input(make_feature(data, length))
    assert reason is not None
    assert re.search(said, reason), reason


@pytest.mark.parametrize("style", ["now", "nested tower", "first release"])
@torch.inference_mode()
def test_gemma3_of_any_time(style: str, tmp_path: Path) -> None:
    """Names of language model, tower and head changed with the library; embeddings and text come out alike."""

    def rename(name: str) -> str:
        if style == "nested tower":
            return name.replace("vision_tower.", "vision_tower.vision_model.")
        if style == "first release":
            name = name.replace("model.vision_tower.", "vision_tower.vision_model.")
            name = name.replace("model.multi_modal_projector", "multi_modal_projector")
            return name.replace("model.language_model.", "language_model.model.").replace(
                "lm_head", "language_model.lm_head"
            )
        return name

    tiny = make_tiny_model("Gemma3ForConditionalGeneration", tmp_path, **GEMMA3)
    plain = (".vision_model.", ".")
    model = build(tiny, create_gemma3_vision, lambda name: rename(name.replace(*plain)))
    features = [make_feature({"pixel_values": noise(3, 16, 16) + index}, 4) for index in range(5)]
    assert [model.refuse_input(feature) for feature in features] == [None] * 5
    pixels = torch.from_numpy(np.stack([feature.data["pixel_values"] for feature in features]))
    expected = tiny.oracle.get_image_features(pixels).pooler_output
    assert relative_error(torch.stack(list(model.encode(features))), expected) < 1e-5
    assert model.refuse_input(make_feature({"pixel_values": noise(3, 16, 12)}, 4)) is not None
    assert model.refuse_input(make_feature({"pixel_values": noise(3, 16, 16)}, 5)) is not None
