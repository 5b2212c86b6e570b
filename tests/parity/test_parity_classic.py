"""Decoders with learned positions through the whole engine: what is longer than their table never gets to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint_testing_torch import make_tiny_model
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

POSITIONS = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("gpt2")
    made = make_tiny_model("GPT2LMHeadModel", folder, max_position_embeddings=POSITIONS, bos_token_id=1, eos_token_id=2)
    write_tiny_tokenizer(folder, made.info.vocab_size)
    return made


@pytest.fixture
def llm(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(str(tiny.folder), dtype="float32", num_kv_blocks=64) as llm:
        yield llm


def test_the_last_learned_position_is_the_last_of_a_sequence(llm: LLM, tiny: TinyModel) -> None:
    assert llm.limits.max_model_len == POSITIONS
    prompt = list(range(3, POSITIONS - 7))
    params = SamplingParams(temperature=0.0, max_tokens=POSITIONS - len(prompt), ignore_eos=True)
    (output,) = llm.generate([Prompt(token_ids=prompt)], params)
    answer = output.outputs[0]
    assert len(prompt) + len(answer.token_ids) == POSITIONS
    assert answer.finish_reason == "length"
    assert list(answer.token_ids) == tiny.greedy(prompt, POSITIONS - len(prompt))


def test_longer_sequences_are_refused_as_requests(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=f"the context length is {POSITIONS} tokens"):
        llm.generate([Prompt(token_ids=[5] * (POSITIONS + 1))], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequestError, match=f"the context ends at {POSITIONS}"):
        llm.generate([Prompt(token_ids=[5] * 3)], SamplingParams(max_tokens=POSITIONS))


def test_a_longer_context_is_refused_at_the_start(tiny: TinyModel) -> None:
    with pytest.raises(ConfigError, match=f"set --max-model-len to at most {POSITIONS}"):
        LLM(str(tiny.folder), max_model_len=POSITIONS + 1)
