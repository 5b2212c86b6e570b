"""All workloads in all precision classes against all peers: one result, which grows workload by workload."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hardpoint.config import AppConfig
from hardpoint.errors import HardpointError
from hardpoint_bench.classes import PrecisionClass
from hardpoint_bench.contest import SETTLE_S, Contest
from hardpoint_bench.inventory import Inventory
from hardpoint_bench.machine import describe_machine
from hardpoint_bench.model_report import report_of
from hardpoint_bench.peers import OURS
from hardpoint_bench.roofline import Geometry, Limits, Machine, Stored, limits_of
from hardpoint_bench.sides import Program
from hardpoint_bench.stored import stored_in_class, weights_of
from hardpoint_bench.targets import verdicts
from hardpoint_bench.workloads import Workload

__all__ = ["STARTUP", "Suite", "fractions", "in_class", "shrunk", "verdict_rows"]

STARTUP = "startup"
Result = dict[str, Any]


@dataclass(slots=True)
class Suite:
    """``config`` is ours without a class; ``keep`` gets the whole result whenever there is more of it.

    ``shrink``: by what the sizes of ``workloads`` were divided. ``peaks`` measures the machine, before the first
    workload and after each class.
    """

    config: AppConfig
    inventory: Inventory
    workloads: Sequence[Workload]
    repeats: int
    seed: int
    threads: int
    shrink: int
    peaks: Callable[[int], Mapping[str, float]]
    keep: Callable[[Result], None]
    ours: Program = OURS
    settle_s: float = SETTLE_S
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    result: Result = field(default_factory=dict)

    def run(self, classes: Sequence[PrecisionClass]) -> Result:
        """Raises ``SideFault`` where the machine cannot be measured; what fails in one class is told in the result."""
        (engine,) = self.config.engines.values()
        settings = {"repeats": self.repeats, "id_seed": self.seed, "threads": self.threads, "shrink": self.shrink}
        self.result |= {
            "model": engine.model.name,
            "settings": settings,
            "machine": {**describe_machine(), "threads": self.threads},
            "missing_peers": dict(self.inventory.missing),
        }
        self.result.setdefault("peaks", []).append(dict(self.peaks(self.threads)))
        measured: dict[str, Any] = self.result.setdefault("classes", {})
        for chosen in classes:
            self._run_class(chosen, measured.setdefault(chosen.name, {}))
            self.result["peaks"].append(dict(self.peaks(self.threads)))
        _add_limits(self.result)
        self.result["targets"] = verdict_rows(self.result)
        self.keep(self.result)
        return self.result

    @property
    def _names(self) -> set[str]:
        return {workload.name for workload in self.workloads}

    def _run_class(self, chosen: PrecisionClass, found: Result) -> None:
        peers, absent = self.inventory.peers_for(chosen)
        for name, why in absent.items():
            self.tell(f"{chosen.name}: {name} takes no part: {why}")
        # What was measured of other workloads before stays: a long run may be made of several.
        kept = {name: report for name, report in found.get("workloads", {}).items() if name not in self._names}
        faults = {name: why for name, why in found.get("faults", {}).items() if name.rpartition(", ")[2] in kept}
        known = {name: found.get(name) if kept else None for name in ("sizes", "stored", "weight_bytes")}
        found |= {"absent": absent, "faults": faults, **known, "workloads": kept}
        for workload in self.workloads:
            self.tell(f"{chosen.name}, {workload.name}")
            contest = Contest(
                workload, in_class(self.config, chosen), peers, seed=self.seed, threads=self.threads,
                precision=chosen.name, tolerant=True, settle_s=self.settle_s, ours=self.ours, tell=self.tell,
            )  # fmt: skip
            starts = workload.name == STARTUP
            try:
                contest.run_starts(self.repeats) if starts else contest.run(self.repeats)
            except HardpointError as error:
                found["faults"]["hardpoint"] = f"{type(error).__name__}: {error}"
                self.tell(f"{chosen.name}: Hardpoint cannot run in this class: {error}")
                break
            found["faults"] |= {f"{name}, {workload.name}": why for name, why in contest.faults.items()}
            found["workloads"][workload.name] = self._report(contest, starts=starts)
            if found["sizes"] is None:
                found |= _sizes(chosen, contest.ours.facts)
            self.keep(self.result)

    def _report(self, contest: Contest, *, starts: bool) -> Result:
        workload = contest.workload
        settings = {
            "prompt_len": workload.prompt_length,
            "shared_prefix": workload.shared,
            "output_len": workload.output,
            "batch": workload.num_requests,
            "repeats": self.repeats,
        }
        (engine,) = self.config.engines.values()
        report = report_of(contest, engine.model.name, settings, starts=starts)
        del report["machine"], report["model"]
        if stored := weights_of(Path(contest.ours.facts["model_path"])):
            said = report["settings"]["precision"]
            report["settings"]["precision"] = said.replace("as in the file", f"as in the file ({stored})")
        for peer in report["peers"].values():
            # Where things lie on this machine tells nothing to others.
            peer["model"] = Path(peer["model"]).name
            del peer["python"]
        return report


def in_class(config: AppConfig, chosen: PrecisionClass) -> AppConfig:
    """``config`` with the settings that put our side into the class."""
    engines = {
        name: engine.model_copy(
            update={
                "model": engine.model.model_copy(update={"quantization": chosen.quantization, "dtype": "float32"}),
                "cache": engine.cache.model_copy(update={"kv_cache_dtype": chosen.kv_cache_dtype}),
            }
        )
        for name, engine in config.engines.items()
    }
    return config.model_copy(update={"engines": engines})


def shrunk(workload: Workload, by: int) -> Workload:
    """All sizes divided by ``by``, for trying out; a request keeps at least what makes it one."""
    return replace(
        workload,
        num_requests=max(1 if workload.num_requests == 1 else 2, workload.num_requests // by),
        shared=workload.shared // by,
        own=max(2, workload.own // by),
        output=max(min(workload.output, 2), workload.output // by),
    )


def _sizes(chosen: PrecisionClass, facts: Mapping[str, Any]) -> Result:
    """What limits are computed from, as plain data; nothing for a model whose operations are not counted."""
    geometry = Geometry.of(facts["sizes"])
    stored = None if geometry is None else stored_in_class(chosen.name, geometry, Path(facts["model_path"]))
    return {
        "sizes": facts["sizes"],
        "stored": stored and asdict(stored),
        "weight_bytes": stored and stored.bytes_in_use,
    }


def _add_limits(result: Result) -> None:
    """Fractions of the machine's limit, of what it reached at its best during the whole run."""
    machine = Machine.best_of(result["peaks"])
    for precision, measured in result["classes"].items():
        for name, report in measured["workloads"].items():
            limits = _limits(report, measured, machine, precision)
            report["limits"] = dict(limits.figures) if limits is not None and name != STARTUP else {}
            report["fractions"] = fractions(report)
    result["roofline"] = asdict(machine)


def _limits(report: Mapping[str, Any], measured: Mapping[str, Any], machine: Machine, precision: str) -> Limits | None:
    geometry = Geometry.of(measured["sizes"])
    if geometry is None or measured["stored"] is None:
        return None
    one = report["settings"]
    workload = Workload(
        report["workload"], "", one["batch"], one["shared_prefix"], one["prompt_len"] - one["shared_prefix"],
        one["output_len"],
    )  # fmt: skip
    return limits_of(workload, geometry, Stored(**measured["stored"]), machine, precision)


def fractions(report: Mapping[str, Any]) -> dict[str, float]:
    """Of the limit that was reached, by figure: 1 is the limit."""
    reached = {}
    for name, limit in report["limits"].items():
        if figure := report["figures"].get(name):
            median = figure["median"]
            reached[name] = limit / median if name == "wall_s" else median / limit
    return reached


def verdict_rows(result: Mapping[str, Any]) -> list[Result]:
    """Targets with what was reached, as plain data."""
    return [
        {
            "class": one.target.precision,
            "workload": one.target.workload,
            "target": one.target.text,
            "reached": one.reached,
            "rival": one.rival,
            "met": one.is_met,
            "why": one.why,
        }
        for one in verdicts(result)
    ]
