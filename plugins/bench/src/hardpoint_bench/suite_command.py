"""``hardpoint bench suite | scaling``: all workloads and classes against all peers, and our side alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from hardpoint.config import AppConfig, load_config
from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import check_settings
from hardpoint_bench.classes import chosen_classes
from hardpoint_bench.documents import check_same, check_writable, read_result, write_text
from hardpoint_bench.flags import SUITE, Values, every_flag
from hardpoint_bench.inventory import Inventory
from hardpoint_bench.machine import describe_machine
from hardpoint_bench.peaks import measure_peaks
from hardpoint_bench.peers import OURS, PEERS, paths_by_peer
from hardpoint_bench.scaling import Scaling
from hardpoint_bench.sides import Side
from hardpoint_bench.suite import Suite, shrunk
from hardpoint_bench.suite_report import scaling_table, suite_table
from hardpoint_bench.workloads import BY_COMMAND, Workload

__all__ = ["config_of", "facts_of", "known_values", "run_scaling", "run_suite"]

_REPEATS = 5
_SCALING_REPEATS = 3


def run_suite(arguments: argparse.Namespace, model: str | None) -> int:
    """Raises ``ConfigError`` for what makes no run, ``SideFault`` where the machine cannot be measured."""
    values = known_values(arguments, "suite", SUITE)
    classes = chosen_classes(values["classes"])
    workloads = [shrunk(one, values["shrink"]) for one in _chosen_workloads(values["workloads"])]
    names = values["compare"]
    pythons = paths_by_peer("peer-python", values["peer-python"] or (), names or list(PEERS))
    folder = values["peers"]
    inventory = Inventory.take(names, Path(folder) if folder else None, pythons)
    config = config_of(arguments, "suite", model)
    output = Path(values["output"]) if values["output"] else None
    result = read_result(output)
    threads = values["threads"] or facts_of(config)["threads"]
    if output:
        check_same(output, result, model or "", {**describe_machine(), "threads": threads})
        check_writable(output)

    def keep(found: dict[str, Any]) -> None:
        if output is not None:
            write_text(output, json.dumps(found, indent=1) + "\n")

    for name, advice in inventory.missing.items():
        print(f"{name} is not installed and takes no part. To have it: {advice}", file=sys.stderr)
    suite = Suite(
        config=config,
        inventory=inventory,
        workloads=workloads,
        repeats=_REPEATS if arguments.repeats is None else arguments.repeats,
        seed=values["id-seed"],
        threads=threads,
        shrink=values["shrink"],
        peaks=measure_peaks,
        keep=keep,
        result=result,
    )
    result = suite.run(classes)
    print(json.dumps(result) if arguments.json else suite_table(result))
    return 0


def run_scaling(arguments: argparse.Namespace, model: str | None) -> int:
    """Raises ``ConfigError`` for what makes no run, and what our side raises."""
    values = known_values(arguments, "scaling", ("output", "shrink", "threads", "id-seed"))
    config = config_of(arguments, "scaling", model)
    output = Path(values["output"]) if values["output"] else None
    result = read_result(output)
    threads = values["threads"] or facts_of(config)["threads"]
    machine = {**describe_machine(), "threads": threads}
    if output:
        check_same(output, result, model or "", machine)
        check_writable(output)
    repeats = _SCALING_REPEATS if arguments.repeats is None else arguments.repeats
    found = Scaling(config, repeats, values["id-seed"], threads, shrink=values["shrink"]).run()
    if output:
        result |= {"model": model, "machine": result.get("machine") or machine, "scaling": found}
        write_text(output, json.dumps(result, indent=1) + "\n")
    print(json.dumps(found) if arguments.json else scaling_table(found))
    return 0


def known_values(arguments: argparse.Namespace, form: str, known: tuple[str, ...]) -> Values:
    """Those of the command line, all in bounds. Raises ``ConfigError`` for flags of another ``form``."""
    values = Values.of(arguments)
    values.check()
    values.refuse([flag for flag in every_flag() if flag not in known], f"not for `hardpoint bench {form}`")
    if arguments.workload:
        raise ConfigError(f"--workload is for `hardpoint bench MODEL`, not for `hardpoint bench {form}`")
    return values


def config_of(arguments: argparse.Namespace, form: str, model: str | None) -> AppConfig:
    """Raises ``ConfigError`` where no model is named or a setting has no room in a benchmark."""
    if model is None:
        raise ConfigError(f"no model is named; write `hardpoint bench {form} MODEL`")
    arguments.model = model
    config = load_config(arguments, os.environ)
    (engine,) = config.engines.values()
    check_settings(engine)
    return config


def facts_of(config: AppConfig) -> dict[str, Any]:
    """What our side tells once it has started: files, threads, sizes."""
    with Side(OURS, {"config": config.model_dump(mode="json")}) as side:
        return side.facts


def _chosen_workloads(names: str | None) -> list[Workload]:
    wanted = list(BY_COMMAND) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in BY_COMMAND:
            raise ConfigError(f"--workloads {name!r}: no such workload; there are: {', '.join(BY_COMMAND)}")
    return [BY_COMMAND[name] for name in wanted]
