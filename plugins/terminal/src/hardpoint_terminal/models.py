"""``hardpoint models``: which architectures are installed, and what is known of one. Imports no plugin and no torch."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hardpoint.errors import ConfigError, UnsupportedModelError
from hardpoint.interfaces.cli_command import CliCommand
from hardpoint.interfaces.plugin import NoOptions, PluginContext, plugin
from hardpoint.testing.model_facts import InstalledModel, ModelFacts, installed_models
from hardpoint_terminal.output import StandardOutput

__all__ = ["ModelsCommand", "as_json", "create"]

_ABILITIES = {
    "chunk": "prompts in parts",
    "batch": "requests that join and leave a batch",
    "prefix": "shared prefixes",
    "preempt": "preemption",
    "tp2": "tensor parallelism",
    "bfloat16": "bfloat16",
}
"""What a mode shows when it is within its limit."""
_NUM_NEAR = 3


class ModelsCommand(CliCommand):
    help = "List the model architectures that are installed, or show what is known of one."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        choices = parser.add_subparsers(dest="action", required=True, metavar="ACTION", help="list, or show ARCH")
        rows = choices.add_parser("list", help="one line for each architecture")
        rows.add_argument("--task", metavar="TASK", help="only those that serve this task: generate, embed, classify")
        one = choices.add_parser("show", help="all that is known of one architecture")
        one.add_argument("architecture", metavar="ARCH", help="as in the model's config.json, under 'architectures'")
        for sub in (rows, one):
            sub.add_argument("--json", action="store_true", help="print stable JSON instead of text")

    def run(self, arguments: argparse.Namespace) -> int:
        """Raises ``UnsupportedModelError`` naming the nearest architectures when there is no such one, ``ConfigError``
        naming the tasks for one that nothing installed serves."""
        out = StandardOutput()
        installed = installed_models()
        for entry in installed.refused:
            print(f"hardpoint: {entry.name} ({entry.distribution}) is not usable: {entry.reason}", file=sys.stderr)
        for fault in dict.fromkeys(fault for model in installed.models for fault in model.faults):
            print(f"hardpoint: {fault}", file=sys.stderr)
        if arguments.action == "list":
            chosen = _serving(arguments.task, installed.models)
            shown: list[Any] = [_summary(model) for model in chosen]
            lines = _table([*map(_row, chosen)])
        else:
            chosen = _find(arguments.architecture, installed.models)
            shown = [as_json(model) for model in chosen]
            lines = [line for model in chosen for line in _description(model)]
        out.line(json.dumps(shown, indent=2, ensure_ascii=False) if arguments.json else "\n".join(lines))
        return 0


def _serving(task: str | None, models: Sequence[InstalledModel]) -> list[InstalledModel]:
    if task is None:
        return list(models)
    found = [model for model in models if task in (model.tasks or ())]
    if not found and models:
        tasks = sorted({known for model in models for known in model.tasks or ()})
        raise ConfigError(
            f"no installed architecture serves the task {task!r:.80}; give --task one of {', '.join(tasks)}"
        )
    return found


def _find(name: str, models: Sequence[InstalledModel]) -> list[InstalledModel]:
    found = [model for model in models if model.architecture == name]
    if found:
        return found
    names = list(dict.fromkeys(model.architecture for model in models))
    lower = {known.lower(): known for known in names}
    near = [known for known in names if name and name.lower() in known.lower()]
    near += [lower[word] for word in difflib.get_close_matches(name.lower(), list(lower), n=_NUM_NEAR)]
    nearest = ", ".join(list(dict.fromkeys(near))[:_NUM_NEAR])
    hint = f"; the nearest are {nearest}" if nearest else ""
    raise UnsupportedModelError(
        f"no installed plugin has the architecture {name!r:.200}{hint}; "
        "`hardpoint models list` shows all, `hardpoint plugins doctor --model MODEL` what would run such a model here, "
        "and a distribution with a plugin for it can be installed"
    )


def _below(power: int | None) -> str:
    return "" if power is None else f"1e{power}"


def _summary(model: InstalledModel) -> dict[str, Any]:
    """The stable form of ``list --json``; errors are relative, and null where none was measured."""
    facts = model.facts or ModelFacts()
    power, low = facts.worst(), facts.worst(low_precision=True)
    return {
        "architecture": model.architecture,
        "distribution": model.distribution,
        "version": model.version,
        "tasks": None if model.tasks is None else list(model.tasks),
        "formats": list(model.formats),
        "verified": model.is_verified,
        "configurations": len(facts.comparisons),
        "float32_error_below": None if power is None else float(f"1e{power}"),
        "bfloat16_error_below": None if low is None else float(f"1e{low}"),
    }


def as_json(model: InstalledModel) -> dict[str, Any]:
    """The stable form of ``show --json``: what ``list`` says, and everything else that is known."""
    facts = model.facts or ModelFacts()
    return {
        **_summary(model),
        "factory": model.entry_point,
        "whole_prompts": model.whole_prompts,
        "inputs": {kind: dict(arrays) for kind, arrays in model.inputs.items()},
        "shown": list(facts.passed),
        "comparisons": [{"configuration": one.configuration, "modes": one.modes} for one in facts.comparisons],
        "not_run": {reason: list(modes) for reason, modes in facts.not_run.items()},
        "claims": [{"model": one.model or None, "claim": one.claim, "test": one.test} for one in facts.claims],
    }


def _row(model: InstalledModel) -> tuple[str, ...]:
    return (
        model.architecture,
        ", ".join(model.tasks) if model.tasks is not None else "not told",
        ", ".join(model.formats) or "-",
        _verdict(model),
        f"{model.distribution} {model.version}",
    )


def _verdict(model: InstalledModel) -> str:
    facts = model.facts
    if facts is None or not (facts.comparisons or facts.claims):
        return "no record"
    if not facts.comparisons:
        return "by tests of its own"
    if not model.is_verified:
        return "over the limit"
    return f"below {_below(facts.worst())} in {_configurations(facts)}"


def _configurations(facts: ModelFacts) -> str:
    count = len(facts.comparisons)
    return f"{count} configuration{'s' if count != 1 else ''}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["no architecture"]
    rows = [("ARCHITECTURE", "TASKS", "FORMATS", "ERROR IN FLOAT32", "DISTRIBUTION"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _description(model: InstalledModel) -> Iterator[str]:
    facts = model.facts or ModelFacts()
    yield model.architecture
    yield f"  plugin      {model.distribution} {model.version}, {model.entry_point}"
    yield f"  tasks       {', '.join(model.tasks) if model.tasks is not None else 'its manifest does not tell'}"
    yield f"  formats     {', '.join(model.formats) or 'no installed weight loader tells that it reads it'}"
    if model.whole_prompts:
        yield "  limits      a prompt is computed in one step, and no prefix of it is kept"
    for kind, arrays in model.inputs.items():
        yield f"  takes       {kind}: {'; '.join(f'{name} {form}' for name, form in arrays.items())}"
    if able := [words for mode, words in _ABILITIES.items() if mode in facts.passed]:
        yield f"  shown       {', '.join(able)}"
    yield f"  verified    {_verdict(model)}"
    for one in facts.comparisons:
        cells = ", ".join(f"{mode} {cell}" for mode, cell in one.modes.items() if cell != "not run")
        yield f"    {one.configuration}: {cells}"
    for reason, modes in facts.not_run.items():
        yield f"  not run     {', '.join(modes)}: {reason}"
    for claim in facts.claims:
        yield f"  shown too   {claim.model + ': ' if claim.model else ''}{claim.claim} ({claim.test})"


@plugin("cli_command")
def create(ctx: PluginContext, options: NoOptions) -> ModelsCommand:
    del ctx, options
    return ModelsCommand()
