"""A real model with a KV cache of eight-bit keys and values says what it says with a cache of full width."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = ["The capital of France is", "Water boils at"]


def answers(kv_cache_dtype: str, **settings: Any) -> list[list[int]]:
    with LLM(
        "smollm2",
        dtype="float32",
        attention_backend="torch_reference",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=128,
        num_kv_blocks=64,
        **settings,
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        return [list(output.outputs[0].token_ids) for output in outputs]


def test_narrow_caches_change_no_word() -> None:
    """R5.11, R5.43: scales of a layer, which nobody calibrated here, and scales of every head and token."""
    expected = answers("auto")
    assert answers("fp8") == expected
    assert answers("int8_per_token_head") == expected


def test_the_order_of_steps_changes_no_word() -> None:
    """I5.2: what a prompt's tokens see of one another comes out of the cache, whole or in chunks."""
    assert answers("fp8", max_num_batched_tokens=2) == answers("fp8", max_num_batched_tokens=64)
