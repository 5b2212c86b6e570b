"""``hardpoint plugins manifest``: writes the file from the declarations, and says when it is stale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hardpoint.errors import ConfigError, PluginError, PluginNotFoundError
from hardpoint.interfaces.plugin import PluginDeclaration
from hardpoint.plugins.cli import run_plugins
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.manifest import load_manifest
from hardpoint.plugins.resolve import resolve_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing.manifest_writer import manifest_text, manifests_of

if TYPE_CHECKING:
    from .conftest import Site

PLUGIN = """
from pydantic import BaseModel, Field
from hardpoint.interfaces.plugin import plugin

class Options(BaseModel):
    '''What one may set.'''
    size: int = Field(default=1, ge=1, description="how much")
    words: frozenset[str] = Field(default=frozenset("abcdefgh"), description="some")

@plugin("endpoint", options=Options, required_tasks=frozenset({"pooling", "embed"}), capabilities={"b": {"z", "a"}})
def one(ctx, options): return object()

@plugin("model", capabilities={"tasks": ["generate"]})
def two(ctx, options): return object()

def bare(ctx, options): return object()

class Kit: pass
"""
ENTRIES = {
    "endpoint:one": "made_pkg.plugin:one",
    "model:TwoForCausalLM": "made_pkg.plugin:two",
    "hash:bare": "made_pkg.plugin:bare",
    "conformance:endpoint.one": "made_pkg.plugin:Kit",
}


@pytest.fixture
def made(site: Site) -> Path:
    """Path of the manifest that is to be written."""
    site.install("dist-made", ENTRIES, modules={"made_pkg.plugin": PLUGIN})
    return site.root / "made_pkg" / "hardpoint.json"


def test_it_writes_what_the_plugins_declare(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plugins(["manifest", "Dist_Made"]) == 0
    assert capsys.readouterr().out == f"wrote {made}\n"
    written = json.loads(made.read_text())
    assert written["manifest_version"] == 1
    assert list(written["plugins"]) == ["endpoint", "hash", "model"]
    one = written["plugins"]["endpoint"]["one"]
    assert one["required_tasks"] == ["embed", "pooling"]
    assert one["capabilities"] == {"b": ["a", "z"]}
    assert list(one["options"]["properties"]) == ["size", "words"]
    assert one["options"]["properties"]["size"] == {
        "default": 1,
        "description": "how much",
        "minimum": 1,
        "title": "Size",
        "type": "integer",
    }
    assert written["plugins"]["model"]["TwoForCausalLM"]["architectures"] == ["TwoForCausalLM"]
    assert written["plugins"]["hash"]["bare"]["options"]["additionalProperties"] is False


def test_the_core_reads_what_it_wrote(made: Path) -> None:
    assert run_plugins(["manifest", "dist-made"]) == 0
    found = {plugin.name: load_manifest(plugin) for plugin in discover().plugins if plugin.distribution == "dist-made"}
    assert found["endpoint.one"] is None
    one = found["one"]
    assert one is not None
    assert one.required_tasks == ("embed", "pooling")
    assert set(one.option_schemas) == {"size", "words"}


def test_tasks_keep_an_endpoint_out_without_an_import(made: Path) -> None:
    """R12.49: by the manifest alone."""
    run_plugins(["manifest", "dist-made"])
    del sys.modules["made_pkg.plugin"]
    selection = PluginSelection(endpoints=("one",), tasks=("generate",))
    plan, _ = resolve_plan(discover(), selection)
    (refused,) = [entry for entry in plan.refused if entry.name == "one"]
    assert refused.reason == "it serves embed, pooling; this server offers generate"
    assert "made_pkg.plugin" not in sys.modules


def test_check_tells_the_difference_and_writes_nothing(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plugins(["manifest", "dist-made", "--check"]) == 1
    assert not made.exists()
    run_plugins(["manifest", "dist-made"])
    assert run_plugins(["manifest", "dist-made", "--check"]) == 0
    assert "is in step with the code" in capsys.readouterr().out
    stale = made.read_text().replace('"minimum": 1', '"minimum": 0')
    made.write_text(stale)
    assert run_plugins(["manifest", "dist-made", "--check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"--- {made}"
    assert [line.strip() for line in lines if line[0] in "+-" and "minimum" in line] == [
        '-              "minimum": 0,',
        '+              "minimum": 1,',
    ]
    assert made.read_text() == stale


def test_another_place(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    assert run_plugins(["manifest", "dist-made", "--write", str(other)]) == 0
    assert run_plugins(["manifest", "dist-made", "--write", str(other), "--check"]) == 0
    capsys.readouterr()
    assert run_plugins(["manifest", "dist-made", "--stdout"]) == 0
    assert capsys.readouterr().out == other.read_text()
    assert not made.exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        run_plugins(["manifest", "dist-made", "--write", str(tmp_path / "no" / "such" / "folder.json")])
    with pytest.raises(ConfigError, match="leave out --stdout"):
        run_plugins(["manifest", "dist-made", "--stdout", "--check"])


def test_the_same_declarations_give_the_same_text(made: Path, site: Site) -> None:
    """Sets have another order in every process; the file has not."""
    texts = {
        subprocess.run(
            [sys.executable, "-m", "hardpoint.cli", "plugins", "manifest", "dist-made", "--stdout"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(site.root), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1


def test_each_package_gets_its_own(site: Site, tmp_path: Path) -> None:
    site.install(
        "dist-two",
        {"hash:a": "left_pkg.plugin:bare", "hash:b": "right_pkg.plugin:bare"},
        modules={"left_pkg.plugin": PLUGIN, "right_pkg.plugin": PLUGIN},
    )
    assert run_plugins(["manifest", "dist-two"]) == 0
    for package, name in (("left_pkg", "a"), ("right_pkg", "b")):
        assert list(json.loads((site.root / package / "hardpoint.json").read_text())["plugins"]["hash"]) == [name]
    with pytest.raises(ConfigError, match="plugins in 2 packages"):
        run_plugins(["manifest", "dist-two", "--write", str(tmp_path / "one.json")])


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"hash:x": "lost_pkg.plugin:missing"}, r"hash:x \(dist-x\) cannot be imported: AttributeError"),
        ({"hash:x": "lost_pkg.nowhere:create"}, r"hash:x \(dist-x\) cannot be imported: ModuleNotFoundError"),
        ({"hash:x": "lost_pkg.plugin:one"}, "declared as a endpoint plugin, but its entry point says hash"),
        ({"hash:x": "lost_module:create"}, "'lost_module' is a single module"),
        ({"hardpoint.hash.v9|x": "lost_pkg.plugin:bare"}, r"plugins that this core refuses.*API version 9"),
    ],
    ids=str,
)
def test_what_cannot_be_described(site: Site, entries: dict[str, str], told: str) -> None:
    site.install("dist-x", entries, modules={"lost_pkg.plugin": PLUGIN, "lost_module": "def create(c, o): ..."})
    with pytest.raises(PluginError, match=told):
        manifests_of("dist-x")


def test_an_unknown_distribution_gets_a_suggestion(made: Path) -> None:
    with pytest.raises(PluginNotFoundError, match=r"'dist-mode' has plugins \(did you mean 'dist-made'\?\)"):
        run_plugins(["manifest", "dist-mode"])


def test_capabilities_must_be_plain() -> None:
    declaration: PluginDeclaration = PluginDeclaration("hash", capabilities={"kernel": object()})
    with pytest.raises(PluginError, match="capabilities of hash:mine are no plain data"):
        manifest_text({("hash", "mine"): declaration})
