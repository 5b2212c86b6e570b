"""Images in prompts through the whole engine: what is encoded, cached and refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import Feature, FinishReason, Prompt, RequestOutput
from hardpoint_models.llava import LlavaEncoder
from hardpoint_models.vision_language import make_feature
from hardpoint_testing_torch import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
IMAGE, LENGTH = 7, 9
CONFIG: Mapping[str, Any] = {
    "text_config": {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 12,
        "patch_size": 4,
    },
    "image_token_index": IMAGE,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12)
HEAD, TAIL = [5, 9, 3], [8, 11]
SHOWN = [*HEAD, *[IMAGE] * LENGTH, *TAIL]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("llava")
    tiny = make_tiny_model("LlavaForConditionalGeneration", folder, **CONFIG)
    write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return tiny


@pytest.fixture(scope="module")
def llm(llava: TinyModel) -> Iterator[LLM]:
    with LLM(str(llava.folder), num_kv_blocks=200, **SETTINGS) as made:
        yield made


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 12, 12), dtype=np.float32)


def picture(seed: int, offset: int = len(HEAD)) -> Feature:
    return make_feature({"pixel_values": pixels(seed)}, LENGTH, offset=offset)


def shows(*seeds: int) -> Prompt:
    """Images one after another, with two tokens between them."""
    ids, features = list(HEAD), []
    for seed in seeds:
        features.append(picture(seed, len(ids)))
        ids += [*[IMAGE] * LENGTH, *TAIL]
    return Prompt(token_ids=ids, features=tuple(features))


def oracle_tokens(tiny: TinyModel, ids: Sequence[int], *seeds: int) -> list[int]:
    """Greedy answers of transformers, token by token."""
    found = list(ids)
    images = {"pixel_values": torch.from_numpy(np.stack([pixels(seed) for seed in seeds]))} if seeds else {}
    with torch.inference_mode():
        for _ in range(12):
            found.append(int(tiny.oracle(torch.tensor([found]), **images).logits[0, -1].argmax()))
    return found[len(ids) :]


def tokens(output: RequestOutput) -> list[int]:
    assert output.error is None
    return list(output.outputs[0].token_ids)


def test_one_image_is_seen_and_another_is_told_apart(llava: TinyModel, llm: LLM) -> None:
    """Placeholders are alike, so without the content in the hashes of blocks the second would find the first."""
    first, again, other = (llm.generate([shows(seed)], GREEDY)[0] for seed in (0, 0, 1))
    assert [tokens(one) for one in (first, again)] == [oracle_tokens(llava, SHOWN, 0)] * 2
    assert tokens(other) == oracle_tokens(llava, SHOWN, 1) != tokens(first)
    assert (first.num_cached_tokens, again.num_cached_tokens, other.num_cached_tokens) == (0, 12, 0)


def test_what_several_requests_show_is_encoded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    encode = LlavaEncoder.encode

    def counting(self: LlavaEncoder, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        asked.append(len(features))
        return encode(self, features)

    monkeypatch.setattr(LlavaEncoder, "encode", counting)
    assert llm.core.scheduler.reset_prefix_cache()
    alone = [tokens(llm.generate([shows(*seeds)], GREEDY)[0]) for seeds in ((2, 3), (3,))]
    assert asked == [2], "the output is kept for who shows it next"
    assert llm.core.scheduler.reset_prefix_cache()
    asked.clear()
    together = llm.generate([shows(2, 3), shows(3), shows(3)], GREEDY)
    assert [tokens(one) for one in together] == [*alone, alone[1]]
    assert sum(asked) == 2


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ((make_feature({}, LENGTH, offset=3),), "brings no array 'pixel_values'; float32 [3, 12, 12] is needed"),
        (
            (make_feature({"pixel_values": pixels(0)[:, :8]}, LENGTH, offset=3),),
            "pixel_values is float32 [3, 8, 12]; float32 [3, 12, 12] is needed",
        ),
        (
            (make_feature({"pixel_values": pixels(0).astype(np.float64)}, LENGTH, offset=3),),
            "pixel_values is float64 [3, 12, 12]",
        ),
        ((make_feature({"pixel_values": pixels(0) * np.inf}, LENGTH, offset=3),), "values that are not finite"),
        ((make_feature({"pixel_values": pixels(0), "x": pixels(0)}, LENGTH, offset=3),), "takes 'pixel_values' alone"),
        ((picture(0, 2),), "its positions 2 to 10 must all hold the placeholder id 7"),
        ((make_feature({"pixel_values": pixels(0)}, 8, offset=3),), "it has 8 positions; an image takes 9"),
        ((make_feature({"pixel_values": pixels(0)}, LENGTH, offset=3, modality="video"),), "does not take such input"),
    ],
)
def test_bad_images_end_their_own_request_only(
    llava: TinyModel, llm: LLM, features: tuple[Feature, ...], message: str
) -> None:
    refused, answered = llm.generate([Prompt(token_ids=SHOWN, features=features), shows(0)], GREEDY)
    assert refused.outputs[0].finish_reason is FinishReason.ERROR
    assert message in (refused.error or "")
    assert tokens(answered) == oracle_tokens(llava, SHOWN, 0)
    llm.core.scheduler.check_integrity()


def test_hashes_that_are_no_text_are_refused_before_they_are_hashed(llm: LLM) -> None:
    for name in ("content_hash", "modality"):
        bad = structs.replace(picture(0), **{name: "\ud800"})
        with pytest.raises(InvalidRequestError, match="unpaired surrogates"):
            llm.generate([Prompt(token_ids=SHOWN, features=(bad,))], GREEDY)
    assert tokens(llm.generate([shows(0)], GREEDY)[0])


def test_placeholders_without_an_image_are_text_unless_others_have_one(llava: TinyModel, llm: LLM) -> None:
    assert tokens(llm.generate([Prompt(token_ids=SHOWN)], GREEDY)[0]) == oracle_tokens(llava, SHOWN)
    left = [*SHOWN, IMAGE, 4]
    (output,) = llm.generate([Prompt(token_ids=left, features=(picture(0),))], GREEDY)
    assert "placeholder (7) at position 14 that belongs to no feature" in (output.error or "")


def test_models_of_text_take_no_images(tmp_path: Any) -> None:
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path)
    write_tiny_tokenizer(tmp_path, tiny.info.vocab_size)
    with LLM(str(tmp_path), num_kv_blocks=60, **SETTINGS) as text:
        (output,) = text.generate([shows(0)], GREEDY)
    assert output.error == "this model takes no image input"


def test_pipelines_are_refused(llava: TinyModel) -> None:
    with pytest.raises(ConfigError, match="pipeline"):
        LLM(str(llava.folder), num_kv_blocks=60, pipeline_parallel_size=2, **SETTINGS)
