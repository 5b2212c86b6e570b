"""``hardpoint bench``: workloads on one model, offline, alone or against peers; or a scheduler without a model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict

from hardpoint import LLM
from hardpoint.config import add_arguments, load_config
from hardpoint.errors import ConfigError
from hardpoint.interfaces import CliCommand, NoOptions, PluginContext, plugin
from hardpoint_bench.bounds import check_option
from hardpoint_bench.convert_command import run_convert
from hardpoint_bench.document_command import run_document
from hardpoint_bench.flags import add_flags, flags_given
from hardpoint_bench.measure import Figure, figures, run_workload
from hardpoint_bench.model_command import run_model
from hardpoint_bench.model_report import number
from hardpoint_bench.overhead_command import run_overhead
from hardpoint_bench.scheduler_command import SCHEDULER, run_scheduler
from hardpoint_bench.suite_command import run_scaling, run_suite
from hardpoint_bench.workloads import BY_COMMAND, WORKLOADS, Workload

__all__ = ["BenchCommand", "create"]

_REPEATS = 3
_FORMS = {
    "suite": run_suite,
    "scaling": run_scaling,
    "convert": run_convert,
    "document": run_document,
    "overhead": run_overhead,
}
"""Forms of the command that are no workloads: most of them make results for a document."""


class BenchCommand(CliCommand):
    help = (
        "Measure a model with one workload (`hardpoint bench latency|throughput|prefill|prefix|startup MODEL`), alone "
        "or against peers, with four of them in one process (`hardpoint bench [MODEL]`), "
        "or a scheduler without a model (`hardpoint bench scheduler`)."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, with_server=False)
        workloads = "; ".join(f"{workload.name}: {workload.description}" for workload in BY_COMMAND.values())
        text = f"the model, right behind one of the workloads. {workloads}"
        parser.add_argument("measured_model", nargs="?", metavar="MODEL", help=text)
        group = parser.add_argument_group("benchmark")
        known = "; ".join(f"{workload.name}: {workload.description}" for workload in WORKLOADS.values())
        group.add_argument("--workload", action="append", choices=list(WORKLOADS), help=f"repeatable. {known}")
        text = f"measured runs (default: {_REPEATS}; of one workload: 5; of a scheduler: 1)"
        group.add_argument("--repeats", type=int, metavar="N", help=text)
        group.add_argument("--json", action="store_true", help="print one JSON object")
        add_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.repeats is not None:
            check_option("repeats", arguments.repeats)
        if (name := arguments.model) in BY_COMMAND:
            if arguments.workload:
                raise ConfigError(f"--workload is for `hardpoint bench MODEL`; `{name}` is a workload already")
            return run_model(arguments, name, arguments.measured_model)
        if (form := _FORMS.get(name)) is not None:
            return form(arguments, arguments.measured_model)
        if (extra := arguments.measured_model) is not None:
            raise ConfigError(
                f"{extra!r} after {name!r}: a second name follows one of {', '.join([*BY_COMMAND, *_FORMS])}"
            )
        if arguments.model == SCHEDULER:
            if arguments.workload:
                raise ConfigError("--workload is for a model; `hardpoint bench scheduler` runs without one")
            return run_scheduler(arguments)
        if alien := flags_given(arguments):
            raise ConfigError(f"{', '.join(alien)}: only for `hardpoint bench scheduler`, not for a model")
        return self._run_workloads(arguments)

    def _run_workloads(self, arguments: argparse.Namespace) -> int:
        repeats = _REPEATS if arguments.repeats is None else arguments.repeats
        if arguments.model is None:
            arguments.model = "smollm2"
        chosen = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
        started = time.perf_counter()
        with LLM.from_config(load_config(arguments, os.environ)) as llm:
            loaded = time.perf_counter() - started
            results = {workload.name: self._measure(llm, workload, repeats) for workload in chosen}
        if arguments.json:
            document = {name: {key: asdict(value) for key, value in row.items()} for name, row in results.items()}
            print(json.dumps({"model": arguments.model, "load_s": loaded, "workloads": document}))
        else:
            print(f"{arguments.model}, loaded in {loaded:.1f} s; median [min-max] of {repeats}")
            for name, row in results.items():
                print(f"{name:<8} " + "  ".join(f"{key} {_show(value)}" for key, value in row.items()))
        return 0

    def _measure(self, llm: LLM, workload: Workload, repeats: int) -> dict[str, Figure]:
        """One unmeasured run, then the measured ones, each with ids nobody has seen."""
        runs = []
        for repeat in range(repeats + 1):
            print(f"{workload.name}: run {repeat} of {repeats}", file=sys.stderr)
            runs.append(run_workload(llm, workload, seed=repeat))
        return figures(runs[1:])


def _show(figure: Figure) -> str:
    return f"{number(figure.median)} [{number(figure.low)}-{number(figure.high)}]"


@plugin("cli_command")
def create(ctx: PluginContext, options: NoOptions) -> BenchCommand:
    del ctx, options
    return BenchCommand()
