"""``--batch-invariant`` end to end: tokens and log-probabilities of a request, bit for bit, whatever surrounds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError
from hardpoint.interfaces import RequestOutput
from hardpoint_testing_torch import make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer
from model_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: Mapping[str, Any] = {"dtype": "float32", "batch_invariant": True, "num_kv_blocks": 256, "block_size": 16}
LENGTHS, OUTPUTS = (40, 3, 75, 17, 33, 64, 5, 90), (12, 3, 8, 15, 5, 10, 9, 4)
"""Of the requests of one batch: they join as room allows, and leave at different times."""
CHUNKS = (1, 7, 64, 512)
LLAMA = "LlamaForCausalLM"
CASES_OF_METHODS = (
    *((architecture, None) for architecture in (LLAMA, "Qwen3ForCausalLM", "Gemma3ForCausalLM")),
    *((LLAMA, method) for method in ("int8", "int4")),
)

Seen = tuple[tuple[int, ...], str]


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    plain = {case.architecture: case.config for case in CASES if case.name == "plain"}
    folders = {}
    for architecture in (*dict(CASES_OF_METHODS), "MixtralForCausalLM"):
        folders[architecture] = folder = tmp_path_factory.mktemp(architecture) / "model"
        # Heads of a size that the kernels take.
        tiny = make_tiny_model(architecture, folder, **{**plain.get(architecture, {}), "head_dim": 16})
        write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return folders


def prompts(vocab_size: int) -> list[list[int]]:
    """Of :data:`LENGTHS`; the last shares its beginning with the third, so that a prefix is found within the batch."""
    made = [[(7 * i * i + 11 * i + 13 * n) % vocab_size for i in range(n)] for n in LENGTHS]
    made[-1][:48] = made[2][:48]
    return made


def seen(outputs: Sequence[RequestOutput]) -> list[Seen]:
    """Tokens, and the log-probabilities of the best three at every place with all their digits."""
    return [(tuple(one.outputs[0].token_ids), repr(one.outputs[0].logprobs)) for one in outputs]


def runs(llm: LLM, first: int = 0) -> Iterator[tuple[str, list[Seen]]]:
    """Every request alone, again with its prefix found, and all of them in one batch, with and without prefixes; those
    from ``first`` on."""
    asked = prompts(llm.limits.vocab_size)[first:]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=3) for n in OUTPUTS[first:]]
    llm.reset_prefix_cache()
    yield "alone", [seen(llm.generate([one], how))[0] for one, how in zip(asked, params, strict=True)]
    yield "alone, prefix found", [seen(llm.generate([one], how))[0] for one, how in zip(asked, params, strict=True)]
    yield "together, prefix found", seen(llm.generate(asked, params))
    llm.reset_prefix_cache()
    yield "together", seen(llm.generate(asked, params))


def expect_equal_runs(model: str, settings: Mapping[str, Any], chunks: Sequence[int], first: int = 0) -> None:
    expected: list[Seen] | None = None
    for chunk in chunks:
        limits = {"max_num_batched_tokens": max(chunk, 8), "max_num_seqs": 8, "long_prefill_threshold": chunk}
        with LLM(model, **{**SETTINGS, **limits, **settings}) as llm:
            for name, found in runs(llm, first):
                expected = expected or found
                for index, (one, other) in enumerate(zip(found, expected, strict=True)):
                    assert one == other, f"request {index} of {name}, chunks of {chunk}"


@pytest.mark.parametrize(("architecture", "method"), CASES_OF_METHODS)
def test_a_request_has_the_same_bits_whatever_surrounds_it(
    tiny_models: Mapping[str, Path], architecture: str, method: str | None
) -> None:
    """Alone, among seven others that join and leave, in chunks of any size, and behind a prefix that was found."""
    chunks = CHUNKS if method is None else (7, 512)
    expect_equal_runs(str(tiny_models[architecture]), {"quantization": method, "max_model_len": 128}, chunks)


@pytest.mark.parametrize("method", [None, "gguf"])
def test_a_real_model_has_the_same_bits_whatever_surrounds_it(method: str | None) -> None:
    expect_equal_runs("smollm2", {"quantization": method, "max_model_len": 256}, (7, 512), first=4)


def test_requests_that_join_and_leave_change_nothing(tiny_models: Mapping[str, Path]) -> None:
    """Room for three: each of the others begins when one ends, in the middle of everybody else's tokens."""
    settings = {**SETTINGS, "max_model_len": 128}
    with LLM(str(tiny_models[LLAMA]), max_num_seqs=8, **settings) as llm:
        expected = dict(runs(llm))["together"]
    with LLM(str(tiny_models[LLAMA]), max_num_seqs=3, max_num_batched_tokens=16, **settings) as llm:
        assert dict(runs(llm)) == dict.fromkeys(
            ("alone", "alone, prefix found", "together, prefix found", "together"), expected
        )


@pytest.mark.parametrize(
    ("architecture", "settings", "told"),
    [
        (LLAMA, {"compiler": "none"}, "rounds by the number of rows"),
        (LLAMA, {"attention_backend": "torch_reference"}, "torch_reference"),
        ("MixtralForCausalLM", {}, "no kernel that keeps rows apart"),
    ],
)
def test_what_cannot_keep_the_promise_does_not_start(
    tiny_models: Mapping[str, Path], architecture: str, settings: Mapping[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match="batch.invarian") as raised:
        LLM(str(tiny_models[architecture]), **{**SETTINGS, "max_model_len": 128, **settings})
    assert told in str(raised.value)
