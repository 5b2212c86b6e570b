"""The flags of ``hardpoint bench`` beyond settings: tables of options, and what was given."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import check_option
from hardpoint_bench.peers import PEERS

__all__ = [
    "BOTH",
    "MODEL",
    "REPLAY",
    "RESULTS",
    "SHARED",
    "STEADY",
    "SUITE",
    "Flag",
    "Values",
    "add_flags",
    "every_flag",
    "flags_given",
]


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. Its default stands here and not in the parser, which therefore can tell whether it was given.

    ``kind`` is ``bool`` for a switch; ``repeats`` collects values in a list.
    """

    name: str
    text: str
    default: Any = None
    kind: Any = int
    metavar: str = "N"
    repeats: bool = False
    choices: tuple[str, ...] | None = None

    @property
    def option(self) -> str:
        return f"--{self.name}"

    @property
    def dest(self) -> str:
        """No setting's flag has such a name."""
        return f"bench:{self.name}"

    def spelling(self, value: Any) -> str:
        """As it was written to get ``value``: switches that are on unless told otherwise have two forms."""
        return f"--no-{self.name}" if value is False else self.option

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        text = self.text if self.default in (None, False, 0) else f"{self.text} (default: {self.default})"
        settings: dict[str, Any] = {"dest": self.dest, "default": None, "help": text}
        if self.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction if self.default else "store_true"
        elif self.choices is not None:
            settings["choices"] = self.choices
        else:
            settings.update(type=self.kind, metavar=self.metavar)
        if self.repeats:
            settings["action"] = "append"
        group.add_argument(self.option, **settings)


BOTH = (
    Flag("running", "requests that run at the same time", 256),
    Flag("prompt-len", "tokens of a prompt; of a made-up trace, their mean", 128),
    Flag("shared-prefix", "tokens at the start that prompts share", 0),
    Flag("blocks", "KV blocks, the null block included (default: enough for everybody; of a trace: 8192)"),
    Flag("async", "keep two steps under way, as asynchronous scheduling does", False, bool),
)

STEADY = (
    Flag("waiting", "further requests that wait in the queue", 0),
    Flag("steps", "measured steps", 512),
    Flag("spread-boundaries", "let blocks fill up in turns; without it all do so in the same step", False, bool),
    Flag("ipc", "measure once more with encoding and the way to other processes", True, bool),
    Flag("lookup", "also measure finding a cached prompt of N tokens"),
)

REPLAY = (
    Flag("trace", "JSON lines to replay; - reads standard input", None, str, "FILE"),
    Flag("requests", "replay a made-up trace of N requests instead"),
    Flag("generate-trace", "write the made-up trace to FILE and replay nothing; - prints it", None, str, "FILE"),
    Flag("rate", "made up: requests per second", 10.0, float),
    Flag("output-len", "made up: mean tokens to generate", 64),
    Flag("length-spread", "made up: sigma of the log-normal lengths; 0 makes all alike", 0.0, float),
    Flag("prefixes", "made up: how many different prefixes of --shared-prefix tokens there are", 1),
    Flag("tenants", "made up: tenants, each sending half as much as the one before", 1),
    Flag("priorities", "made up: priorities from 0 to one less", 1),
    Flag("trace-seed", "made up: another seed draws another trace", 0),
    Flag("hash-block", "tokens per hash id of the trace", 512),
    Flag("timestamp-unit", "what 'timestamp' in the trace counts", "ms", str, choices=("ms", "s")),
    Flag("speed", "divide all arrival times: 2 doubles the load", 1.0, float, "X"),
    Flag(
        "step-cost",
        "microseconds of a simulated step: base, per prefill token, per decoding request; "
        "or 'measured': what the scheduler itself takes",
        "5000,30,100",
        str,
        "A,B,C",
    ),
    Flag(
        "compare",
        "replay with a further scheduler, with options if given: KEY for its own, KIND.NAME.KEY for those of another "
        "plugin; repeatable. With a MODEL: a peer, see below",
        None,
        str,
        "NAME[:KEY=VALUE,...]",
        repeats=True,
    ),
    Flag("plot", "draw queue, running requests and blocks over time", None, str, "FILE.png|FILE.svg"),
)


MODEL = (
    Flag("batch", "prompts that are submitted together"),
    Flag("id-seed", "another seed draws other ids; every run of one command has ids of its own", 0),
    Flag("threads", "compute threads of each side (default: what the platform plans)"),
    Flag(
        "peer-python",
        "interpreter that has the compared peer installed (default: this one); NAME=PATH where there are several; "
        "repeatable",
        None,
        str,
        "[NAME=]PATH",
        repeats=True,
    ),
    Flag(
        "peer-model",
        "what the compared peer loads instead of the same files; NAME=PATH where there are several; repeatable",
        None,
        str,
        "[NAME=]PATH",
        repeats=True,
    ),
)
"""Of workloads on a model alone."""

RESULTS = (
    Flag("classes", "precision classes with commas between them (default: fp32,int8,4bit)", None, str, "NAMES"),
    Flag("workloads", "workloads with commas between them (default: all five)", None, str, "NAMES"),
    Flag(
        "peers", "folder with an environment for each peer, named like it, and with converted models", None, str, "DIR"
    ),
    Flag("output", "file of the result, which goes on where it stopped; of `document`: the page", None, str, "FILE"),
    Flag("shrink", "divide the sizes of all workloads, for trying out", 1),
)
"""Of results for the document."""

SUITE = (
    "classes", "workloads", "peers", "output", "shrink", "compare", "peer-python", "threads", "id-seed",
)  # fmt: skip
"""Flags of ``hardpoint bench suite``."""

SHARED = ("prompt-len", "output-len", "shared-prefix", "compare")
"""Flags of the forms above that workloads on a model have, too."""


@dataclass(frozen=True, slots=True)
class Values:
    """Given values and defaults by the names of flags."""

    given: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        value = self.given.get(name)
        return _FLAGS[name].default if value is None else value

    def is_given(self, name: str) -> bool:
        return self.given.get(name) is not None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Values:
        """Those of a command line."""
        given = {name: getattr(arguments, flag.dest) for name, flag in _FLAGS.items()}
        return cls({name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        """Raises ``ConfigError`` for a number outside its bounds."""
        for name, value in self.given.items():
            if _FLAGS[name].kind in (int, float):
                check_option(name, value)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises ``ConfigError`` when any flag of ``names`` was given: nothing is dropped in silence."""
        if alien := [_FLAGS[name].spelling(self.given[name]) for name in names if self.is_given(name)]:
            raise ConfigError(f"{', '.join(alien)}: {why}")


_FLAGS = {flag.name: flag for flag in (*BOTH, *STEADY, *REPLAY, *MODEL, *RESULTS)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    text = (
        "with `scheduler` in the place of MODEL; needs no model. --scheduler, --plugin and the settings under "
        "cache and scheduler count. A step is schedule plus update, for requests that all decode"
    )
    group = parser.add_argument_group("benchmark of a scheduler", text)
    for flag in (*BOTH, *STEADY):
        flag.add_to(group)
    text = "with `scheduler` in the place of MODEL and --trace or --requests: a replay in simulated time"
    group = parser.add_argument_group("replay of a trace", text)
    for flag in REPLAY:
        flag.add_to(group)
    text = (
        "`latency`, `throughput`, `prefill`, `prefix` and `startup` in the place of MODEL and the model behind it. "
        f"{', '.join(f'--{name}' for name in SHARED)} count as well: sizes of the workload, and a peer to compare "
        f"with, one of {', '.join(PEERS)}; repeatable"
    )
    group = parser.add_argument_group("workload on a model", text)
    for flag in MODEL:
        flag.add_to(group)
    text = (
        "`suite`, `scaling` or `convert` in the place of MODEL and the model behind it, or `document` and a file of "
        "their results. --compare, --peer-python, --threads and --id-seed count for `suite` as well"
    )
    group = parser.add_argument_group("results for a document", text)
    for flag in RESULTS:
        flag.add_to(group)


def every_flag() -> list[str]:
    """The names of all of them."""
    return [*_FLAGS]


def flags_given(arguments: argparse.Namespace) -> list[str]:
    """Those on the command line, for the form of the command that has none of them."""
    return [_FLAGS[name].spelling(value) for name, value in Values.of(arguments).given.items()]
