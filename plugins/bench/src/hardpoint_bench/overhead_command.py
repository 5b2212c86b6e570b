"""``hardpoint bench overhead MODEL``: what a decode step takes inside and outside kernels, alone and in a batch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hardpoint.config import AppConfig
from hardpoint_bench.measure import Figure
from hardpoint_bench.model_report import aligned
from hardpoint_bench.peers import OURS
from hardpoint_bench.profile import GROUPS, kernel_share, shares
from hardpoint_bench.sides import Program, Side
from hardpoint_bench.suite_command import config_of, facts_of, known_values
from hardpoint_bench.workloads import Workload, make_prompts

__all__ = ["TARGETS", "Overhead", "overhead_table", "run_overhead"]

TARGETS = {1: 0.15, 32: 0.05}
"""By requests that decode together: the most of a step that may be spent outside kernels."""
_PROMPT, _OUTPUT = 128, 128
_REPEATS = 5
_SAMPLE_EVERY_S = 0.0005

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Our side alone, sampled while it decodes. ``shrink`` divides the outputs, for trying out.

    A run repeats prompts that are cached already, so that all of its steps are alike.
    """

    config: AppConfig
    repeats: int
    seed: int
    threads: int
    shrink: int = 1
    ours: Program = OURS
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr)

    def run(self) -> Row:
        """Plain data: per batch the microseconds of a step, in all, ``inside`` and ``outside`` kernels, and of what is
        outside the parts by name; medians with their range over the repeats."""
        with Side(self.ours, {"config": self._roomy().model_dump(mode="json")}, threads=self.threads) as side:
            rows = [self._measure(side, batch) for batch in TARGETS]
            return {"precision": side.facts["precision"], "threads": self.threads, "batches": rows}

    def _roomy(self) -> AppConfig:
        """The configuration with places for all requests of the largest batch."""
        most = max(TARGETS)
        engines = {
            name: engine.model_copy(update={"scheduler": engine.scheduler.model_copy(update={"max_num_seqs": most})})
            for name, engine in self.config.engines.items()
        }
        return self.config.model_copy(update={"engines": engines})

    def _measure(self, side: Side, batch: int) -> Row:
        output = max(2, _OUTPUT // self.shrink)
        workload = Workload("overhead", "", batch, 0, _PROMPT, output)
        prompts = make_prompts(workload, side.facts["vocab_size"], self.seed + batch)
        side.run(prompts, output)
        steps: list[float] = []
        found: list[dict[str, float]] = []
        for repeat in range(self.repeats):
            self.tell(f"overhead, batch {batch}: run {repeat + 1} of {self.repeats}")
            result = side.run(prompts, output, sample_every_s=_SAMPLE_EVERY_S)
            steps.append(1e6 * result.run.seconds / output)
            found.append(shares(result.stacks))
        inside = [kernel_share(groups) for groups in found]
        kernels = {group.name for group in GROUPS if group.is_kernel}
        timed = {
            "step_us": steps,
            "inside_us": [step * share for step, share in zip(steps, inside, strict=True)],
            "outside_us": [step * (1 - share) for step, share in zip(steps, inside, strict=True)],
            "outside_share": [1 - share for share in inside],
        }
        parts = {
            name: asdict(Figure.of([step * groups.get(name, 0.0) for step, groups in zip(steps, found, strict=True)]))
            for name in dict.fromkeys(name for groups in found for name in groups)
            if name not in kernels
        }
        figures = {name: asdict(Figure.of(values)) for name, values in timed.items()}
        return {"batch": batch, **figures, "most_outside": TARGETS[batch], "parts_us": parts}


def run_overhead(arguments: argparse.Namespace, model: str | None) -> int:
    """Raises ``ConfigError`` for what makes no run, and what our side raises."""
    values = known_values(arguments, "overhead", ("shrink", "threads", "id-seed"))
    config = config_of(arguments, "overhead", model)
    threads = values["threads"] or facts_of(config)["threads"]
    repeats = _REPEATS if arguments.repeats is None else arguments.repeats
    found = Overhead(config, repeats, values["id-seed"], threads, shrink=values["shrink"]).run()
    print(json.dumps({"model": model, **found}) if arguments.json else overhead_table(found))
    return 0


def overhead_table(found: Row) -> str:
    """A column per batch: microseconds of a step, and of it what is outside kernels by parts."""
    rows = found["batches"]
    lines = [["", *(f"batch {row['batch']}" for row in rows)]]
    for name in ("step_us", "inside_us", "outside_us"):
        lines.append([name, *(f"{row[name]['median']:.0f}" for row in rows)])
    lines.append(["outside", *(f"{row['outside_share']['median']:.1%}" for row in rows)])
    lines.append(["at most", *(f"{row['most_outside']:.0%}" for row in rows)])
    for name in dict.fromkeys(name for row in rows for name in row["parts_us"]):
        medians = [row["parts_us"].get(name, {"median": 0.0})["median"] for row in rows]
        lines.append([f"  {name} (us)", *(f"{median:.0f}" for median in medians)])
    return "\n".join([f"{found['precision']}, {found['threads']} threads", *aligned(lines)])
