"""One offline engine over a tiny model for each file, and what must be true of it after anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hardpoint import LLM
from tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Four slots and steps of 48 tokens: batches queue, prompts are computed in parts, slots are used again."""
    model = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(
        str(model), dtype="float32", max_num_seqs=4, max_num_batched_tokens=48, num_kv_blocks=160, block_size=16
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def blocks_are_free_afterwards(llm: LLM) -> Iterator[None]:
    yield
    stats = llm.core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_total_blocks
