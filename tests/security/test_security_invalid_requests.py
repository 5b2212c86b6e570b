"""Unusable requests from Python: refused by name before anything runs, and the engine answers on as before.

SECURITY-AND-FAULTS classes 27 to 31 and 33; the HTTP routes are held to the same validator elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from hardpoint import LLM, Prompt, RequestOptions, SamplingParams
from hardpoint.errors import InvalidRequestError

VOCAB_SIZE = 260
MAX_MODEL_LEN = 512
INF, NAN = float("inf"), float("nan")
CONTROL = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OUTSIDE = (-1, VOCAB_SIZE, 2**31, 2**70)

BAD_PARAMS: list[tuple[str, Any]] = [
    # Class 27: counts are capped before anything is built for them.
    *(("n", value) for value in (0, -1, 129, 10**9, 10**30, 1.5, True, "2", None)),
    # Class 28: lengths are compared after defaults are filled in.
    *(("max_tokens", value) for value in (0, -1, MAX_MODEL_LEN, 10**9, 2**70, 1.5, "5")),
    *(("min_tokens", value) for value in (-1, 10**9, 2**70, MAX_MODEL_LEN, None)),
    # Class 29: ids outside the vocabulary, in every field that takes ids.
    *((field, (value,)) for field in ("stop_token_ids", "allowed_token_ids") for value in OUTSIDE),
    *(("bad_words_token_ids", ((3, value),)) for value in OUTSIDE),
    *(("logit_bias", {value: 1.0}) for value in OUTSIDE),
    *(("stop_token_ids", value) for value in ("3", 3, (None,), (1.5,), tuple(range(VOCAB_SIZE)) * 2)),
    ("bad_words_token_ids", ((),)),
    *(("logit_bias", {3: value}) for value in (100.5, -101, INF, NAN, "x", None)),
    # Class 30: one validator for both kinds of log-probabilities.
    *((field, value) for field in ("logprobs", "prompt_logprobs") for value in (-1, -2, 21, 10**6, 2**70, "5", 1.5)),
    # Numbers out of range, no numbers, and of other types.
    *(("temperature", value) for value in (-0.1, 100.5, INF, -INF, NAN, "hot", None)),
    *(("top_p", value) for value in (0.0, -0.5, 1.01, NAN, "x")),
    *(("top_k", value) for value in (-1, 2**31, 2**70, 1.5)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *((field, value) for field in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, NAN, INF)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, 10.5, NAN)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 2**80, 1.5, "x")),
    *(("stop", value) for value in (("",), ("x",) * 17, ("x" * 513,), (1,), 5, ("\ud800",))),
    ("ignore_eos", "no"),
    ("detokenize", 2),
    *(("extensions", value) for value in ({"x": object()}, {"x": "y" * 70_000}, {1: 2}, [1], {"x": 2**70})),
]


@pytest.fixture(scope="module")
def control_tokens(llm: LLM) -> tuple[int, ...]:
    return tokens_of_control(llm)


def tokens_of_control(llm: LLM) -> tuple[int, ...]:
    return tuple(llm.generate("the control request", CONTROL)[0].outputs[0].token_ids)


def readable(part: object) -> str:
    """A test id that is the same in every process: addresses in it would not be."""
    return re.sub(r"0x[0-9a-f]+", "0x", repr(part))[:30]


def require_refused(llm: LLM, param: str, *arguments: Any, **options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(*arguments, **options)
    error = caught.value
    assert error.param == param, error
    assert error.status == 400
    assert error.code
    assert "0x" not in str(error)
    assert len(str(error)) < 500
    assert llm.core.scheduler.stats().num_running == 0
    return error


@pytest.mark.parametrize(("field", "value"), BAD_PARAMS, ids=readable)
def test_a_bad_sampling_value_is_refused_by_name_and_harms_nobody(
    llm: LLM, control_tokens: tuple[int, ...], field: str, value: Any
) -> None:
    params = SamplingParams(**{field: value})
    require_refused(llm, field, "Hello", params)
    # One bad request among good ones: none of them runs.
    require_refused(llm, field, ["Hello", "there"], [CONTROL, params])
    assert tokens_of_control(llm) == control_tokens


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        # Class 31.
        ("", "empty_prompt"),
        ([[]], "empty_prompt"),
        (Prompt(), None),
        (Prompt(text="a", token_ids=[3]), None),
        # Class 29 in the prompt.
        *(([[3, value]], None) for value in OUTSIDE),
        ([[3, 1.5]], None),
        ([["x"]], None),
        ([[[3]]], None),
        (Prompt(token_ids="abc"), None),  # type: ignore[arg-type]
        (Prompt(text=5), None),  # type: ignore[arg-type]
        (Prompt(text="\ud800"), None),
        ([[3] * MAX_MODEL_LEN], "context_length_exceeded"),
        ("x" * MAX_MODEL_LEN, "context_length_exceeded"),
        ("x" * 10**6, "context_length_exceeded"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_a_bad_prompt_is_refused(llm: LLM, control_tokens: tuple[int, ...], prompt: Any, code: str | None) -> None:
    error = require_refused(llm, "prompt", prompt, CONTROL)
    assert code is None or error.code == code
    assert tokens_of_control(llm) == control_tokens


@pytest.mark.parametrize(
    "salt", ["", "x" * 129, "x" * 4096, "../../etc/passwd", "a/b", "a b", "a\nb", "a\0b", "ключ", 5, b"x"], ids=repr
)
def test_a_loose_cache_salt_is_refused(llm: LLM, salt: Any) -> None:
    """Class 33."""
    require_refused(llm, "cache_salt", Prompt(text="Hello", cache_salt=salt), CONTROL)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("priority", value) for value in (2**31, -(2**31), 1.5, "high", None, True)),
        *(("timeout_s", value) for value in (0, -1, NAN, INF, 10**9, "soon", True)),
        *(("tenant", value) for value in ("a/b", "x" * 129, 5)),
        *(("external_id", value) for value in ("x" * 257, 5)),
        ("adapter", "none such"),
        ("extensions", {"x": 1}),
    ],
    ids=lambda part: repr(part)[:30],
)
def test_bad_options_are_refused(llm: LLM, field: str, value: Any) -> None:
    require_refused(llm, field, "Hello", CONTROL, options=RequestOptions(**{field: value}))


@pytest.mark.parametrize("params", [5, "greedy", {"max_tokens": 5}], ids=repr)
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    require_refused(llm, "params", ["Hello"], [params])


def test_as_many_params_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="1 params for 2 prompts"):
        llm.generate(["a", "b"], [CONTROL])


def test_greedy_copies_are_refused(llm: LLM) -> None:
    require_refused(llm, "n", "Hello", SamplingParams(n=2, temperature=0.0))


def test_stop_strings_without_text_are_refused(llm: LLM) -> None:
    require_refused(llm, "stop", "Hello", SamplingParams(stop=("x",), detokenize=False))


def test_a_minimum_above_the_maximum_is_refused(llm: LLM) -> None:
    """Class 28: also where the maximum is left open and follows from the context."""
    require_refused(llm, "min_tokens", "Hello", SamplingParams(max_tokens=4, min_tokens=5))
    require_refused(llm, "min_tokens", "Hello", SamplingParams(max_tokens=None, min_tokens=MAX_MODEL_LEN - 4))


def test_the_limits_themselves_are_allowed(llm: LLM) -> None:
    edge = SamplingParams(
        max_tokens=1, logprobs=20, prompt_logprobs=20, stop_token_ids=(0, VOCAB_SIZE - 1), top_k=2**31 - 1,
        logit_bias={0: 100.0, VOCAB_SIZE - 1: -100.0}, min_p=1.0, seed=-(2**63), temperature=100.0,
        stop=("x" * 512,) * 16, repetition_penalty=10.0, presence_penalty=2.0, frequency_penalty=-2.0,
    )  # fmt: skip
    prompt = Prompt(token_ids=[VOCAB_SIZE - 1] * (MAX_MODEL_LEN - 1), cache_salt="a" * 128)
    (result,) = llm.generate(prompt, edge)
    assert len(result.outputs[0].token_ids) == 1
    (copies,) = llm.generate("Hello", SamplingParams(n=16, max_tokens=2, seed=1))
    assert len(copies.outputs) == 16


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([5], "messages[0]"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_bad_messages_are_refused(llm: LLM, messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.render_chat(messages)
    assert caught.value.param == param
