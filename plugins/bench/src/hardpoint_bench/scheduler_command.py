"""``hardpoint bench scheduler``: any scheduler against a scripted worker, in a steady state or under a trace."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hardpoint.config import AppConfig, load_config
from hardpoint_bench.bounds import check_settings, memory_told
from hardpoint_bench.flags import BOTH, MODEL, REPLAY, STEADY, Values
from hardpoint_bench.hash_seed import own_hash_seed
from hardpoint_bench.replay_command import is_replay, replay, write_trace
from hardpoint_bench.rig import with_blocks
from hardpoint_bench.steady_command import measure

__all__ = ["SCHEDULER", "run_scheduler"]

SCHEDULER = "scheduler"
"""What stands in the place of a model to ask for this form of the command."""

_NAMELESS = "(none)"
"""The tenant of requests that name none, in tables for people."""


def run_scheduler(arguments: argparse.Namespace) -> int:
    """Raises ``ConfigError`` for what makes no run, ``SchedulerFault`` for a scheduler that breaks the rules."""
    values = Values.of(arguments)
    values.check()
    values.refuse([flag.name for flag in MODEL], "only for workloads on a model: `hardpoint bench latency MODEL`")
    if values.is_given("generate-trace"):
        others = [flag.name for flag in (*BOTH, *STEADY) if flag.name not in ("prompt-len", "shared-prefix")]
        values.refuse([*others, "trace", "compare", "plot"], "--generate-trace only writes; replay with --trace FILE")
        print(f"{write_trace(values)} requests written", file=sys.stderr)
        return 0
    config = with_blocks(load_config(arguments, os.environ), values["blocks"])
    for engine in config.engines.values():
        check_settings(engine)
    with own_hash_seed(), memory_told():
        report = _report(arguments, config, values)
    if arguments.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _report(arguments: argparse.Namespace, config: AppConfig, values: Values) -> dict[str, Any]:
    if is_replay(values):
        values.refuse([flag.name for flag in STEADY], "only without a trace")
        if arguments.repeats is not None:
            values.refuse(["trace", "requests"], "a replay gives the same figures each time; leave out --repeats")
        return replay(config, values)
    values.refuse([flag.name for flag in REPLAY], "only with --trace FILE or --requests N")
    return measure(config, values, 1 if arguments.repeats is None else arguments.repeats)


def _show(report: Mapping[str, Any]) -> None:
    """A line per figure, a column per scheduler."""
    columns = {name: dict(_leaves(column)) for name, column in report.get("schedulers", {"": report}).items()}
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    rows = [["", *columns]] if len(columns) > 1 else []
    rows += [[key, *(column.get(key, "-") for column in columns.values())] for key in keys]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _leaves(report: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in report.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key or _NAMELESS}.")
        elif value is not None:
            yield f"{path}{key}", f"{value:g}" if isinstance(value, float) else str(value)
