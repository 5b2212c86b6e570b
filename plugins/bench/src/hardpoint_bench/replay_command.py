"""``hardpoint bench scheduler`` with a trace: schedulers side by side in simulated time."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.errors import ConfigError
from hardpoint_bench.flags import Values
from hardpoint_bench.garbage import as_in_an_engine
from hardpoint_bench.generator import Mix
from hardpoint_bench.outcome import Outcome
from hardpoint_bench.plot import check_plot, draw
from hardpoint_bench.rig import Rig, Sizes, with_scheduler
from hardpoint_bench.simulation import Simulation, StepCost
from hardpoint_bench.trace import Trace, TraceFile

__all__ = ["is_replay", "replay", "write_trace"]

_BATCHED_TOKENS = 2_048
_MODEL_LEN = 131_072
_NUM_BLOCKS = 8_192
_MADE_UP = ("rate", "output-len", "length-spread", "prefixes", "tenants", "priorities", "trace-seed")
_OF_FILES = ("hash-block", "timestamp-unit", "speed")
_STANDARD_IN = _STANDARD_OUT = "-"


def is_replay(values: Values) -> bool:
    """Whether the flags ask for a trace rather than for a steady state."""
    return any(values.is_given(name) for name in ("trace", "requests", "generate-trace"))


def write_trace(values: Values) -> int:
    """``--generate-trace``: how many lines were written. Raises ``ConfigError`` for a file that cannot be."""
    mix = _mix(values)
    path = values["generate-trace"]
    # A disk may be full at any write, and closing writes what is left.
    try:
        _write(mix, path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"--generate-trace {path!r} cannot be written: {error.strerror}") from None
    return mix.requests


def _write(mix: Mix, path: str) -> None:
    with contextlib.ExitStack() as stack:
        target: BinaryIO = sys.stdout.buffer
        if path != _STANDARD_OUT:
            target = stack.enter_context(Path(path).open("wb"))
        for line in mix.lines():
            target.write(line)
        target.flush()


def replay(config: AppConfig, values: Values) -> dict[str, Any]:
    """The report: of one scheduler, or of several by name under ``schedulers``."""
    choices = [(None, config), *((choice, with_scheduler(config, choice)) for choice in values["compare"] or ())]
    trace = _trace(values)
    if len(choices) > 1 and isinstance(trace, TraceFile) and trace.path == _STANDARD_IN:
        raise ConfigError("--trace - can be read only once; to --compare schedulers, give the trace as a file")
    if values.is_given("plot"):
        check_plot(values["plot"])
    cost = StepCost.parse(values["step-cost"])
    rigs = _named([(choice, _rig(chosen, values)) for choice, chosen in choices])
    outcomes: dict[str, Outcome] = {}
    reports: dict[str, Any] = {}
    for name, rig in rigs.items():
        print(f"{name}: replaying", file=sys.stderr)
        simulation = Simulation(rig, trace, cost)
        with as_in_an_engine():
            outcomes[name] = simulation.run()
        reports[name] = outcomes[name].report() | _circumstances(rig, values, trace)
    if values.is_given("plot"):
        draw(values["plot"], outcomes)
    return reports[next(iter(reports))] if len(reports) == 1 else {"schedulers": reports}


def _named(rigs: list[tuple[str | None, Rig]]) -> dict[str, Rig]:
    """By what the user calls them. Raises ``ConfigError`` for the same thing twice."""
    named: dict[str, Rig] = {}
    for choice, rig in rigs:
        name = rig.plugin.name if choice is None else choice
        if name in named:
            raise ConfigError(f"--compare {name}: it takes part already; give a scheduler or options that differ")
        named[name] = rig
    return named


def _circumstances(rig: Rig, values: Values, trace: Trace) -> dict[str, Any]:
    told: dict[str, Any] = {
        "scheduler": rig.plugin.label,
        "blocks": rig.num_blocks,
        "block_size": rig.block_size,
        "max_num_seqs": rig.limits.max_num_seqs,
        "max_num_batched_tokens": rig.limits.max_num_batched_tokens,
        "max_inflight_steps": rig.limits.max_inflight_steps,
        "step_cost": values["step-cost"],
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }
    if isinstance(trace, TraceFile) and trace.ignored:
        told["ignored_keys"] = sorted(trace.ignored)
    return told


def _trace(values: Values) -> Trace:
    if not values.is_given("trace"):
        values.refuse(_OF_FILES, "only for --trace; a made-up trace has --rate")
        return _mix(values)
    values.refuse((*_MADE_UP, "requests", "prompt-len", "shared-prefix"), "the --trace says it already")
    speed, block = values["speed"], values["hash-block"]
    unit = {"ms": 1e-3, "s": 1.0}[values["timestamp-unit"]]
    return TraceFile(values["trace"], hash_block=block, unit_s=unit, speed=speed)


def _mix(values: Values) -> Mix:
    if not values.is_given("requests"):
        raise ConfigError("--generate-trace needs --requests N")
    mix = Mix(
        requests=values["requests"],
        rate=values["rate"],
        prompt_len=values["prompt-len"],
        output_len=values["output-len"],
        length_spread=values["length-spread"],
        shared_prefix=values["shared-prefix"],
        prefixes=values["prefixes"],
        tenants=values["tenants"],
        priorities=values["priorities"],
        seed=values["trace-seed"],
    )
    mix.check()
    return mix


def _rig(config: AppConfig, values: Values) -> Rig:
    (engine,) = config.engines.values()
    running = _running(engine, values)
    sizes = Sizes(running, max(_BATCHED_TOKENS, running), _MODEL_LEN, _NUM_BLOCKS)
    return Rig.of(config, sizes, pipelined=values["async"])


def _running(engine: EngineConfig, values: Values) -> int:
    running: int = values["running"]
    setting = engine.scheduler.max_num_seqs
    if setting is None or not values.is_given("running") or setting == running:
        return setting or running
    raise ConfigError(f"--running {running} and --max-num-seqs {setting} say different things; give one of them")
