"""A real file with blocks of several sizes (Q4_K, Q6_K, Q5_0, Q8_0), shared out between processes."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint_model_io.sources.package import PackageSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "gemma3-270m"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 64, "max_num_seqs": 3,
                            "num_kv_blocks": 200, "quantization": "gguf",
                            "plugins": {"quantization": {"gguf": {"activations": "float"}}}}  # fmt: skip
"""Activations that are rounded turn the last digits of a sum into steps."""
PROMPTS = ["The capital of France is", "def add(a, b):\n    return", "Once upon a time there was a"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)


def answers(**settings: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens of each prompt, and how likely each one was."""
    with LLM(MODEL, **SETTINGS, **settings) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    found = []
    for output in outputs:
        assert output.logprobs is not None
        found.append((list(output.token_ids), [one.chosen.logprob for one in output.logprobs]))
    return found


@pytest.mark.skipif(MODEL not in PackageSource().known_names(), reason=f"the package of {MODEL} is not installed")
def test_two_processes_say_what_one_does() -> None:
    """One head of keys for both; 640 weights of a row are no multiple of 256, but those of what is shared out are."""
    whole, shared = answers(), answers(tensor_parallel_size=2, executor="multiproc")
    for (tokens, likely), (expected, wanted) in zip(shared, whole, strict=True):
        assert tokens == expected
        assert likely == pytest.approx(wanted, abs=1e-3)
