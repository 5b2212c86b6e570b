"""Embeddings of tiny random models through the whole engine, against hidden states of ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import EmbeddingOutput, FinishReason, PoolingParams, Prompt
from hardpoint_testing_torch import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

PROMPTS = ([5, 9, 3, 3, 8], list(range(20, 77)), [7], [5, 9, 3, 3, 8, *range(90, 130)])
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "kv_cache_memory": "4MiB"}
METHODS = ("last", "cls", "mean", "token_embed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("embeds") / "llama")
    write_tiny_tokenizer(tiny.folder, tiny.info.vocab_size)
    return tiny


@pytest.fixture(scope="module")
def llm(llama: TinyModel) -> Iterator[LLM]:
    """Steps hold a quarter of the longest prompt."""
    with LLM(str(llama.folder), max_num_batched_tokens=16, **SETTINGS) as made:
        yield made


def hidden(tiny: TinyModel, ids: Sequence[int]) -> torch.Tensor:
    """float64 [prompt, hidden]."""
    with torch.inference_mode():
        states: torch.Tensor = tiny.oracle.base_model(torch.tensor([list(ids)])).last_hidden_state[0]
        return states.double()


def expected(tiny: TinyModel, ids: Sequence[int], method: str, dimensions: int | None = None) -> torch.Tensor:
    states = hidden(tiny, ids)
    pooled = {"last": states[-1], "cls": states[0], "mean": states.mean(0), "token_embed": states}[method]
    return torch.nn.functional.normalize(pooled[..., :dimensions], dim=-1)


def require_close(output: EmbeddingOutput, wanted: torch.Tensor) -> None:
    assert output.embedding.dtype == np.float32
    np.testing.assert_allclose(output.embedding, wanted.numpy(), rtol=1e-4, atol=1e-5)


def assert_all_free(llm: LLM) -> None:
    llm.core.scheduler.check_integrity()
    stats = llm.core.scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)


@pytest.mark.parametrize("method", METHODS)
def test_embeddings_are_those_of_the_reference(llama: TinyModel, llm: LLM, method: str) -> None:
    """Prompts longer than a step are pooled over the chunks they are computed in."""
    for dimensions in (None, 8):
        outputs = llm.embed(PROMPTS, pooling=method, dimensions=dimensions)
        for ids, output in zip(PROMPTS, outputs, strict=True):
            require_close(output, expected(llama, ids, method, dimensions))
    assert_all_free(llm)


def test_a_decoder_embeds_by_its_last_token_scaled_to_one(llama: TinyModel, llm: LLM) -> None:
    (output,) = llm.embed("t5 t9 t3 t3 t8")
    assert output.prompt_token_ids == tuple(PROMPTS[0])
    require_close(output, expected(llama, PROMPTS[0], "last"))
    (plain,) = llm.embed([PROMPTS[0]], normalize=False)
    np.testing.assert_allclose(plain.embedding, hidden(llama, PROMPTS[0])[-1].numpy(), rtol=1e-4, atol=1e-5)


def test_a_cached_prefix_changes_no_embedding(llama: TinyModel, llm: LLM) -> None:
    """R1.11: the last token goes on from it; what needs all positions computes them."""
    longest = list(range(3, 83))
    llm.generate([longest], SamplingParams(max_tokens=1, temperature=0.0))
    (last,) = llm.embed([longest], pooling="last")
    assert last.num_cached_tokens > 0
    require_close(last, expected(llama, longest, "last"))
    (mean,) = llm.embed([longest], pooling="mean")
    assert mean.num_cached_tokens == 0
    require_close(mean, expected(llama, longest, "mean"))


def test_embedding_and_generating_share_the_engine(llama: TinyModel, llm: LLM) -> None:
    """One batch of both; one that is aborted half-way leaves its neighbors and its blocks alone."""
    inputs, core = llm._frontend.inputs, llm.core
    embeds = [inputs.process(Prompt(token_ids=ids), PoolingParams(pooling="mean")).requests[0] for ids in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    generates = [inputs.process(Prompt(token_ids=ids), greedy).requests[0] for ids in PROMPTS]
    given_up = inputs.process(Prompt(token_ids=PROMPTS[1]), PoolingParams()).requests[0]
    for request in (given_up, *[one for pair in zip(embeds, generates, strict=True) for one in pair]):
        core.add(request)
    ends: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {}
    while core.num_live:
        for frame in core.step().values():
            for output in frame.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ends[output.request_id] = output
        core.abort([given_up.request_id])
    assert ends[given_up.request_id].finish_reason is FinishReason.ABORT
    for ids, embed, generate in zip(PROMPTS, embeds, generates, strict=True):
        assert ends[embed.request_id].finish_reason is FinishReason.STOP
        wanted = expected(llama, ids, "mean").numpy()
        np.testing.assert_allclose(ends[embed.request_id].pooled, wanted, rtol=1e-4, atol=1e-5)
        assert tokens[generate.request_id] == llama.greedy(ids, 6)
    core.utility("reset_prefix_cache")
    assert_all_free(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 96}, {"async_scheduling": True}, {"num_kv_blocks": 8, "block_size": 16}],
    ids=["whole", "steps ahead", "few blocks"],
)
def test_no_setting_changes_an_embedding(llama: TinyModel, settings: dict[str, Any]) -> None:
    """Whole prompts, a step planned ahead, and blocks for one long prompt at a time."""
    with LLM(str(llama.folder), **({"max_num_batched_tokens": 16} | SETTINGS | settings)) as llm:
        for method in METHODS:
            for ids, output in zip(PROMPTS, llm.embed(PROMPTS, pooling=method), strict=True):
                require_close(output, expected(llama, ids, method))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    tiny = make_tiny_model("BertModel", tmp_path_factory.mktemp("embeds") / "bert", max_position_embeddings=64)
    write_tiny_tokenizer(tiny.folder, tiny.info.vocab_size)
    return tiny


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True, "long_prefill_threshold": 4}], ids=["", "ahead"])
def test_an_encoder_takes_prompts_whole(bert: TinyModel, settings: dict[str, Any]) -> None:
    """Each has to fit a step together with those before it, or waits for the next one; cut, it would be another."""
    wanted: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 48}
    prompts = [list(range(3, 3 + size)) for size in (40, 5, 1, 48, 30, 20)]
    with LLM(str(bert.folder), **(wanted | settings)) as llm:
        for method in METHODS:
            for ids, output in zip(prompts, llm.embed(prompts, pooling=method, normalize=True), strict=True):
                assert output.num_cached_tokens == 0
                require_close(output, expected(bert, ids, method))
        with pytest.raises(InvalidRequestError, match="49 tokens and is computed in one step.*allows 48"):
            llm.embed([[3] * 49, [4]])
        assert llm.core.num_live == 0
