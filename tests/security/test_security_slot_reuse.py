"""Class 43: requests that join and leave a batch at random have the tokens they have alone; no slot keeps a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hardpoint import LLM, Prompt, SamplingParams

VOCAB_SIZE = 260
NUM_REQUESTS = 24
Request = tuple[Prompt, SamplingParams]


def make_requests(seed: int) -> list[Request]:
    """Requests that differ in everything a slot holds: length, seed, filters, penalties, bias, allowed and stop ids."""
    source = random.Random(seed)
    requests = []
    for index in range(NUM_REQUESTS):
        length = source.choice([1, 2, 15, 16, 17, 47, 48, 49, 90])
        ids = [source.randrange(3, VOCAB_SIZE) for _ in range(length)]
        variants: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"top_k": 5, "top_p": 0.9},
            {"min_p": 0.05},
            {"presence_penalty": 1.5, "frequency_penalty": 1.0},
            {"repetition_penalty": 1.7, "temperature": 0.0},
            {"logit_bias": {source.randrange(VOCAB_SIZE): 50.0}, "temperature": 0.0},
            {"allowed_token_ids": tuple(source.sample(range(3, VOCAB_SIZE), 6))},
            {"bad_words_token_ids": ((source.randrange(3, VOCAB_SIZE),),), "temperature": 0.0},
            {"stop_token_ids": tuple(source.sample(range(3, VOCAB_SIZE), 20)), "min_tokens": 1},
            {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.0},
        ]
        params = SamplingParams(
            seed=seed * 1000 + index,
            max_tokens=source.choice([1, 2, 7, 20, 33]),
            ignore_eos=True,
            **variants[index % len(variants)],
        )
        requests.append((Prompt(token_ids=ids), params))
    return requests


def tokens(llm: LLM, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    results = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [tuple(result.outputs[0].token_ids) for result in results]


def abandon(llm: LLM, source: random.Random) -> None:
    """Fill the slots, then leave while some requests still run and others still wait."""
    prompts = [Prompt(token_ids=[source.randrange(3, VOCAB_SIZE) for _ in range(60)]) for _ in range(6)]
    params = SamplingParams(
        max_tokens=40, ignore_eos=True, logit_bias={7: 100.0}, presence_penalty=2.0, top_k=1, repetition_penalty=5.0
    )
    stream = llm.stream(prompts, params)
    for _ in range(source.randrange(1, 12)):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.core.scheduler.stats().num_running == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_joining_and_leaving_changes_no_token(llm: LLM, seed: int) -> None:
    source = random.Random(seed)
    requests = make_requests(seed)
    alone = []
    for request in requests:
        llm.reset_prefix_cache()
        alone += tokens(llm, [request])
    for _ in range(2):
        abandon(llm, source)
        order = source.sample(range(NUM_REQUESTS), NUM_REQUESTS)
        together = tokens(llm, [requests[index] for index in order])
        assert together == [alone[index] for index in order]


def test_a_plain_request_after_a_peculiar_one_is_plain_again(llm: LLM) -> None:
    """The same slot, one right after the other."""
    prompt = Prompt(token_ids=[10, 11, 12])
    plain = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (wanted,) = tokens(llm, [(prompt, plain)])
    peculiar: list[dict[str, Any]] = [
        {"logit_bias": {9: 100.0}},
        {"allowed_token_ids": (5, 6)},
        {"bad_words_token_ids": tuple((token,) for token in set(wanted))},
        {"stop_token_ids": tuple(set(wanted))},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 9.0},
        {"temperature": 5.0, "seed": 1},
        {"min_tokens": 8, "ignore_eos": False},
        {"logprobs": 5, "prompt_logprobs": 5},
        {"stop": ("a", "e"), "ignore_eos": False},
    ]
    for change in peculiar:
        odd: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **change}
        tokens(llm, [(prompt, SamplingParams(**odd))])
        assert tokens(llm, [(prompt, plain)]) == [wanted], change


def test_log_probabilities_are_those_of_the_own_row(llm: LLM) -> None:
    """Class 30: rows are neither shifted nor left over, also where only some requests ask for them."""
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    silent = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompts = [Prompt(token_ids=[20 + index, 30, 40]) for index in range(8)]
    each = [asked if index % 2 else silent for index in range(8)]
    alone = [llm.generate(prompt, params)[0].outputs[0] for prompt, params in zip(prompts, each, strict=True)]
    together = [result.outputs[0] for result in llm.generate(prompts, each)]
    for single, joint, params in zip(alone, together, each, strict=True):
        assert (joint.logprobs is None) == (params.logprobs is None)
        if single.logprobs is None or joint.logprobs is None:
            continue
        assert len(joint.logprobs) == len(joint.token_ids)
        for one, other in zip(single.logprobs, joint.logprobs, strict=True):
            for here, there in zip((one.chosen, *one.top), (other.chosen, *other.top), strict=True):
                assert here.token_id == there.token_id
                assert here.rank == there.rank
                assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
