"""Gemma 3 with images through the whole engine: whole images see themselves, or the request ends with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.errors import HardpointError
from hardpoint.interfaces import Feature, FinishReason, Prompt, RequestOutput
from hardpoint_models.vision_language import make_feature
from hardpoint_testing_torch import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 4, "num_kv_blocks": 200}
IMAGE, LENGTH, MOST = 7, 9, 12
CONFIG: Mapping[str, Any] = {
    "text_config": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "sliding_window": 11,
        "head_dim": 16,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 12,
        "patch_size": 2,
        "vision_use_head": False,
    },
    "image_token_index": IMAGE,
    "mm_tokens_per_image": LENGTH,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("gemma3")
    tiny = make_tiny_model("Gemma3ForConditionalGeneration", folder, **CONFIG)
    write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return tiny


@pytest.fixture(scope="module")
def llm(gemma: TinyModel) -> Iterator[LLM]:
    with LLM(str(gemma.folder), max_num_seqs=4, max_num_batched_tokens=MOST, **SETTINGS) as made:
        yield made


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 12, 12), dtype=np.float32)


def picture(seed: int, offset: int, length: int = LENGTH) -> Feature:
    return make_feature({"pixel_values": pixels(seed)}, length, offset=offset)


def shows(gap: int, *seeds: int) -> Prompt:
    """Images with ``gap`` tokens between them."""
    ids, features = [5, 9, 3], []
    for seed in seeds:
        features.append(picture(seed, len(ids)))
        ids += [*[IMAGE] * LENGTH, *[11] * gap]
    return Prompt(token_ids=[*ids, 13], features=tuple(features))


def ask(llm: LLM, *prompts: Prompt) -> list[RequestOutput]:
    return llm.generate(list(prompts), SamplingParams(temperature=0.0, max_tokens=10, min_tokens=10))


@torch.inference_mode()
def oracle_tokens(tiny: TinyModel, ids: Sequence[int], *seeds: int, sees_whole: bool = True) -> list[int]:
    """Greedy answers of transformers, token by token."""
    found = list(ids)
    images = torch.from_numpy(np.stack([pixels(seed) for seed in seeds]))
    for _ in range(10):
        tokens = torch.tensor([found])
        kinds = {"token_type_ids": (tokens == IMAGE).long()} if sees_whole else {}
        found.append(int(tiny.oracle(tokens, pixel_values=images, **kinds).logits[0, -1].argmax()))
    return found[len(ids) :]


def test_images_see_themselves_in_chunks_and_beside_others(gemma: TinyModel, llm: LLM) -> None:
    """Steps have room for one image and little more. Without sight to both sides other tokens come out."""
    prompts = [shows(2, 1, 2), shows(1, 3), shows(2, 1, 4)]
    seeds = [(1, 2), (3,), (1, 4)]
    expected = [oracle_tokens(gemma, one.token_ids or [], *shown) for one, shown in zip(prompts, seeds, strict=True)]
    assert [list(output.outputs[0].token_ids) for output in ask(llm, *prompts)] == expected
    causal = [
        oracle_tokens(gemma, one.token_ids or [], *shown, sees_whole=False)
        for one, shown in zip(prompts, seeds, strict=True)
    ]
    assert causal != expected
    # Once more, from cached prefixes, some of which end inside images.
    assert [list(output.outputs[0].token_ids) for output in ask(llm, *prompts)] == expected


def test_images_without_a_token_between_them_are_refused_alone(gemma: TinyModel, llm: LLM) -> None:
    wrong, right = ask(llm, shows(0, 1, 2), shows(1, 3))
    assert wrong.outputs[0].finish_reason is FinishReason.ERROR
    assert "there must be a token between them" in str(wrong.error)
    assert list(right.outputs[0].token_ids) == oracle_tokens(gemma, right.prompt_token_ids, 3)


def test_images_larger_than_a_step_are_refused(gemma: TinyModel) -> None:
    with LLM(str(gemma.folder), max_num_seqs=4, max_num_batched_tokens=LENGTH - 1, **SETTINGS) as small:
        (output,) = ask(small, shows(1, 1))
        assert "--max-num-batched-tokens allows 8" in str(output.error)
        (text,) = ask(small, Prompt(token_ids=[5, 9, 3, 11] * 6))
        assert text.error is None


def test_a_backend_without_ranges_is_no_choice(gemma: TinyModel) -> None:
    """The native kernels compute text of other models; here they say why they do not, and nobody takes over."""
    with (
        pytest.raises(HardpointError, match="uses_mm_prefix"),
        LLM(str(gemma.folder), attention_backend="cpu_paged", **SETTINGS),
    ):
        pass
