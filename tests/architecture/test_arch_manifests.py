"""Every distribution with plugins ships a manifest, and it says what the code declares."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from generate_docs import options_models
from hardpoint.interfaces.plugin import declaration_of
from hardpoint.plugins.manifest import MANIFEST_FILE
from hardpoint.plugins.options import schema_faults
from hardpoint.testing.manifest_writer import manifest_text, manifests_of
from workspace import ROOT, Distribution, plugin_distributions, read_toml

WITH_PLUGINS = [dist for dist in plugin_distributions() if set(dist.entry_points) - {"hardpoint.conformance.v1"}]


@pytest.mark.parametrize("dist", WITH_PLUGINS, ids=lambda dist: dist.name)
def test_the_manifest_is_in_step_with_the_code(dist: Distribution) -> None:
    path = dist.source / MANIFEST_FILE
    ((written, text),) = manifests_of(dist.name).items()
    assert written.resolve() == path.resolve(), f"{dist.name} has plugins outside of its package {dist.package}"
    advice = f"run `hardpoint plugins manifest {dist.name}`"
    assert path.is_file(), f"{path} is missing; {advice}"
    assert path.read_text(encoding="utf-8") == text, f"{path} is stale; {advice}"


EXAMPLES = sorted((ROOT / "examples_plugins").glob(f"*/src/*/{MANIFEST_FILE}"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_manifests_of_examples_are_in_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from their sources, since they are not installed by default."""
    folder = path.parents[2]
    monkeypatch.syspath_prepend(str(folder / "src"))
    declared = {}
    for group, names in read_toml(folder / "pyproject.toml")["project"]["entry-points"].items():
        kind = group.removeprefix("hardpoint.").partition(".")[0]
        for name, target in names.items() if kind != "conformance" else ():
            module, _, attribute = target.partition(":")
            declared[kind, name] = declaration_of(attrgetter(attribute)(importlib.import_module(module)))
    told = {key: declaration for key, declaration in declared.items() if declaration is not None}
    assert told.keys() == declared.keys()
    assert path.read_text(encoding="utf-8") == manifest_text(told), (
        f"run `hardpoint plugins manifest` for {folder.name}"
    )


def test_no_manifest_lies_where_nothing_keeps_it_in_step() -> None:
    owned = {dist.source / MANIFEST_FILE for dist in WITH_PLUGINS}
    stray = [path for dist in plugin_distributions() for path in dist.folder.rglob(MANIFEST_FILE) if path not in owned]
    assert stray == []


def test_wheels_carry_the_manifest(tmp_path: Path) -> None:
    (dist,) = [dist for dist in WITH_PLUGINS if dist.name == "hardpoint-serving"]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=dist.folder, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert f"{dist.package}/{MANIFEST_FILE}" in archive.namelist()


OWN_OPTIONS = [
    pytest.param(kind, name, model, key, id=f"{kind}.{name}.{key}")
    for kind, name, model in options_models()
    for key in model.model_fields
]
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 300), st.floats(), st.text(max_size=4)),
    st.sampled_from(["8", " 8", "0.5", "yes", "1e3", "torch_reference"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(max_size=3), SCALARS, max_size=3))


def shipped_schema(kind: str, name: str) -> dict[str, Any]:
    for dist in WITH_PLUGINS:
        entry = json.loads((dist.source / MANIFEST_FILE).read_text(encoding="utf-8"))["plugins"].get(kind, {}).get(name)
        if entry is not None:
            options: dict[str, Any] = entry["options"]
            return options
    raise LookupError(f"no manifest tells of {kind}:{name}")


@pytest.mark.parametrize(("kind", "name", "model", "key"), OWN_OPTIONS)
@settings(max_examples=25, deadline=None)
@given(value=VALUES)
def test_the_launcher_accepts_what_our_plugins_accept(
    kind: str, name: str, model: type[BaseModel], key: str, value: Any
) -> None:
    faults = schema_faults(kind, name, shipped_schema(kind, name), {key: value})
    try:
        model.model_validate({key: value})
    except ValidationError:
        return
    assert faults == []
