"""Every rule of the one validator, at its edges, with wrong types, and with random values."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.input_processor import InputProcessor
from hardpoint.engine.validation import (
    validate_batch,
    validate_options,
    validate_prompt,
    validate_sampling,
    validate_token_ids,
)
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import ModelLimits, OutputKind, Prompt, RequestOptions, SamplingParams
from hardpoint.testing import FakeTokenizer

LIMITS = ModelLimits(vocab_size=100, max_model_len=64, max_logprobs=5, max_n=8, max_prompts=16)
NAN, INF = math.nan, math.inf
TOO_BIG = 2**70


def refused(params: SamplingParams, prompt_len: int = 10, limits: ModelLimits = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate_sampling(params, prompt_len, limits)
    assert caught.value.status == 400
    assert caught.value.code
    return caught.value


BAD: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 9, 10**9, "2", 1.0, True, None)),
    *(("max_tokens", value) for value in (0, -5, 55, TOO_BIG, "5", 1.5)),
    *(("min_tokens", value) for value in (-1, 55, TOO_BIG, None, "1")),
    *(("temperature", value) for value in (-0.1, NAN, INF, -INF, 101.0, "1", None, (1,))),
    *(("top_p", value) for value in (0.0, -0.1, 1.1, NAN, "x")),
    *(("top_k", value) for value in (-1, TOO_BIG, 1.5, None)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, INF)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, 10.1, NAN, INF)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, TOO_BIG, 1.5, "7")),
    *(("stop", value) for value in (("",), ("x" * 513,), ("a",) * 17, (1,), 5, (None,), ("\ud800",))),
    *(("stop_token_ids", value) for value in ([-1], [100], [2**31], [TOO_BIG], ["a"], 5)),
    *(("allowed_token_ids", value) for value in ((-1,), (100,), (2**31,), (1.5,), tuple(range(100)) * 2)),
    *(("logit_bias", value) for value in ({-1: 1.0}, {100: 1.0}, {2**31: 0.0}, {1: NAN}, {1: 101.0}, {"1": 1.0}, [1])),
    *(("bad_words_token_ids", value) for value in (((-1,),), ((100,),), ((2**31,),), ((),), (5,))),
    *(("logprobs", value) for value in (-1, -2, 6, 10**6, "5", 1.5)),
    *(("prompt_logprobs", value) for value in (-1, -2, 6, 10**6)),
    *(("output_kind", value) for value in ("sometimes", 3)),
    *(("extensions", value) for value in ({"x": object()}, {"x": "y" * 70_000}, [1])),
    *(("detokenize", value) for value in ("yes", 1)),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:24])
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    error = refused(params)
    assert error.param == field
    assert field in str(error)
    assert "0x" not in str(error)


GOOD: list[dict[str, Any]] = [
    {"n": 8},
    {"max_tokens": 54},
    {"max_tokens": 1, "min_tokens": 1},
    {"min_tokens": 54},
    {"temperature": 0},
    {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "top_k": 2**31 - 1},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 10.0},
    {"seed": 2**63 - 1},
    {"seed": -(2**63)},
    {"stop": "text"},
    {"stop": ["a", "b"]},
    {"stop_token_ids": [0, 99], "allowed_token_ids": (0, 99), "logit_bias": {0: -100, 99: 100.0}},
    {"bad_words_token_ids": [[1, 2], [3]]},
    {"logprobs": 0, "prompt_logprobs": 5},
    {"extensions": {"grammar": {"kind": "json"}}},
]


@pytest.mark.parametrize("fields", GOOD, ids=lambda fields: ",".join(fields))
def test_edges_are_accepted_and_come_back_typed(fields: dict[str, Any]) -> None:
    checked = validate_sampling(SamplingParams(**fields), 10, LIMITS)
    assert checked.max_tokens == fields.get("max_tokens", 54)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(checked), type=SamplingParams) == checked


def test_a_single_stop_string_and_lists_become_tuples() -> None:
    checked = validate_sampling(SamplingParams(stop="ab", stop_token_ids=[3]), 1, LIMITS)  # type: ignore[arg-type]
    assert (checked.stop, checked.stop_token_ids) == (("ab",), (3,))


def test_greedy_sequences_would_all_be_equal() -> None:
    assert refused(SamplingParams(n=2, temperature=0.0)).param == "n"


def test_min_tokens_is_compared_after_defaults() -> None:
    """Class 28: an unset max_tokens must not skip the check."""
    assert refused(SamplingParams(min_tokens=10**6)).param == "min_tokens"


def test_lengths_over_the_context_name_both_numbers() -> None:
    error = refused(SamplingParams(max_tokens=60))
    assert error.code == "context_length_exceeded"
    assert "60" in str(error)
    assert "64" in str(error)


def test_stop_strings_need_text() -> None:
    assert refused(SamplingParams(stop=("a",), detokenize=False)).param == "stop"


def test_the_whole_vocabulary_of_logprobs_only_where_allowed() -> None:
    free = msgspec_limits(max_logprobs=-1)
    assert validate_sampling(SamplingParams(logprobs=-1), 1, free).logprobs == -1
    assert validate_sampling(SamplingParams(logprobs=100), 1, free).logprobs == 100
    assert refused(SamplingParams(logprobs=101), limits=free).param == "logprobs"


def msgspec_limits(**fields: Any) -> ModelLimits:
    return ModelLimits(**{"vocab_size": 100, "max_model_len": 64, **fields})


ENDLESS = 10**5000
"""More digits than Python is willing to print."""


@pytest.mark.parametrize(
    "value", [ENDLESS, -ENDLESS, "x" * 10_000, [ENDLESS]], ids=["endless", "negative", "text", "nested"]
)
@pytest.mark.parametrize("field", ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "temperature"])
def test_monstrous_values_make_short_messages(field: str, value: Any) -> None:
    error = refused(SamplingParams(**{field: value}))
    assert error.param == field
    assert len(str(error)) < 300


def test_monstrous_token_ids_and_options_make_short_messages() -> None:
    for fields in ({"stop_token_ids": [ENDLESS]}, {"logit_bias": {ENDLESS: 1.0}}, {"allowed_token_ids": [-ENDLESS]}):
        assert len(str(refused(SamplingParams(**fields)))) < 200
    for option in ({"priority": ENDLESS}, {"timeout_s": ENDLESS}, {"timeout_s": "x" * 10_000}):
        with pytest.raises(InvalidRequestError) as caught:
            validate_options(RequestOptions(**option))
        assert len(str(caught.value)) < 200
    with pytest.raises(InvalidRequestError):
        validate_token_ids([ENDLESS], LIMITS)
    with pytest.raises(InvalidRequestError):
        validate_batch(1, ENDLESS, LIMITS)


def test_params_of_another_type_are_refused() -> None:
    assert refused({"n": 1}).param == "params"  # type: ignore[arg-type]


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.integers(), st.floats(), max_size=3), st.binary(max_size=3), st.lists(st.text(), max_size=3),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), ANYTHING, max_size=6))
def test_nothing_but_invalid_request_errors_comes_out(fields: dict[str, Any]) -> None:
    try:
        checked = validate_sampling(SamplingParams(**fields), 3, LIMITS)
    except InvalidRequestError:
        return
    assert msgspec.convert(msgspec.to_builtins(checked, str_keys=False), SamplingParams) == checked
    assert 1 <= (checked.max_tokens or 0) <= 61
    assert isinstance(checked.output_kind, OutputKind)


BAD_IDS: list[tuple[Any, str]] = [
    ([], "empty_prompt"),
    ((), "empty_prompt"),
    (np.zeros(0, dtype=np.int32), "empty_prompt"),
    ([-1], "token_id_out_of_range"),
    ([100], "token_id_out_of_range"),
    ([1, 2**31], "token_id_out_of_range"),
    ([TOO_BIG], "invalid_type"),
    ([2**63], "token_id_out_of_range"),
    ([1.5], "invalid_type"),
    ([True, False], "invalid_type"),
    (["1"], "invalid_type"),
    ([[1], [2, 3]], "invalid_type"),
    ([[1, 2]], "invalid_type"),
    ([None], "invalid_type"),
    (5, "invalid_type"),
    (None, "invalid_type"),
    ("12", "invalid_value"),
    (b"12", "invalid_value"),
    ({1: 2}, "invalid_type"),
    ([1] * 64, "context_length_exceeded"),
]


@pytest.mark.parametrize(("ids", "code"), BAD_IDS, ids=lambda value: repr(value)[:24])
def test_bad_prompt_ids_are_refused(ids: Any, code: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate_token_ids(ids, LIMITS)
    assert (caught.value.param, caught.value.code) == ("prompt", code)


def test_a_prompt_may_fill_all_but_one_token_of_the_context() -> None:
    ids = validate_token_ids([0, 99, *[1] * 61], LIMITS)
    assert (len(ids), ids.dtype.name) == (63, "int32")
    with pytest.raises(InvalidRequestError, match=r"64 tokens.*64 tokens"):
        validate_token_ids([1] * 64, LIMITS)


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("text", "prompt"),
    (None, "prompt"),
    (Prompt(), "prompt"),
    (Prompt(text="a", token_ids=[1]), "prompt"),
    (Prompt(text=""), "prompt"),
    (Prompt(text=7), "prompt"),  # type: ignore[arg-type]
    (Prompt(text="\udfff"), "prompt"),
    (Prompt(text="x" * (64 * 64 + 1)), "prompt"),
    *((Prompt(text="a", cache_salt=salt), "cache_salt") for salt in ("", "a/b", "a" * 129, "x" * 4096, "ä", "a\n", 5)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS, ids=lambda value: repr(value)[:40])
def test_bad_prompts_are_refused(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate_prompt(prompt, LIMITS)
    assert caught.value.param == param


def test_a_text_far_beyond_the_context_is_refused_with_both_numbers() -> None:
    validate_prompt(Prompt(text="x" * 4096), LIMITS)
    with pytest.raises(InvalidRequestError, match="4097 characters; at most 4096") as caught:
        validate_prompt(Prompt(text="x" * 4097), LIMITS)
    assert caught.value.code == "context_length_exceeded"


BAD_OPTIONS: list[tuple[str, Any]] = [
    *(("priority", value) for value in (2**31, -(2**31), TOO_BIG, 1.5, "1", True, None)),
    *(("timeout_s", value) for value in (0, -1.0, NAN, INF, 86_401, "5", True)),
    *(("tenant", value) for value in ("a/b", "x" * 129, 5, None)),
    *(("external_id", value) for value in ("x" * 257, 5, "\ud800")),
    ("adapter", "mine"),
    ("extensions", {"a": 1}),
]


@pytest.mark.parametrize(("field", "value"), BAD_OPTIONS, ids=lambda value: repr(value)[:24])
def test_bad_options_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate_options(RequestOptions(**{field: value}))
    assert caught.value.param == field


def test_sequences_of_one_call_are_capped_in_total() -> None:
    """Class 27."""
    validate_batch(2, 8, LIMITS)
    for prompts, n in ((0, 1), (17, 1), (10**5, 1), (1, 9), (1, 10**9), (3, 8)):
        with pytest.raises(InvalidRequestError):
            validate_batch(prompts, n, LIMITS)


@pytest.fixture
def processor() -> InputProcessor:
    limits = ModelLimits(vocab_size=300, max_model_len=64)
    return InputProcessor(FakeTokenizer(), limits, eos_token_ids=(2,), clock=lambda: 100.0)


def test_one_sequence_keeps_the_request_id(processor: InputProcessor) -> None:
    options = RequestOptions(priority=3, timeout_s=5.0, tenant="t")
    done = processor.process(Prompt(text="ab", cache_salt="s"), SamplingParams(), options)
    (request,) = done.requests
    assert request.request_id == done.request_id
    assert request.prompt_token_ids.tolist() == list(done.prompt_token_ids) == [1, 100, 101]
    assert (request.deadline, request.priority, request.tenant, request.cache_salt) == (105.0, 3, "t", "t/s")
    assert (request.eos_token_ids, request.sampling.max_tokens, request.arrival_time) == ((2,), 61, 100.0)


def test_each_sequence_has_its_own_id_and_seed(processor: InputProcessor) -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=1)
    done = processor.process(Prompt(token_ids=[5, 6]), params)
    assert [r.request_id for r in done.requests] == [f"{done.request_id}-{i}" for i in range(3)]
    assert [r.sampling.seed for r in done.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [r.sampling.n for r in done.requests] == [1, 1, 1]
    assert [r.sampling.prompt_logprobs for r in done.requests] == [1, None, None]
    assert done.prompt_text is None


def test_tenants_never_share_a_prefix(processor: InputProcessor) -> None:
    """Class 45: whatever salts they choose."""

    def salt(tenant: str, salt: str | None) -> str | None:
        prompt = Prompt(text="a", cache_salt=salt)
        return processor.process(prompt, SamplingParams(), RequestOptions(tenant=tenant)).requests[0].cache_salt

    assert salt("", None) is None
    assert salt("", "s") == "s"
    salts = [salt("a", None), salt("b", None), salt("a", "b"), salt("a:b", None), salt("a", "s"), salt("", "a")]
    assert len(set(salts)) == len(salts)


def test_a_clients_own_id_is_never_the_engines(processor: InputProcessor) -> None:
    """Class 44."""
    options = RequestOptions(external_id="mine")
    ids = {processor.process(Prompt(text="a"), SamplingParams(), options).request_id for _ in range(50)}
    assert len(ids) == 50
    assert "mine" not in ids


def test_a_model_that_does_not_generate_says_what_it_does() -> None:
    """R2.6: before any tokenizing."""
    processor = InputProcessor(FakeTokenizer(), LIMITS, tasks=("embed", "score"))
    with pytest.raises(InvalidRequestError, match="embed, score"):
        processor.process(Prompt(text="a"), SamplingParams())


def test_too_many_ids_are_refused_by_their_number_alone() -> None:
    """Converting them first would take time in proportion to the body."""
    with pytest.raises(InvalidRequestError) as caught:
        validate_token_ids([object()] * LIMITS.max_model_len, LIMITS)
    assert caught.value.code == "context_length_exceeded"
