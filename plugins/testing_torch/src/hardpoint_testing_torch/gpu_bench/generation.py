"""Whole requests through the engine: tokens per second by attention backend, with and without captured graphs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint import LLM, SamplingParams
from hardpoint.errors import HardpointError
from hardpoint_testing_torch.gpu_bench.records import Generation, Scale, Skipped

__all__ = ["SETTINGS", "measure_generation"]

PLAIN = "torch_reference"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"attention_backend": PLAIN},
    "the platform's choice": {},
    "the platform's choice, graphs": {"plugins": {"worker": {"torch": {"graph_backend": "cuda_graphs"}}}},
}
"""The plain attention comes first: the others are compared with it."""


def measure_generation(
    model: str, scale: Scale, settings: Mapping[str, Mapping[str, Any]] = SETTINGS, **common: Any
) -> tuple[list[Generation], list[Skipped]]:
    """Greedy answers of ``scale.answer`` tokens, in batches of each of ``scale.batches`` requests."""
    rows: list[Generation] = []
    skipped: list[Skipped] = []
    wanted: dict[int, list[list[int]]] = {}
    for name, chosen in settings.items():
        try:
            with LLM(model, **{**common, **chosen}) as llm:
                for size in scale.batches:
                    answers, seconds = _answer(llm, size, scale.answer)
                    agrees = _agree(wanted.setdefault(size, answers), answers)
                    tokens = sum(map(len, answers))
                    rows.append(
                        Generation(setting=name, num_requests=size, tokens_per_s=tokens / seconds, agrees=agrees)
                    )
        except (HardpointError, RuntimeError) as fault:
            skipped.append(Skipped(name=f"generation with {name}", reason=f"{type(fault).__name__}: {fault}"))
    return rows, skipped


def _answer(llm: LLM, size: int, length: int) -> tuple[list[list[int]], float]:
    prompts = [f"Tell me about the number {number}." for number in range(size)]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    llm.generate(prompts[:1], params)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def _agree(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> bool:
    """Kernels round differently: a tie may fall the other way late in an answer, and all that follows with it."""
    halves = [
        (list(one)[: len(one) // 2], list(other)[: len(one) // 2]) for one, other in zip(wanted, found, strict=True)
    ]
    return all(one == other for one, other in halves)
