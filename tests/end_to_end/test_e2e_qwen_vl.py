"""Qwen2.5-VL through the whole engine: items of any size, three positions per token, and what does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import Feature, FinishReason, Prompt, RequestOutput
from hardpoint_models.vision_language import make_feature
from hardpoint_testing_torch import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
IMAGE, VIDEO = 7, 11
VALUES = 3 * 2 * 2**2
CONFIG: Mapping[str, Any] = {
    "text_config": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    },
    "vision_config": {
        "depth": 2,
        "num_heads": 4,
        "patch_size": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "out_hidden_size": 48,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
COUNT = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=COUNT)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("qwen")
    tiny = make_tiny_model("Qwen2_5_VLForConditionalGeneration", folder, **CONFIG)
    write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return tiny


@pytest.fixture(scope="module")
def llm(qwen: TinyModel) -> Iterator[LLM]:
    with LLM(str(qwen.folder), num_kv_blocks=200, **SETTINGS) as made:
        yield made


def item(kind: str, grid: tuple[int, int, int], offset: int, seconds: float | None = None, **changes: Any) -> Feature:
    patches = np.random.default_rng(grid).standard_normal((math.prod(grid), VALUES), dtype=np.float32)
    suffix = "_videos" if kind == "video" else ""
    data: dict[str, np.ndarray] = {f"pixel_values{suffix}": patches, f"{kind}_grid_thw": np.array(grid, dtype=np.int64)}
    if seconds is not None:
        data["second_per_grid_ts"] = np.array([seconds], dtype=np.float32)
    data.update(changes)
    return make_feature(data, math.prod(grid) // 4, offset=offset, modality=kind)


def asked(*features: Feature, tail: int = 3) -> Prompt:
    ids = [5, 9]
    for feature in features:
        assert feature.offset == len(ids)
        ids += [*[IMAGE if feature.modality == "image" else VIDEO] * feature.length, 3]
    return Prompt(token_ids=[*ids, *range(20, 20 + tail)], features=features)


def generated(tiny: TinyModel, prompt: Prompt) -> list[int]:
    """What ``generate`` of transformers answers, which decodes with positions behind the largest of the prompt."""
    ids = list(prompt.token_ids or ())
    kinds = [[1 if one == IMAGE else 2 if one == VIDEO else 0 for one in ids]]
    given: dict[str, Any] = {"mm_token_type_ids": torch.tensor(kinds)} if prompt.features else {}
    for feature in prompt.features:
        for name, array in feature.data.items():
            part = torch.from_numpy(array[None] if name.endswith("thw") else array)
            given[name] = torch.cat([given[name], part]) if name in given else part
    with torch.inference_mode():
        found = tiny.oracle.generate(
            torch.tensor([ids]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False, **given
        )
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


def tokens(output: RequestOutput) -> list[int]:
    assert output.error is None
    return list(output.outputs[0].token_ids)


PROMPTS = {
    "text alone": asked(tail=9),
    "an image": asked(item("image", (1, 4, 6), 2)),
    "images of several sizes": asked(item("image", (1, 2, 2), 2), item("image", (1, 6, 4), 4), tail=1),
    "a video beside an image": asked(item("video", (2, 4, 4), 2, 0.5), item("image", (1, 2, 4), 11)),
    "frames that outrun their sides": asked(item("video", (5, 2, 4), 2, 1.0), tail=1),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_are_those_of_generate(qwen: TinyModel, llm: LLM, name: str) -> None:
    assert tokens(llm.generate([PROMPTS[name]], GREEDY)[0]) == generated(qwen, PROMPTS[name])


@pytest.mark.slow
def test_all_at_once_and_in_small_steps(qwen: TinyModel) -> None:
    with LLM(str(qwen.folder), num_kv_blocks=200, max_num_batched_tokens=5, **SETTINGS) as small:
        outputs = small.generate(list(PROMPTS.values()), GREEDY)
    assert [tokens(one) for one in outputs] == [generated(qwen, prompt) for prompt in PROMPTS.values()]


GRID = np.array([1, 4, 5], dtype=np.int64)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (
            item("image", (1, 4, 6), 2, image_grid_thw=GRID),
            "image_grid_thw is [1, 4, 5]; rows and columns must be mult",
        ),
        (
            item("image", (1, 4, 6), 2, image_grid_thw=np.array([1, 4, 4])),
            "it has 6 positions, but image_grid_thw [1, 4, 4] makes 4 embeddings",
        ),
        (item("image", (1, 4, 6), 2, image_grid_thw=np.array([0, 4, 6])), "1 to 4194304 patches are possible"),
        (item("image", (1, 4, 6), 2, image_grid_thw=np.array([2**62, 4, 6])), "1 to 4194304 patches are possible"),
        (item("image", (1, 4, 6), 2, image_grid_thw=np.array([1, 4])), "image_grid_thw is int64 [2]; int64 [3] is"),
        (
            item("image", (1, 4, 6), 2, pixel_values=np.zeros((24, 7), dtype=np.float32)),
            "pixel_values is float32 [24, 7]; float32 [24, 24] is needed",
        ),
        (item("image", (1, 4, 6), 2, seconds=1.0), "it brings image_grid_thw, pixel_values, second_per_grid_ts"),
        (
            item("video", (5, 2, 4), 2, seconds=3.0),
            "its 5 frames are 6 positions apart, which is more time than its 10",
        ),
        (item("video", (5, 2, 4), 2, seconds=-1.0), "its 5 frames are -2 positions apart"),
    ],
)
def test_what_does_not_fit_ends_its_own_request_only(qwen: TinyModel, llm: LLM, feature: Feature, message: str) -> None:
    refused, answered = llm.generate([asked(feature), PROMPTS["an image"]], GREEDY)
    assert refused.outputs[0].finish_reason is FinishReason.ERROR
    assert message in (refused.error or "")
    assert tokens(answered) == generated(qwen, PROMPTS["an image"])
