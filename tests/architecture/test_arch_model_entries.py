"""What a decoder architecture costs: code of its own only where it differs from the layer library."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from import_rules import imports_of, module_name
from workspace import ROOT

SOURCE = ROOT / "plugins/models/src"
PACKAGE = "hardpoint_models"
LIBRARY = {
    f"{PACKAGE}.{name}"
    for name in (
        "building", "causal", "config_fields", "decoder", "decoder_attention", "decoder_config", "decoder_layers",
        "layer_kinds",
    )
}  # fmt: skip
"""What architectures are made of, whichever they are."""
NUM_SMALLEST, MAX_LINES = 5, 120


def entries() -> dict[str, str]:
    """Architecture to the module of its factory."""
    points = entry_points(group="hardpoint.model.v1")
    return {point.name: point.module for point in points if point.module.split(".")[0] == PACKAGE}


def path_of(module: str) -> Path:
    return SOURCE / f"{module.replace('.', '/')}.py"


def own_modules(module: str, others: set[str]) -> set[str]:
    """The module with those that it brings along: neither the library nor where other architectures live."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        path = path_of(name)
        source = path.read_text(encoding="utf-8")
        imported = {one.module for one in imports_of(source, module_name(path, SOURCE), False)}
        waiting += [one for one in imported if one.startswith(f"{PACKAGE}.") and one not in LIBRARY | others]
    return found


def test_the_library_is_what_it_is_taken_for() -> None:
    assert [module for module in sorted(LIBRARY) if not path_of(module).is_file()] == []
    assert LIBRARY.isdisjoint(entries().values())


def test_the_smallest_architectures_take_few_lines() -> None:
    homes = set(entries().values())
    lines = {
        home: sum(len(path_of(one).read_text(encoding="utf-8").splitlines()) for one in own_modules(home, homes))
        for home in homes
    }
    smallest = sorted(lines.items(), key=lambda item: item[1])[:NUM_SMALLEST]
    assert len(smallest) == NUM_SMALLEST
    assert [(home, count) for home, count in smallest if count >= MAX_LINES] == []
