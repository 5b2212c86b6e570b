"""Models with an encoder and a decoder through the whole engine: texts, spectrograms, and what becomes of bad ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cli_support import CommandLine
from hardpoint import LLM, AsyncLLM, SamplingParams
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import Feature, FinishReason, Prompt, RequestOutput
from hardpoint_testing_torch import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "block_size": 4}
PROMPTS = ([5, 9, 3, 3, 8], list(range(20, 77)), [7], [5, 9, 3, 3, 8, *range(90, 130)])
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=40)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
}
AUDIO: dict[str, Any] = {
    **SIZES,
    "num_mel_bins": 6,
    "max_source_positions": 14,
    "max_target_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "decoder_start_token_id": 3,
    "begin_suppress_tokens": None,
}


def saved(architecture: str, folder: Any, **config: Any) -> TinyModel:
    tiny = make_tiny_model(architecture, folder, **config)
    write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return tiny


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return saved("BartForConditionalGeneration", tmp_path_factory.mktemp("encdec"), **SIZES)


@pytest.fixture(scope="module")
def llm(bart: TinyModel) -> Iterator[LLM]:
    with LLM(str(bart.folder), num_kv_blocks=200, **SETTINGS) as made:
        yield made


def oracle_tokens(tiny: TinyModel, ids: Sequence[int], count: int = 40) -> list[int]:
    """What ``generate`` of transformers answers."""
    with torch.inference_mode():
        found = tiny.oracle.generate(
            torch.tensor([list(ids)]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            forced_eos_token_id=None,
        )
    tokens: list[int] = found[0, 1:].tolist()
    return tokens


def tokens(output: RequestOutput) -> list[int]:
    assert output.error is None
    return list(output.outputs[0].token_ids)


def assert_all_free(llm: LLM) -> None:
    llm.core.scheduler.check_integrity()
    stats = llm.core.scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)


def test_prompts_are_the_encoders_and_answers_those_of_generate(bart: TinyModel, llm: LLM) -> None:
    outputs = llm.generate([Prompt(token_ids=ids) for ids in PROMPTS], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [(2,)] * len(PROMPTS)
    assert [tokens(output) for output in outputs] == [oracle_tokens(bart, ids) for ids in PROMPTS]
    assert_all_free(llm)


def test_texts_and_ids_mean_the_same(llm: LLM) -> None:
    by_text = llm.generate("t5 t9 t3", GREEDY)[0]
    assert tokens(by_text) == tokens(llm.generate([5, 9, 3], GREEDY)[0])
    assert by_text.prompt == "t5 t9 t3"


def test_several_answers_share_their_input(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([list(PROMPTS[1])], params)
    assert len({sequence.token_ids for sequence in output.outputs}) == 3
    assert output.outputs == llm.generate([list(PROMPTS[1])], params)[0].outputs
    assert_all_free(llm)


def given(ids: Sequence[int], **fields: Any) -> Feature:
    array = np.asarray(ids, dtype=np.int32)
    known = {"offset": 0, "length": 1, "num_encoder_tokens": len(array), "data": {"token_ids": array}}
    return Feature(modality="text", content_hash=f"{ids} {fields}", **{**known, **fields})


def test_decoders_may_be_given_their_beginning(bart: TinyModel, llm: LLM) -> None:
    beginning = [2, *oracle_tokens(bart, PROMPTS[0], 7)]
    (output,) = llm.generate([Prompt(token_ids=beginning, features=(given(PROMPTS[0]),))], GREEDY)
    assert output.prompt_token_ids == tuple(beginning)
    assert tokens(output)[:33] == oracle_tokens(bart, PROMPTS[0])[7:]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ((given([500]),), "holds ids outside 0 to 159"),
        ((given([1], num_encoder_tokens=4),), "must be int32 [4]"),
        ((given([1] * 97),), "97 encoder tokens were given, the model takes at most 96"),
        ((given([1]), given([2], offset=1)), "one input per request, not 2"),
        ((given([1], data={"pixels": np.zeros((2, 2), dtype=np.float32)}),), "the request brings pixels"),
    ],
)
def test_bad_inputs_end_their_own_request_only(
    bart: TinyModel, llm: LLM, features: tuple[Feature, ...], message: str
) -> None:
    asked = [Prompt(token_ids=[2, 2], features=features), Prompt(token_ids=PROMPTS[0])]
    refused, answered = llm.generate(asked, GREEDY)
    assert refused.outputs[0].finish_reason is FinishReason.ERROR
    assert message in (refused.error or "")
    assert tokens(answered) == oracle_tokens(bart, PROMPTS[0])
    assert_all_free(llm)


@pytest.mark.parametrize(
    "features",
    ["abc", ("abc",), (Feature(modality="x", content_hash="x", offset=0, length=1, data=3),)],  # type: ignore[arg-type]
)
def test_what_is_no_feature_is_refused_before_anything_is_queued(llm: LLM, features: Any) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate([Prompt(token_ids=[2], features=features)], GREEDY)


def test_leaving_early_gives_everything_back(llm: LLM) -> None:
    for count, _ in enumerate(llm.stream([Prompt(token_ids=ids) for ids in PROMPTS], GREEDY)):
        if count == 9:
            break
    llm.generate([1], SamplingParams(max_tokens=1))
    assert_all_free(llm)


def test_a_small_pool_preempts_and_encodes_again(bart: TinyModel) -> None:
    """Three of these need more blocks than there are."""
    with LLM(str(bart.folder), num_kv_blocks=50, max_num_batched_tokens=8, **SETTINGS) as small:
        outputs = small.generate([Prompt(token_ids=ids[:30]) for ids in PROMPTS], GREEDY)
        assert small.core.scheduler.stats().num_preemptions > 0
        assert [tokens(output) for output in outputs] == [oracle_tokens(bart, ids[:30]) for ids in PROMPTS]
        assert_all_free(small)


def test_who_attends_and_why_no_prefix_is_kept_is_told(bart: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LLM(str(bart.folder), num_kv_blocks=60, **SETTINGS):
        pass
    assert "attention torch_reference" in caplog.text
    assert "encoder_decoder" in caplog.text or "encoder-decoder" in caplog.text
    assert "every prompt will be computed" in caplog.text


def test_pipelines_are_refused(bart: TinyModel) -> None:
    with pytest.raises(ConfigError, match="pipeline"):
        LLM(str(bart.folder), num_kv_blocks=60, pipeline_parallel_size=2, **SETTINGS)


@pytest.mark.slow
def test_the_command_line_answers_texts(
    bart: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hardpoint = CommandLine(monkeypatch, capsys)
    arguments = ["--prompt", "t5 t9 t3 t3 t8", "--temperature", "0", "--max-tokens", "9", "--json"]
    settings = ["--dtype", "float32", "--max-model-len", "96", "--num-kv-blocks", "60", "--block-size", "4"]
    (line,) = hardpoint("generate", str(bart.folder), *settings, *arguments).json_lines()
    assert line["token_ids"][:9] == oracle_tokens(bart, PROMPTS[0], 9)[: len(line["token_ids"])]


@pytest.mark.slow
def test_spectrograms_travel_to_another_process(tmp_path: Any) -> None:
    """Typed arrays on the socket, and the same tokens as in one process and in transformers."""
    tiny = saved("WhisperForConditionalGeneration", tmp_path, **AUDIO)
    states = np.random.default_rng(0).standard_normal((6, 28), dtype=np.float32)
    feature = Feature(
        modality="audio",
        content_hash="noise",
        offset=0,
        length=1,
        num_encoder_tokens=14,
        data={"input_features": states},
    )
    prompt, params = (
        Prompt(token_ids=[3, 50, 51], features=(feature,)),
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    )
    with LLM(str(tiny.folder), num_kv_blocks=60, **SETTINGS) as llm:
        (here,) = llm.generate([prompt, Prompt(token_ids=[3])], params)[:1]
        refused = llm.generate([Prompt(token_ids=[3])], params)[0]
    assert "the request brings token_ids" in (refused.error or "")

    async def there() -> RequestOutput:
        async with await AsyncLLM.create(str(tiny.folder), num_kv_blocks=60, **SETTINGS) as remote:
            return [output async for output in remote.generate(prompt, params)][-1]

    assert tokens(asyncio.run(there())) == tokens(here)
    sequence = [3, 50, 51, *tokens(here)]
    with torch.inference_mode():
        logits = tiny.oracle(
            input_features=torch.from_numpy(states)[None], decoder_input_ids=torch.tensor([sequence[:-1]])
        ).logits[0]
    assert logits[2:].argmax(-1).tolist() == tokens(here)
