"""What models that see images read from a configuration, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from case_parts import CLIP_TOWER
from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.llava import read_llava
from hardpoint_models.qwen2_vl import QwenMedia, token_positions
from hardpoint_models.qwen2_vl_config import read_qwen2_5_tower, read_qwen2_tower
from hardpoint_models.vision_language import content_hash, make_feature, read_text_config

TEXT: dict[str, Any] = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64}
CLIP: dict[str, Any] = {**CLIP_TOWER, "num_channels": 3, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
LLAVA: dict[str, Any] = {
    "text_config": TEXT,
    "vision_config": CLIP,
    "image_token_index": 7,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
}
QWEN2: dict[str, Any] = {
    "depth": 2,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "embed_dim": 32,
    "hidden_size": 48,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 2,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
QWEN2_5: dict[str, Any] = {
    **{name: QWEN2[name] for name in ("depth", "num_heads", "in_channels", "patch_size", "spatial_merge_size")},
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": 48,
    "hidden_act": "silu",
    "tokens_per_second": 2,
    "window_size": 8,
    "fullatt_block_indexes": [1],
}
READERS: dict[str, tuple[Callable[[Mapping[str, Any]], Any], dict[str, Any]]] = {
    "LLaVA": (lambda config: read_llava(config, "Test", 100), LLAVA),
    "CLIP": (lambda config: read_llava({**LLAVA, "vision_config": config}, "Test", 100), CLIP),
    "Qwen2-VL": (lambda config: read_qwen2_tower({"vision_config": config}, "Test", 48), QWEN2),
    "Qwen2.5-VL": (lambda config: read_qwen2_5_tower({"vision_config": config}, "Test", 48), QWEN2_5),
    "text": (lambda config: read_text_config({"text_config": config}, "Test"), TEXT),
}
VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 7, 2**31, 2**63, 10**400, -1.5, 0.5, 1e300, float("nan"), float("inf")),
    *(True, "x", "", [], [1], [None], [-5], [[1]], [1] * 500, {}, {"a": 1}, {"rope_type": []}),
)


def refusal(read: Callable[[Mapping[str, Any]], Any], config: dict[str, Any]) -> str:
    """What is said against the configuration; nothing where it is read."""
    try:
        read(config)
    except (ModelFormatError, UnsupportedModelError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", READERS)
def test_every_field_is_read_or_refused(family: str) -> None:
    read, base = READERS[family]
    read(base)
    for name in base:
        without = {key: value for key, value in base.items() if key != name}
        for config in (without, *({**base, name: value} for value in VALUES)):
            said = refusal(read, config)
            assert len(said) < 500
            assert "\n" not in said


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("LLaVA", {"vision_config": None}, "'vision_config' is None; an object is needed"),
        ("LLaVA", {"vision_config": {**CLIP, "model_type": "pixtral"}}, "vision model is of type 'pixtral'; supported"),
        ("LLaVA", {"vision_feature_layer": -5}, "'vision_feature_layer' is -5; one or several of -4 to 3"),
        ("LLaVA", {"vision_feature_select_strategy": "some"}, "'vision_feature_select_strategy' is 'some'"),
        ("LLaVA", {"image_token_index": 100}, "'image_token_index' is 100; a token id below 100"),
        ("CLIP", {"num_attention_heads": 5}, "hidden_size=32 is no multiple of num_attention_heads=5"),
        ("CLIP", {"image_size": 2000}, "image_size=2000 and patch_size=4; an image may have 65536 patches at most"),
        ("Qwen2-VL", {"hidden_size": 50}, "hidden_size=50, but the language model's hidden_size is 48"),
        ("Qwen2-VL", {"embed_dim": 40}, "4 heads of a width of 40 are not multiples of 4 wide"),
        ("Qwen2-VL", {"rope_parameters": {"rope_type": "linear"}}, "supported: 'axial' with rope_theta 10000"),
        ("Qwen2.5-VL", {"window_size": 3}, "windows of 3 pixels are smaller than what is merged"),
        ("Qwen2.5-VL", {"fullatt_block_indexes": 1}, "'fullatt_block_indexes' is 1; a list of numbers of layers"),
        ("Qwen2.5-VL", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported: 'silu'"),
        ("text", {"model_type": "gpt2"}, "language model is of type 'gpt2'; supported: llama, mistral"),
    ],
)
def test_what_must_not_pass(family: str, changes: dict[str, Any], message: str) -> None:
    read, base = READERS[family]
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=message):
        read({**base, **changes})


def test_files_leave_out_what_is_as_in_the_first_model_of_its_kind() -> None:
    """The text_config of LLaVA 1.5 7B says no more than this."""
    config = read_text_config({"text_config": {**TEXT, "rms_norm_eps": 1e-5}}, "Test")
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (4096, 32, 32, 32)
    mistral = read_text_config({"text_config": {**TEXT, "model_type": "mistral", "sliding_window": None}}, "Test")
    assert (mistral.num_kv_heads, mistral.intermediate_size, set(mistral.windows)) == (8, 14336, {None})
    assert not config.is_tied
    assert read_text_config({"text_config": TEXT, "tie_word_embeddings": True}, "Test").is_tied


@pytest.mark.parametrize(
    ("given", "wanted"), [(-2, (2,)), (-1, (3,)), (-4, (0,)), (1, (1,)), (None, (2,)), ([-1, 1], (3, 1))]
)
def test_layers_whose_states_are_taken(given: Any, wanted: tuple[int, ...]) -> None:
    assert read_llava({**LLAVA, "vision_feature_layer": given}, "Test", 100).depths == wanted


def test_kinds_of_towers() -> None:
    config = read_llava(LLAVA, "Test", 100)
    assert (config.num_tokens, config.tower.num_layers, config.num_stored) == (9, 2, 3)
    siglip = {**LLAVA, "vision_config": {"model_type": "siglip_vision_model"}}
    config = read_llava({**siglip, "vision_feature_select_strategy": "full"}, "Test", 100)
    assert (config.num_tokens, config.tower.patch_bias, config.tower.has_class_token) == (196, True, False)


def test_what_identifies_arrays() -> None:
    """Names, types and shapes as well as bytes."""
    zeros = np.zeros((2, 4), dtype=np.float32)
    data: list[dict[str, np.ndarray]] = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.T},
        {"a": zeros.view(np.int32)},
        {"a": zeros + 1},
    ]
    assert len({content_hash(one) for one in data}) == len(data)
    assert content_hash({"a": zeros, "b": zeros}) == content_hash({"b": zeros, "a": zeros})


def positions(*items: Any, length: int, per_second: int | None = None) -> list[list[int]]:
    """By axis, those of a prompt."""
    tower = read_qwen2_tower({"vision_config": QWEN2}, "Test", 48)
    media = QwenMedia(tower, {"image": 7, "video": 8}, per_second)
    rows: list[list[int]] = token_positions(media, items, length).tolist()
    return rows


def item(kind: str, offset: int, *grid: int, seconds: float | None = None) -> Any:
    data: dict[str, np.ndarray] = {f"{kind}_grid_thw": np.array(grid, dtype=np.int64)}
    if seconds is not None:
        data["second_per_grid_ts"] = np.array([seconds], dtype=np.float32)
    return make_feature(data, int(np.prod(grid)) // 4, offset=offset, modality=kind)


def test_texts_have_three_equal_positions() -> None:
    assert positions(length=4) == [[0, 1, 2, 3]] * 3


def test_an_image_has_those_of_its_grid_and_text_goes_on_behind_its_longer_side() -> None:
    assert positions(item("image", 1, 1, 4, 6), length=9) == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]


def test_frames_of_a_video_are_apart_by_seconds_where_these_count() -> None:
    video = item("video", 0, 3, 2, 2, seconds=0.75)
    assert positions(video, length=4)[0] == [0, 1, 2, 1]
    assert positions(video, length=4, per_second=2)[0] == [0, 1, 3, 1]
    assert positions(video, item("image", 3, 1, 2, 4), length=6, per_second=2)[2] == [0, 0, 0, 1, 2, 3]


def test_no_time_of_a_single_frame_counts() -> None:
    """As a float32 the distance to the next frame would be infinite, and the position no number."""
    one = positions(item("video", 1, 1, 2, 2, seconds=3e38), length=4, per_second=4)
    assert one == positions(item("video", 1, 1, 2, 2, seconds=1.0), length=4, per_second=4)
