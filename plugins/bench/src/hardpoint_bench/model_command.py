"""``hardpoint bench latency | throughput | prefill | prefix | startup MODEL``: one workload, alone or against peers."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import Any

from hardpoint.config import load_config
from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import check_settings
from hardpoint_bench.contest import Contest
from hardpoint_bench.flags import MODEL, SHARED, Values, every_flag
from hardpoint_bench.model_report import report_of, table
from hardpoint_bench.peers import choose_peers
from hardpoint_bench.workloads import BY_COMMAND, Workload

__all__ = ["run_model"]

_REPEATS = 5
STARTUP = "startup"


def run_model(arguments: argparse.Namespace, name: str, model: str | None) -> int:
    """Workload ``name`` on ``model``, or on that of the configuration file.

    Raises ``ConfigError`` for what makes no run, and what the engines raise.
    """
    values = Values.of(arguments)
    values.check()
    own = {*SHARED, *(flag.name for flag in MODEL)}
    values.refuse([flag for flag in every_flag() if flag not in own], f"not for `hardpoint bench {name}`")
    workload = sized(BY_COMMAND[name], values)
    peers = choose_peers(values["compare"] or (), values["peer-python"] or (), values["peer-model"] or ())
    if model is None and not (arguments.config or os.environ.get("HARDPOINT_CONFIG")):
        raise ConfigError(f"no model is named; write `hardpoint bench {name} MODEL`")
    arguments.model = model
    config = load_config(arguments, os.environ)
    (engine,) = config.engines.values()
    check_settings(engine)
    repeats = _REPEATS if arguments.repeats is None else arguments.repeats
    threads = values["threads"]
    contest = Contest(workload, config, peers, seed=values["id-seed"], threads=threads)
    if name == STARTUP:
        contest.run_starts(repeats)
    else:
        contest.run(repeats)
    settings: dict[str, Any] = {
        "prompt_len": workload.prompt_length,
        "shared_prefix": workload.shared,
        "output_len": workload.output,
        "batch": workload.num_requests,
        "repeats": repeats,
        "id_seed": values["id-seed"],
        "executor": engine.execution.executor,
        "scheduler": engine.scheduler.scheduler,
        "plugins": config.plugins,
    }
    report = report_of(contest, engine.model.name, settings, starts=name == STARTUP)
    print(json.dumps(report) if arguments.json else table(report))
    return 0


def sized(workload: Workload, values: Values) -> Workload:
    """``workload`` with the sizes that were given. Raises ``ConfigError`` where they contradict each other."""
    if workload.name == STARTUP and values.is_given("output-len"):
        raise ConfigError("--output-len: a start ends with its first token; leave it out")
    shared = values.given.get("shared-prefix", workload.shared)
    prompt = values.given.get("prompt-len", workload.prompt_length)
    if shared > prompt:
        raise ConfigError(f"--shared-prefix {shared} is longer than --prompt-len {prompt}; lower the former")
    return replace(
        workload,
        num_requests=values.given.get("batch", workload.num_requests),
        shared=shared,
        own=prompt - shared,
        output=values.given.get("output-len", workload.output),
    )
