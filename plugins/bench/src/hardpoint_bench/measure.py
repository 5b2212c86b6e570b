"""Runs a workload through the offline engine and condenses repeats into medians with their range."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hardpoint import LLM
from hardpoint.interfaces import OutputKind, Prompt, RequestOutput, SamplingParams
from hardpoint_bench.workloads import Workload, make_prompts

__all__ = ["Figure", "Run", "figures", "run_workload"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Median, smallest and largest value over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat. ``ttft_s`` and ``decode_tokens_per_s`` are medians over its requests; ``seconds`` is wall time."""

    seconds: float
    ttft_s: float
    decode_tokens_per_s: float | None
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int


def run_workload(llm: LLM, workload: Workload, seed: int) -> Run:
    """Greedy, end-of-sequence ignored. Raises ``RuntimeError`` when a request yields fewer tokens than asked."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=workload.output,
        ignore_eos=True,
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )
    prompts = [Prompt(token_ids=ids) for ids in make_prompts(workload, llm.limits.vocab_size, seed)]
    started = time.perf_counter()
    results = llm.generate(prompts, params)
    return _condense(workload, results, time.perf_counter() - started)


def _condense(workload: Workload, results: Sequence[RequestOutput], seconds: float) -> Run:
    lengths = [len(result.outputs[0].token_ids) for result in results]
    if lengths != [workload.output] * workload.num_requests:
        raise RuntimeError(f"workload {workload.name}: wanted {workload.output} tokens per request, got {lengths}")
    metrics = [result.metrics for result in results if result.metrics is not None]
    first = [metric.ttft_s for metric in metrics if metric.ttft_s is not None]
    decode = [metric.decode_tokens_per_s for metric in metrics if metric.decode_tokens_per_s is not None]
    return Run(
        seconds=seconds,
        ttft_s=median(first) if first else seconds,
        decode_tokens_per_s=median(decode) if decode else None,
        num_output_tokens=sum(lengths),
        num_prompt_tokens=workload.prompt_length * workload.num_requests,
        num_cached_tokens=sum(result.num_cached_tokens for result in results),
    )


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Named figures of a workload's repeats; rates are tokens per second."""
    named = {
        "wall_s": Figure.of([run.seconds for run in runs]),
        "ttft_s": Figure.of([run.ttft_s for run in runs]),
        "output_tokens_per_s": Figure.of([run.num_output_tokens / run.seconds for run in runs]),
        "prompt_tokens_per_s": Figure.of([run.num_prompt_tokens / run.seconds for run in runs]),
        "cached_tokens": Figure.of([float(run.num_cached_tokens) for run in runs]),
    }
    decode = [run.decode_tokens_per_s for run in runs if run.decode_tokens_per_s is not None]
    if decode:
        named["decode_tokens_per_s"] = Figure.of(decode)
    return named
