"""The standard workloads: fixed shapes of random ids, so that figures compare across engines and days."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["BY_COMMAND", "WORKLOADS", "Workload", "make_prompts"]


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_requests`` prompts of ``shared`` common and ``own`` further tokens, each answered by ``output`` tokens."""

    name: str
    description: str
    num_requests: int
    shared: int
    own: int
    output: int

    @property
    def prompt_length(self) -> int:
        return self.shared + self.own


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("single", "one 128-token prompt, 128 outputs", 1, 0, 128, 128),
        Workload("batch", "32 prompts of 128 tokens, 128 outputs each", 32, 0, 128, 128),
        Workload("prefill", "one 1,024-token prompt, 1 output", 1, 0, 1024, 1),
        Workload("prefix", "16 prompts sharing 768 tokens plus 32 own, 16 outputs each", 16, 768, 32, 16),
    )
}


BY_COMMAND: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        replace(WORKLOADS["single"], name="latency"),
        replace(WORKLOADS["batch"], name="throughput"),
        WORKLOADS["prefill"],
        WORKLOADS["prefix"],
        Workload("startup", "process start to the first token of one 128-token prompt", 1, 0, 128, 1),
    )
}
"""``hardpoint bench NAME MODEL``."""


def make_prompts(workload: Workload, vocab_size: int, seed: int, first_id: int = 1000) -> list[list[int]]:
    """Random ids in ``[first_id, vocab_size)``; another ``seed`` gives fresh ids, so that no repeat hits a cache."""
    low = first_id if vocab_size > 2 * first_id else 0
    source = random.Random(seed)
    draw = range(low, vocab_size)
    shared = source.choices(draw, k=workload.shared)
    return [shared + source.choices(draw, k=workload.own) for _ in range(workload.num_requests)]
