"""Runs a workload through the offline engine and condenses repeats into medians with their range."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hardpoint import LLM
from hardpoint.interfaces import OutputKind, Prompt, RequestOutput, SamplingParams
from hardpoint_bench.workloads import Workload, make_prompts

__all__ = ["Figure", "Run", "condensed", "figures", "figures_of", "run_prompts", "run_workload"]


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
    """One repeat. ``ttft_s`` and ``decode_tokens_per_s`` are medians over its requests; ``seconds`` is wall time.

    ``num_cached_tokens`` is None where the engine does not tell.
    """

    seconds: float
    ttft_s: float
    decode_tokens_per_s: float | None
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int | None


def run_workload(llm: LLM, workload: Workload, seed: int) -> Run:
    """Raises what :func:`run_prompts` raises."""
    return run_prompts(llm, make_prompts(workload, llm.limits.vocab_size, seed), workload.output)


def run_prompts(llm: LLM, prompts: Sequence[Sequence[int]], output: int) -> Run:
    """Greedy, end-of-sequence ignored. Raises ``RuntimeError`` when a request yields fewer tokens than ``output``."""
    params = SamplingParams(
        temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, output_kind=OutputKind.FINAL_ONLY
    )
    asked = [Prompt(token_ids=ids) for ids in prompts]
    started = time.perf_counter()
    results = llm.generate(asked, params)
    return _condense(results, output, time.perf_counter() - started)


def _condense(results: Sequence[RequestOutput], output: int, seconds: float) -> Run:
    lengths = [len(result.outputs[0].token_ids) for result in results]
    if lengths != [output] * len(results):
        raise RuntimeError(f"wanted {output} tokens per request, got {sorted(set(lengths))}")
    metrics = [result.metrics for result in results if result.metrics is not None]
    first = [metric.ttft_s for metric in metrics if metric.ttft_s is not None]
    decode = [metric.decode_tokens_per_s for metric in metrics if metric.decode_tokens_per_s is not None]
    return Run(
        seconds=seconds,
        ttft_s=median(first) if first else seconds,
        decode_tokens_per_s=median(decode) if decode else None,
        num_output_tokens=sum(lengths),
        num_prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
        num_cached_tokens=sum(result.num_cached_tokens for result in results),
    )


def figures_of(run: Run) -> dict[str, float]:
    """Named figures of one repeat; rates are tokens per second."""
    named = {
        "wall_s": run.seconds,
        "ttft_s": run.ttft_s,
        "output_tokens_per_s": run.num_output_tokens / run.seconds,
        "prompt_tokens_per_s": run.num_prompt_tokens / run.seconds,
    }
    if run.num_cached_tokens is not None:
        named["cached_tokens"] = float(run.num_cached_tokens)
    if run.decode_tokens_per_s is not None:
        named["decode_tokens_per_s"] = run.decode_tokens_per_s
    return named


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Those of a workload's repeats."""
    return condensed([figures_of(run) for run in runs])


def condensed(repeats: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    """What all repeats tell, by name."""
    names = [name for name in repeats[0] if all(name in repeat for repeat in repeats)]
    return {name: Figure.of([repeat[name] for repeat in repeats]) for name in names}
