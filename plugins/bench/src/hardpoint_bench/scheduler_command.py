"""``hardpoint bench scheduler``: any scheduler against a scripted worker, measured or under a trace of requests."""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardpoint.config import AppConfig, EngineConfig, load_config
from hardpoint.errors import ConfigError
from hardpoint_bench.hops import Hops
from hardpoint_bench.lookup import Lookup, lookup_sizes, measure_lookup
from hardpoint_bench.rig import Rig, block_size_of
from hardpoint_bench.steady import Load, SteadyRun, StepFigures

__all__ = ["SCHEDULER", "add_scheduler_arguments", "given_flags", "run_scheduler"]

SCHEDULER = "scheduler"
"""What stands in the place of a model to ask for this form of the command."""

_UNTIMED_CHUNK = 2**30


@dataclass(frozen=True, slots=True)
class _Flag:
    """One option; its default is kept here, so that the parser can tell whether it was given."""

    name: str
    default: Any
    text: str
    metavar: str | None = "N"
    kind: Any = int

    @property
    def dest(self) -> str:
        return "sim_" + self.name.replace("-", "_")


_STEADY = (
    _Flag("running", 256, "requests that decode at the same time"),
    _Flag("waiting", 0, "further requests that wait in the queue"),
    _Flag("steps", 512, "measured steps"),
    _Flag("prompt-len", 128, "tokens of a prompt"),
    _Flag("shared-prefix", 0, "tokens at the start that all prompts share"),
    _Flag("blocks", None, "KV blocks, the null block included; by default enough for everybody"),
    _Flag("async", False, "keep two steps under way, as asynchronous scheduling does", None, bool),
    _Flag("spread-boundaries", False, "let blocks fill up in turns; by default all in the same step", None, bool),
    _Flag("ipc", True, "measure once more with encoding and the way to other processes", None, bool),
    _Flag("lookup", None, "also measure finding a cached prompt of N tokens"),
)


def add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this form, in a group of their own."""
    text = "with `scheduler` in the place of MODEL; needs no model. --scheduler, --plugin and the settings of "
    text += "cache and scheduler apply. A step is schedule plus update"
    _add(parser.add_argument_group("benchmark of a scheduler", text), _STEADY)


def _add(group: argparse._ArgumentGroup, flags: tuple[_Flag, ...]) -> None:
    for flag in flags:
        text = flag.text if flag.default in (None, False) else f"{flag.text} (default: {flag.default})"
        settings: dict[str, Any] = {"dest": flag.dest, "default": None, "help": text}
        if flag.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction if flag.default else "store_true"
        else:
            settings.update(type=flag.kind, metavar=flag.metavar)
        group.add_argument(f"--{flag.name}", **settings)


def given_flags(arguments: argparse.Namespace) -> list[str]:
    """Flags of this form that stand on the command line."""
    return [f"--{flag.name}" for flag in _STEADY if getattr(arguments, flag.dest) is not None]


def _values(arguments: argparse.Namespace, flags: tuple[_Flag, ...]) -> dict[str, Any]:
    given = {flag.name: getattr(arguments, flag.dest) for flag in flags}
    return {flag.name: flag.default if given[flag.name] is None else given[flag.name] for flag in flags}


def run_scheduler(arguments: argparse.Namespace) -> int:
    """Raises ``ConfigError`` for numbers that make no run, ``SchedulerFault`` for a scheduler that breaks the rules."""
    config = load_config(arguments, os.environ)
    values = _values(arguments, _STEADY)
    repeats = 1 if arguments.repeats is None else arguments.repeats
    report = measure(config, values, repeats)
    _print(report, arguments.json)
    return 0


def measure(config: AppConfig, values: dict[str, Any], repeats: int) -> dict[str, Any]:
    """The report of the steady form; the least disturbed of ``repeats`` runs counts."""
    config = _with_sizes(config, values)
    rig, load = _steady_rig(config, values)
    collections = _num_collections()
    runs = [_steady(rig, load, None, repeat, repeats) for repeat in range(repeats)]
    collections = _num_collections() - collections
    figures, is_roomy = min(runs, key=lambda run: float(np.median(run[0].step_ns)))
    report = _report(rig, load, figures, is_roomy)
    if repeats > 1:
        report["step_us_median_of_runs"] = [_us(np.median(run[0].step_ns)) for run in runs]
    if values["ipc"]:
        with Hops(rig.limits, num_blocks=rig.num_blocks, block_size=rig.block_size) as hops:
            travelled, _ = _steady(rig, load, hops, 0, 1)
        report["step_with_ipc_us_median"] = _us(np.median(travelled.step_ns))
        report["step_with_ipc_us_p99"] = _us(np.percentile(travelled.step_ns, 99))
    if values["lookup"] is not None:
        report |= _lookup_keys(_lookup(config, values))
    report["gc_enabled"] = gc.isenabled()
    report["gc_collections"] = collections
    report["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    return report


def _with_sizes(config: AppConfig, values: dict[str, Any]) -> AppConfig:
    """``--blocks`` is another spelling of the setting."""
    ((name, engine),) = config.engines.items()
    blocks, setting = values["blocks"], engine.cache.num_kv_blocks
    if blocks is None:
        return config
    if setting is not None and setting != blocks:
        raise ConfigError(f"--blocks {blocks} and --num-kv-blocks {setting} say different things; give one of them")
    if blocks < 2:
        raise ConfigError(f"--blocks {blocks} must be at least 2: one of them is the null block")
    cache = engine.cache.model_copy(update={"num_kv_blocks": blocks})
    return config.model_copy(update={"engines": {name: engine.model_copy(update={"cache": cache})}})


def _steady_rig(config: AppConfig, values: dict[str, Any]) -> tuple[Rig, Load]:
    load = Load(
        running=values["running"],
        waiting=values["waiting"],
        steps=values["steps"],
        prompt_len=values["prompt-len"],
        shared_prefix=values["shared-prefix"],
        spread=values["spread-boundaries"],
    )
    load.check()
    (engine,) = config.engines.values()
    _check_settings(engine, load)
    budget = engine.scheduler.max_num_batched_tokens
    chunk = engine.scheduler.long_prefill_threshold or budget or _UNTIMED_CHUNK
    sizes = load.sizes(block_size_of(engine), budget=budget, chunk=chunk)
    return Rig.of(config, sizes, pipelined=values["async"]), load


def _check_settings(engine: EngineConfig, load: Load) -> None:
    seqs, batched = engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens
    if seqs is not None and seqs != load.running:
        raise ConfigError(f"--max-num-seqs {seqs} is not --running {load.running}; leave it out: the latter sets both")
    if batched is not None and batched < load.running:
        raise ConfigError(
            f"--max-num-batched-tokens {batched} has no room for a token of each of --running {load.running} requests; "
            f"set it to {load.running} or more, or leave it out"
        )


def _steady(rig: Rig, load: Load, hops: Hops | None, repeat: int, repeats: int) -> tuple[StepFigures, bool]:
    what = "with ipc" if hops is not None else f"run {repeat + 1} of {repeats}"
    print(f"{rig.plugin.label}: {load.running} running, {load.steps} steps, {what}", file=sys.stderr)
    run = SteadyRun(rig, load, hops=hops)
    return run.run(), run.is_roomy


def _report(rig: Rig, load: Load, figures: StepFigures, is_roomy: bool) -> dict[str, Any]:
    median = float(np.median(figures.step_ns))
    return {
        "step_us_median": _us(median),
        "step_us_p99": _us(np.percentile(figures.step_ns, 99)),
        "us_per_running_request": round(median / 1e3 / (figures.rows / len(figures.step_ns)), 3),
        "prefix_hit_rate": round(figures.prefix_hit_rate, 4),
        "preemptions": figures.preemptions,
        "blocks_leaked": figures.blocks_leaked,
        "step_cpu_us_median": _us(np.median(figures.cpu_ns)),
        "step_cpu_us_p99": _us(np.percentile(figures.cpu_ns, 99)),
        "scheduler": rig.plugin.label,
        "running": load.running,
        "waiting": load.waiting,
        "steps": len(figures.step_ns),
        "rows": figures.rows,
        "tokens": figures.tokens,
        "blocks": rig.num_blocks,
        "block_size": rig.block_size,
        "max_inflight_steps": rig.limits.max_inflight_steps,
        "every_request_every_step": is_roomy,
        "aligned_boundaries": figures.aligned_boundaries,
        "boundary_rows_max": max(figures.boundary_rows, default=0),
        "hashes_checked": figures.hashes_checked,
        "add_us_per_request": _us(figures.add_ns),
        "fill_us_per_request": _us(figures.fill_ns),
        "finish_us_per_request": _us(figures.finish_ns),
    }


def _lookup(config: AppConfig, values: dict[str, Any]) -> Lookup:
    (engine,) = config.engines.values()
    sizes = lookup_sizes(values["lookup"], block_size_of(engine))
    return measure_lookup(Rig.of(config, sizes, pipelined=False), values["lookup"])


def _lookup_keys(lookup: Lookup) -> dict[str, Any]:
    return {
        "lookup_tokens": lookup.tokens,
        "lookup_cached_tokens": lookup.cached_tokens,
        "lookup_ms": round(lookup.lookup_ms, 3),
        "lookup_hash_ms": round(lookup.hash_ms, 3),
    }


def _us(nanoseconds: float | np.floating[Any]) -> float:
    return round(float(nanoseconds) / 1e3, 2)


def _num_collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    width = max(map(len, report))
    for key, value in report.items():
        print(f"{key:<{width}}  {value}")
