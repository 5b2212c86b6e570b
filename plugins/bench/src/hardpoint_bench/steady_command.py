"""``hardpoint bench scheduler`` without a trace: what a step costs while everybody decodes."""

from __future__ import annotations

import gc
import math
import resource
import sys
from typing import Any

import msgspec

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import MAX_BLOCKS, MAX_POSITIONS
from hardpoint_bench.flags import Values
from hardpoint_bench.garbage import as_in_an_engine, num_collections
from hardpoint_bench.hops import Hops
from hardpoint_bench.lookup import Lookup, lookup_sizes, measure_lookup
from hardpoint_bench.rig import Rig, Sizes, block_size_of
from hardpoint_bench.steady import Load, SteadyRun, StepFigures

__all__ = ["measure"]

_UNTIMED_CHUNK = 2**30


def measure(config: AppConfig, values: Values, repeats: int) -> dict[str, Any]:
    """The report of the steady form; the least disturbed of ``repeats`` runs counts."""
    rig, load = _steady_rig(config, values)
    collections = num_collections()
    runs = [_steady(rig, load, None, repeat, repeats) for repeat in range(repeats)]
    collections = num_collections() - collections
    figures, is_roomy = min(runs, key=lambda run: run[0].quantile_us("wall_ns", 50))
    report = _report(rig, load, figures, is_roomy)
    if repeats > 1:
        report["step_us_median_of_runs"] = [round(run[0].quantile_us("wall_ns", 50), 2) for run in runs]
    if values["ipc"]:
        travelled = min((_travelled(rig, load) for _ in range(repeats)), key=lambda run: run.quantile_us("wall_ns", 50))
        report["step_with_ipc_us_median"] = round(travelled.quantile_us("wall_ns", 50), 2)
        report["step_with_ipc_us_p99"] = round(travelled.quantile_us("wall_ns", 99), 2)
    if values["lookup"] is not None:
        report |= _lookup_keys(_lookup(config, values))
    report["gc"] = "automatic, start-up objects frozen" if gc.isenabled() else "disabled"
    report["gc_collections"] = collections
    report["peak_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    return report


def _travelled(rig: Rig, load: Load) -> StepFigures:
    with Hops(rig.limits, num_blocks=rig.num_blocks, block_size=rig.block_size) as hops:
        return _steady(rig, load, hops, 0, 1)[0]


def _steady_rig(config: AppConfig, values: Values) -> tuple[Rig, Load]:
    (engine,) = config.engines.values()
    most = _most_running(engine)
    load = Load(
        running=most if most is not None and not values.is_given("running") else values["running"],
        waiting=values["waiting"],
        steps=values["steps"],
        prompt_len=values["prompt-len"],
        shared_prefix=values["shared-prefix"],
        spread=values["spread-boundaries"],
    )
    load.check()
    _check_settings(engine, load)
    budget = engine.scheduler.max_num_batched_tokens
    chunk = engine.scheduler.long_prefill_threshold or budget or _UNTIMED_CHUNK
    sizes = load.sizes(block_size_of(engine), budget=budget, chunk=chunk)
    _check_sizes(sizes, load, engine)
    longest = engine.model.max_model_len
    if longest is not None and longest < sizes.max_model_len:
        raise ConfigError(
            f"--max-model-len {longest} ends requests before the last of --steps {load.steps}; set it to "
            f"{sizes.max_model_len} or more, or leave it out"
        )
    return Rig.of(config, sizes, pipelined=values["async"]), load


def _check_sizes(sizes: Sizes, load: Load, engine: EngineConfig) -> None:
    """Raises ``ConfigError`` where each number is small enough, but not what they make together."""
    blocks = engine.cache.num_kv_blocks or sizes.num_blocks
    prompts = (load.running + load.waiting) * load.prompt_len
    for what, found, most, advice in (
        ("all prompts", prompts, MAX_POSITIONS, "--running, --waiting or --prompt-len"),
        ("a step's tokens", sizes.max_num_batched_tokens, MAX_POSITIONS, "--running or --block-size"),
        ("blocks", blocks, MAX_BLOCKS, "--running or --steps, or give --blocks"),
    ):
        if found > most:
            raise ConfigError(f"{what}: these numbers make {found:,}, of at most {most:,}; lower {advice}")


def _most_running(engine: EngineConfig) -> int | None:
    """What the settings allow, if they say."""
    active = engine.scheduler.max_num_active_seqs
    return engine.scheduler.max_num_seqs if active is None else active


def _check_settings(engine: EngineConfig, load: Load) -> None:
    most, batched = _most_running(engine), engine.scheduler.max_num_batched_tokens
    if most is not None and most != load.running:
        setting = "--max-num-seqs" if engine.scheduler.max_num_active_seqs is None else "--max-num-active-seqs"
        raise ConfigError(f"{setting} {most} is not --running {load.running}; give one of them")
    if batched is not None and batched < load.running:
        raise ConfigError(
            f"--max-num-batched-tokens {batched} has no room for a token of each of --running {load.running} requests; "
            f"set it to {load.running} or more, or leave it out"
        )


def _steady(rig: Rig, load: Load, hops: Hops | None, repeat: int, repeats: int) -> tuple[StepFigures, bool]:
    what = "with ipc" if hops is not None else f"run {repeat + 1} of {repeats}"
    print(f"{rig.plugin.label}: {load.running} running, {load.steps} steps, {what}", file=sys.stderr)
    run = SteadyRun(rig, load, hops=hops)
    with as_in_an_engine():
        return run.run(), run.is_roomy


def _report(rig: Rig, load: Load, figures: StepFigures, is_roomy: bool) -> dict[str, Any]:
    median = figures.quantile_us("wall_ns", 50)
    parts = {
        "step_cpu_us_median": figures.quantile_us("cpu_ns", 50),
        "step_cpu_us_p99": figures.quantile_us("cpu_ns", 99),
        "schedule_us_median": figures.quantile_us("schedule_ns", 50),
        "update_us_median": figures.quantile_us("update_ns", 50),
        "boundary_step_us_median": figures.quantile_us("wall_ns", 50, boundaries_only=True),
        "add_us_per_request": figures.add_ns / 1e3,
        "fill_us_per_request": figures.fill_ns / 1e3,
        "finish_us_per_request": figures.finish_ns / 1e3,
    }
    return {
        "step_us_median": round(median, 2),
        "step_us_p99": round(figures.quantile_us("wall_ns", 99), 2),
        "us_per_running_request": round(median / (figures.rows / len(figures.steps)), 3),
        "prefix_hit_rate": round(figures.prefix_hit_rate, 4),
        "preemptions": figures.preemptions,
        "blocks_leaked": figures.blocks_leaked,
        **{name: None if math.isnan(value) else round(value, 2) for name, value in parts.items()},
        "scheduler": rig.plugin.label,
        "running": load.running,
        "waiting": load.waiting,
        "steps": len(figures.steps),
        "rows": figures.rows,
        "tokens": figures.tokens,
        "blocks": rig.num_blocks,
        "block_size": rig.block_size,
        "max_inflight_steps": rig.limits.max_inflight_steps,
        "every_request_every_step": is_roomy,
        "aligned_boundaries": figures.aligned_boundaries,
        "boundary_rows_max": max(step.boundary_rows for step in figures.steps),
        "hashes_checked": figures.hashes_checked,
    }


def _lookup(config: AppConfig, values: Values) -> Lookup:
    (engine,) = config.engines.values()
    sizes = lookup_sizes(values["lookup"], block_size_of(engine))
    rig = Rig.of(config, sizes, pipelined=False)
    # Its own numbers of blocks, requests and tokens, whatever the run before had.
    limits = msgspec.structs.replace(
        rig.limits,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        max_num_active_seqs=None,
        chunked_prefill=True,
        watermark=0.0,
        full_sequence_must_fit=False,
    )
    with as_in_an_engine():
        return measure_lookup(Rig.around(rig.plugin, limits, sizes.num_blocks, rig.block_size), values["lookup"])


def _lookup_keys(lookup: Lookup) -> dict[str, Any]:
    return {
        "lookup_tokens": lookup.tokens,
        "lookup_cached_tokens": lookup.cached_tokens,
        "lookup_ms": round(lookup.lookup_ms, 3),
        "lookup_cpu_ms": round(lookup.lookup_cpu_ms, 3),
        "lookup_first_ms": round(lookup.first_ms, 3),
    }
