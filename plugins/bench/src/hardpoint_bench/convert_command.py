"""``hardpoint bench convert MODEL --peers FOLDER``: one model in the formats of all peers."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint_bench.classes import EXPORTS, VARIANTS
from hardpoint_bench.inventory import MODELS
from hardpoint_bench.sides import PROGRAMS, SideFault
from hardpoint_bench.suite_command import config_of, facts_of, known_values

__all__ = ["commands", "run_convert"]

_EXPORTER = Path("convert", "bin", "optimum-cli")
_TASK = ("--task", "text-generation-with-past")
_EXPORTED = "hf-fp32"


def run_convert(arguments: argparse.Namespace, model: str | None) -> int:
    """Writes what is not there yet. Raises ``ConfigError``, and ``SideFault`` where a conversion fails."""
    values = known_values(arguments, "convert", ("peers",))
    config = config_of(arguments, "convert", model)
    if not values["peers"]:
        raise ConfigError("convert needs --peers FOLDER: models are written into its folder 'models'")
    source = Path(facts_of(config)["model_path"])
    if source.suffix != ".gguf":
        raise ConfigError(
            f"{str(source)!r} is no GGUF file, which is all that can be converted; compare with one workload and give "
            "peers a model of their own with --peer-model"
        )
    folder = Path(values["peers"])
    (folder / MODELS).mkdir(parents=True, exist_ok=True)
    wanted = {
        name: command for name, command in commands(source, folder).items() if not (folder / MODELS / name).exists()
    }
    for name, command in wanted.items():
        print(f"writing {folder / MODELS / name}", file=sys.stderr)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["without a word"]
            raise SideFault(f"{folder / MODELS / name} cannot be written: {words[-1]}")
    report = {"folder": str(folder / MODELS), "written": list(wanted)}
    print(json.dumps(report) if arguments.json else f"{folder / MODELS}: {len(wanted)} new")
    return 0


def commands(source: Path, folder: Path) -> Mapping[str, Sequence[str]]:
    """By the name of what they write below ``folder``, in their order: exports start from a converted model."""
    ours = (sys.executable, str(PROGRAMS / "convert.py"), str(source), str(folder / MODELS))
    found: dict[str, Sequence[str]] = {name: (*ours, name) for name in VARIANTS}
    if (exporter := folder / _EXPORTER).exists():
        start = (str(exporter), "export", "openvino", "--model", str(folder / MODELS / _EXPORTED), *_TASK)
        found |= {name: (*start, *options, str(folder / MODELS / name)) for name, options in EXPORTS.items()}
    return found
