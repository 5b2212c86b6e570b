"""How many lines an architecture takes beside the layer library, and the page that says so for all of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from import_rules import imports_of, module_name
from workspace import ROOT, read_toml

__all__ = ["LIBRARY", "Size", "architectures_page", "entries", "own_modules", "path_of", "sizes"]

FOLDER = ROOT / "plugins/models"
SOURCE = FOLDER / "src"
PACKAGE = "hardpoint_models"
LIBRARY = {
    f"{PACKAGE}.{name}"
    for name in (
        "building", "causal", "config_fields", "decoder", "decoder_attention", "decoder_config", "decoder_layers",
        "layer_kinds", "pooled_model",
    )
}  # fmt: skip
"""What architectures are made of, whichever they are."""
NUM_SMALLEST = 5
ROUNDED_TO = 50
"""Lines that the page rounds up to, so that not every edit of a large file is one of the page."""


@dataclass(frozen=True, slots=True)
class Size:
    """A file with architectures. ``num_lines`` are all lines, prose and imports included, of it and of the modules
    ``brought`` that it does not share with the library or find where other architectures live."""

    home: str
    architectures: tuple[str, ...]
    brought: tuple[str, ...]
    num_lines: int


def entries() -> dict[str, str]:
    """Architecture to the module of its factory, from the project file."""
    points = read_toml(FOLDER / "pyproject.toml")["project"]["entry-points"]["hardpoint.model.v1"]
    return {name: target.partition(":")[0] for name, target in points.items()}


def path_of(module: str) -> Path:
    return SOURCE / f"{module.replace('.', '/')}.py"


@cache
def _imported(module: str) -> frozenset[str]:
    path = path_of(module)
    found = imports_of(path.read_text(encoding="utf-8"), module_name(path, SOURCE), False)
    return frozenset(one.module for one in found if one.module.startswith(f"{PACKAGE}."))


def own_modules(module: str, others: set[str]) -> set[str]:
    """The module with those that it brings along: neither the library nor where other architectures live."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [one for one in _imported(name) if one not in LIBRARY | others]
    return found


def sizes() -> list[Size]:
    """Every file with architectures, the smallest first."""
    homes: dict[str, list[str]] = {}
    for architecture, home in entries().items():
        homes.setdefault(home, []).append(architecture)
    found = []
    for home, names in homes.items():
        own = own_modules(home, set(homes))
        lines = sum(len(path_of(one).read_text(encoding="utf-8").splitlines()) for one in own)
        brought = tuple(sorted(one.rpartition(".")[2] for one in own - {home}))
        found.append(Size(home, tuple(sorted(names)), brought, lines))
    return sorted(found, key=lambda size: (size.num_lines, size.home))


def up_to(number: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-number // step) * step


def architectures_page(note: str) -> str:
    """``docs/models/architectures.md``; ``note`` says who writes it."""
    rows = sizes()
    smallest = [f"`{size.home.rpartition('.')[2]}.py` {size.num_lines}" for size in rows[:NUM_SMALLEST]]
    library = sum(len(path_of(one).read_text(encoding="utf-8").splitlines()) for one in LIBRARY)
    lines = ["| lines, up to | file | brings along | architectures |", "|--:|---|---|---|"]
    for size in rows:
        brought = ", ".join(f"`{name}.py`" for name in size.brought) or "–"
        names = ", ".join(f"`{name}`" for name in size.architectures)
        lines.append(
            f"| {up_to(size.num_lines, ROUNDED_TO)} | `{size.home.rpartition('.')[2]}.py` | {brought} | {names} |"
        )
    served = ["| architecture | tasks | formats |", "|---|---|---|"]
    served += [f"| `{name}` | {tasks} | {formats} |" for name, tasks, formats in _served()]
    text = _TEXT.format(smallest=", ".join(smallest), library=f"{up_to(library, 200):,}", num=len(entries()))
    parts = [note, "# Architectures", text.strip(), "\n".join(served), _SIZES.strip(), "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _manifest(package: str, kind: str) -> Mapping[str, Any]:
    path = ROOT / f"plugins/{package.removeprefix('hardpoint_')}/src/{package}/hardpoint.json"
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["plugins"][kind]
    return {name: entry.get("capabilities", {}) for name, entry in found.items()}


def _served() -> list[tuple[str, str, str]]:
    models, loaders = _manifest(PACKAGE, "model"), _manifest("hardpoint_model_io", "weight_loader")
    reads = {name: told.get("architectures", ()) for name, told in loaders.items()}
    return [
        (
            name,
            ", ".join(told["tasks"]),
            ", ".join(one for one, known in reads.items() if known == "any" or name in known),
        )
        for name, told in sorted(models.items())
    ]


_TEXT = """
The {num} architectures of `hardpoint-models`, from its entry points, manifests and files.
[How they compare](../models.md) with `transformers` is measured; what they are made of is counted here.

The five smallest files with architectures have, all lines counted: {smallest}.
The layer library that all of them draw on has fewer than {library} lines,
beside the layers of `hardpoint-torch-runtime`.
"""

_SIZES = """
## What each one takes

All lines of a file are counted, those of imports, prose and blank ones too, and those of each module that it brings
along: modules of the package that are neither part of the library nor the home of other architectures. Modules that
several files bring along count for each of them.
"""
