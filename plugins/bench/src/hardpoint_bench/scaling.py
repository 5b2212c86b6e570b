"""How speed depends on batch, context, prompt length and threads, and where the time goes at three points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hardpoint.config import AppConfig
from hardpoint_bench.measure import Figure
from hardpoint_bench.peers import OURS
from hardpoint_bench.profile import kernel_share, shares
from hardpoint_bench.sides import Program, Side
from hardpoint_bench.workloads import Workload, make_prompts

__all__ = ["BATCHES", "CONTEXTS", "PROFILED", "Scaling", "thread_counts"]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
_BATCH_PROMPT = 16
_OUTPUT = 32
_THREADED = Workload("threads", "", 8, 0, 128, 32)
PROFILED: Mapping[str, Workload] = {
    "decode, batch 1": Workload("decode, batch 1", "", 1, 0, 128, 128),
    "decode, batch 32": Workload("decode, batch 32", "", 32, 0, 128, 128),
    "prefill of 1,024 tokens": Workload("prefill", "", 1, 0, 1024, 1),
}
"""Those that decode run on prompts that are cached already: their first step is short and like the others."""
_SAMPLE_EVERY_S = 0.0005
_SEEDS_APART = 10_007

Row = dict[str, Any]


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 and so on, and ``most``."""
    return sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most})


@dataclass(slots=True)
class Scaling:
    """Our side alone, in a process for each number of threads. ``shrink`` divides sizes, for trying out."""

    config: AppConfig
    repeats: int
    seed: int
    threads: int
    shrink: int = 1
    ours: Program = OURS
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    _next_seed: int = 0

    def run(self) -> Row:
        """Plain data. Figures are medians with their range over the repeats, times in seconds."""
        with self._side(self.threads) as side:
            batches = [Workload("batch", "", n, 0, _BATCH_PROMPT, _OUTPUT) for n in self._sizes(BATCHES)]
            longest = side.facts["max_model_len"] - _OUTPUT
            contexts = sorted({min(length, longest) for length in self._sizes(CONTEXTS)})
            found: Row = {
                "precision": side.facts["precision"],
                "repeats": self.repeats,
                "output_len": _OUTPUT,
                "batch_prompt_len": _BATCH_PROMPT,
                "batch": self._sweep(side, batches, "num_requests"),
                "context": self._sweep(
                    side, [Workload("context", "", 1, 0, length, _OUTPUT) for length in contexts], "prompt_length"
                ),
                "profiles": {name: self._profile(side, one) for name, one in PROFILED.items()},
            }
        found["threads"] = [self._with_threads(count) for count in thread_counts(self.threads)]
        return found

    def _sizes(self, values: Iterable[int]) -> list[int]:
        return sorted({max(1, value // self.shrink) for value in values})

    def _side(self, threads: int) -> Side:
        engines = {
            name: engine.model_copy(
                update={"scheduler": engine.scheduler.model_copy(update={"max_num_seqs": max(self._sizes(BATCHES))})}
            )
            for name, engine in self.config.engines.items()
        }
        config = self.config.model_copy(update={"engines": engines})
        return Side(self.ours, {"config": config.model_dump(mode="json")}, threads=threads)

    def _sweep(self, side: Side, workloads: Sequence[Workload], size: str) -> list[Row]:
        """Once unmeasured, then all sizes in turn in each repeat: a machine that gets busy slows all of them."""
        measured: dict[int, list[Mapping[str, float]]] = {at: [] for at in range(len(workloads))}
        for repeat in range(self.repeats + 1):
            self.tell(f"scaling, {workloads[0].name}: run {repeat} of {self.repeats}")
            for at, workload in enumerate(workloads):
                result = side.run(self._prompts(side, workload), workload.output)
                if repeat:
                    measured[at].append(result.figures)
        return [{size: getattr(workload, size), **_condensed(measured[at])} for at, workload in enumerate(workloads)]

    def _with_threads(self, count: int) -> Row:
        with self._side(count) as side:
            workload = self._shrunk(_THREADED)
            (row,) = self._sweep(side, [workload], "num_requests")
            (single,) = self._sweep(
                side, [Workload("threads", "", 1, 0, workload.own, workload.output)], "num_requests"
            )
            return {"threads": count, "batch": row, "single": single}

    def _profile(self, side: Side, workload: Workload) -> Row:
        self.tell(f"scaling, profile: {workload.name}")
        workload = self._shrunk(workload)
        prompts = self._prompts(side, workload)
        if workload.output > 1:
            side.run(prompts, workload.output)
        result = side.run(prompts, workload.output, sample_every_s=_SAMPLE_EVERY_S)
        groups = shares(result.stacks)
        return {"seconds": result.run.seconds, "groups": groups, "kernels": kernel_share(groups)}

    def _shrunk(self, workload: Workload) -> Workload:
        by = self.shrink
        return Workload(
            workload.name, "", max(1, workload.num_requests // by), 0, max(2, workload.own // by),
            max(min(workload.output, 2), workload.output // by),
        )  # fmt: skip

    def _prompts(self, side: Side, workload: Workload) -> list[list[int]]:
        """Ids of their own for every run."""
        self._next_seed += 1
        return make_prompts(workload, side.facts["vocab_size"], self.seed * _SEEDS_APART + self._next_seed)


def _condensed(runs: Sequence[Mapping[str, float]]) -> Row:
    """``step_s`` is the time between two tokens of a sequence."""
    rates = [run["decode_tokens_per_s"] for run in runs]
    named = {
        "output_tokens_per_s": [run["output_tokens_per_s"] for run in runs],
        "prompt_tokens_per_s": [run["prompt_tokens_per_s"] for run in runs],
        "ttft_s": [run["ttft_s"] for run in runs],
        "decode_tokens_per_s": rates,
        "step_s": [1 / rate for rate in rates],
    }
    return {name: asdict(Figure.of(values)) for name, values in named.items()}
