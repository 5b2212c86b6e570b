"""The real MiniLM, as its package holds it, against ``transformers`` on the same file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hardpoint import LLM, SamplingParams
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.sources.package import PackageSource
from hardpoint_model_io.tokenizers.hf import HuggingFaceTokenizerProvider
from hardpoint_testing_torch import (
    LocalDriver,
    PlainAttentionBackend,
    build_model,
    installed_factory,
    installed_loader,
    relative_error,
    worker_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_COSINE_DISTANCE = 1e-5
SENTENCES = (
    "The propeller turned slowly in the wind.",
    "In the breeze, the airscrew rotated at low speed.",
    "Bread rises because yeast makes gas.",
    "Yeast produces carbon dioxide, which lets dough grow.",
    "x",
    "Stock prices fell sharply after the announcement. " * 12,
)


@pytest.fixture(scope="module")
def artifact() -> ModelArtifact:
    source = PackageSource()
    found = source.resolve("minilm", None) if "minilm" in source.known_names() else None
    if found is None:
        pytest.skip("the package of minilm is not installed; run `make setup`")
    return found


@pytest.fixture(scope="module")
def expected(artifact: ModelArtifact) -> list[torch.Tensor]:
    """Hidden states [tokens, 384] of each sentence."""
    oracle = AutoModel.from_pretrained(artifact.root, dtype=torch.float32).eval()
    tokenizer = HuggingFaceTokenizerProvider().load(artifact)
    with torch.inference_mode():
        return [oracle(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0] for text in SENTENCES]


def embeddings(hidden: list[torch.Tensor]) -> torch.Tensor:
    """Mean over tokens, of length one: float64 [sentences, 384]."""
    return torch.stack([torch.nn.functional.normalize(one.double().mean(0), dim=0) for one in hidden])


def require_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """All within ``MAX_COSINE_DISTANCE``, and every pair ranks alike."""
    distance = 1 - torch.nn.functional.cosine_similarity(ours, theirs)
    assert float(distance.abs().max()) < MAX_COSINE_DISTANCE
    found, wanted = (one @ one.T for one in (ours, theirs))
    above = torch.triu_indices(len(ours), len(ours), 1)
    order = wanted[above[0], above[1]].argsort()
    assert torch.equal(found[above[0], above[1]].argsort(), order)


def test_hidden_states_and_embeddings(artifact: ModelArtifact, expected: list[torch.Tensor]) -> None:
    """All sentences in one step, which are long and short."""
    loader, tokenizer = installed_loader("safetensors"), HuggingFaceTokenizerProvider().load(artifact)
    info = loader.describe(artifact)
    assert (info.architecture, info.tasks, info.max_position) == ("BertModel", ("embed",), 256)
    factory = installed_factory("model", info.architecture)
    model, toolkit = build_model(factory, loader, worker_config(info), PlainAttentionBackend())
    assert (model.pooling_method, model.normalizes) == ("mean", True)  # type: ignore[attr-defined]
    found = LocalDriver(model, toolkit).step({text: tokenizer.encode(text) for text in SENTENCES})
    for text, hidden in zip(SENTENCES, expected, strict=True):
        assert relative_error(found[text], hidden) < 1e-4, text
    require_equal(embeddings(list(found.values())), embeddings(expected))


def test_what_means_the_same_lies_near(expected: list[torch.Tensor]) -> None:
    """The judge itself is sound: paraphrases are nearest to one another."""
    similarity = embeddings(expected) @ embeddings(expected).T - 2 * torch.eye(len(SENTENCES))
    assert similarity.argmax(-1)[:4].tolist() == [1, 0, 3, 2]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 128, "max_num_seqs": 2}, {"async_scheduling": True}],
    ids=lambda settings: "-".join(settings) or "usual",
)
def test_embeddings_through_the_engine(settings: dict[str, Any], expected: list[torch.Tensor]) -> None:
    """By the model's own pooling, in whatever steps the texts fit."""
    with LLM("minilm", dtype="float32", **settings) as llm:
        outputs = llm.embed(SENTENCES)
    assert [output.num_prompt_tokens for output in outputs] == [len(hidden) for hidden in expected]
    found = torch.from_numpy(np.stack([output.embedding for output in outputs]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(SENTENCES)))
    require_equal(found.double(), embeddings(expected))


def test_fewer_dimensions_are_those_of_the_reference_cut_and_scaled_again(expected: list[torch.Tensor]) -> None:
    """As ``truncate_dim`` of sentence-transformers: the leading entries, made of length one."""
    whole = embeddings(expected)
    with LLM("minilm", dtype="float32") as llm:
        for dimensions in (256, 64):
            outputs = llm.embed(SENTENCES, dimensions=dimensions)
            found = torch.from_numpy(np.stack([output.embedding for output in outputs])).double()
            require_equal(found, torch.nn.functional.normalize(whole[:, :dimensions], dim=-1))
            torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(SENTENCES), dtype=torch.float64))


def test_what_a_call_may_choose(expected: list[torch.Tensor]) -> None:
    """Every token on its own, the first one, and no normalization."""
    text, hidden = SENTENCES[0], expected[0]
    with LLM("minilm", dtype="float32") as llm:
        (each,) = llm.embed(text, pooling="token_embed", normalize=False)
        (first,) = llm.embed(text, pooling="cls", normalize=False)
    assert relative_error(torch.from_numpy(np.array(each.embedding)), hidden) < 1e-4
    assert relative_error(torch.from_numpy(np.array(first.embedding)), hidden[0]) < 1e-4


def test_what_an_encoder_does_not_do() -> None:
    """It generates nothing, takes no text in parts, and keeps no memory for a cache."""
    with LLM("minilm", dtype="float32", max_num_batched_tokens=48) as llm:
        with pytest.raises(InvalidRequestError, match="does not generate text; it serves embed"):
            llm.generate("The wing", SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequestError, match="is computed in one step; --max-num-batched-tokens allows 48"):
            llm.embed(SENTENCES[-1])
        (short,) = llm.embed(SENTENCES[0])
    assert short.embedding.shape == (384,)
