"""Every process of an instance sees an equal options object, whichever source set it; bad ones stop the launcher."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hardpoint.config import add_arguments, load_config
from hardpoint.config.plugin_options import add_plugin_flags
from hardpoint.errors import ConfigError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.resolve import build_plan, resolve_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.process import spawn
from hardpoint.roles import ProcessRole
from hardpoint.testing.manifest_writer import manifests_of

if TYPE_CHECKING:
    from .conftest import Site

PLUGIN = """
import enum
from pathlib import Path
from pydantic import BaseModel, ConfigDict, Field
from hardpoint.interfaces.plugin import plugin

class Mode(enum.StrEnum):
    FAST = "fast"
    EXACT = "exact"

class Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    low: int = 0
    high: float = 1.0

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    file: Path = Field(default=Path("a"), json_schema_extra={"flag": "--keeper-file"})
    every: int = Field(default=1, ge=1, le=2**40)
    ratio: float = Field(default=0.5, gt=0)
    mode: Mode = Mode.FAST
    names: frozenset[str] = frozenset()
    pairs: tuple[tuple[str, int], ...] = ()
    limits: Limits = Limits()
    table: dict[str, float] = {}
    note: str | None = None

class Keeper:
    def __init__(self, options):
        self.options = options

@plugin("hooks", options=Options)
def create(ctx, options):
    return Keeper(options)
"""
ENTRY = """
import msgspec
from hardpoint.process import boot
from hardpoint.roles import ProcessRole

def tell(payload):
    plan, roles, rank, path = msgspec.msgpack.decode(payload, type=tuple[bytes, list[str], int | None, str])
    runtime = boot(plan, [ProcessRole(role) for role in roles], rank=rank)
    keeper = runtime.create("hooks", "keeper", runtime.context("hooks", "keeper"))
    with open(path, "w") as file:
        file.write(keeper.options.model_dump_json())
"""
FILE = """
model: m
plugins:
  hooks:
    keeper:
      every: "1099511627776"
      ratio: 1
      names: [b, a, a]
      pairs: [[x, 1], [y, "2"]]
      limits: {low: 3, high: "1e-9"}
      table: {ä: 0.1, b: 3}
      mode: fast
"""
PROCESSES: list[tuple[list[str], int | None]] = [
    (["api"], None),
    (["engine"], None),
    (["worker"], 1),
    (["engine", "worker"], 0),
    (["api", "engine", "worker", "launcher"], None),
]


@pytest.fixture
def keeper(site: Site) -> Site:
    site.install("dist-keeper", {"hooks:keeper": "keeper_pkg.plugin:create"}, modules={"keeper_pkg.plugin": PLUGIN})
    site.write_module("keeper_entry", ENTRY)
    for path, text in manifests_of("dist-keeper").items():
        path.write_text(text)
    del sys.modules["keeper_pkg.plugin"], sys.modules["keeper_pkg"]
    return site


def configured(tmp_path: Path) -> dict[str, Any]:
    """Options from a file, the environment, ``--plugin`` and a flag at once."""
    path = tmp_path / "settings.yaml"
    path.write_text(FILE)
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=False)
    add_plugin_flags(parser)
    flags = ["--config", str(path), "--plugin", "hooks.keeper.note=1e3", "--keeper-file", "/tmp/out"]
    return load_config(parser.parse_args(flags), {"HARDPOINT_PLUGIN__HOOKS__KEEPER__MODE": "exact"}).plugins


def planned(options: dict[str, Any]) -> PluginPlan:
    return build_plan(discover(), PluginSelection(options=options, allow=("keeper",)))


@pytest.mark.usefixtures("keeper")
def test_every_process_sees_an_equal_object(tmp_path: Path) -> None:
    """The launcher's own included; each child is a fresh interpreter that knows the plan's bytes alone."""
    plan = planned(configured(tmp_path))
    launcher = PluginRuntime(plan, {ProcessRole.LAUNCHER})
    mine = launcher.create("hooks", "keeper", launcher.context("hooks", "keeper")).options
    told = []
    for number, (roles, rank) in enumerate(PROCESSES):
        path = tmp_path / f"{number}.json"
        payload = msgspec.msgpack.encode((plan.to_bytes(), roles, rank, str(path)))
        child = spawn("keeper_entry:tell", payload, name="+".join(roles))
        assert child.wait(30) == 0
        child.close()
        told.append(type(mine).model_validate_json(path.read_text()))
    assert told == [mine] * len(PROCESSES)
    assert mine.model_dump(mode="json") == {
        "file": "/tmp/out",
        "every": 2**40,
        "ratio": 1.0,
        "mode": "exact",
        "names": list(mine.names),
        "pairs": [["x", 1], ["y", 2]],
        "limits": {"low": 3, "high": 1e-9},
        "table": {"ä": 0.1, "b": 3.0},
        "note": "1e3",
    }


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"every": 0}, "plugins.hooks.keeper.every: Input should be greater than or equal to 1 (given: 0)"),
        ({"every": "many"}, "plugins.hooks.keeper.every: Input should be a valid integer"),
        ({"mode": "slow"}, "plugins.hooks.keeper.mode: Input should be 'fast' or 'exact' (given: 'slow')"),
        ({"limits": {"low": "x"}}, "plugins.hooks.keeper.limits.low: Input should be a valid integer"),
        ({"limits": {"lo": 1}}, "plugins.hooks.keeper.limits.lo: Extra inputs are not permitted"),
        ({"evry": 1}, "unknown option plugins.hooks.keeper.evry (did you mean 'every'?)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("keeper")
def test_a_bad_option_fails_in_the_launcher_before_any_import(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        planned({"hooks": {"keeper": options}})
    assert fault in str(raised.value)
    assert "keeper_pkg.plugin" not in sys.modules


@pytest.mark.usefixtures("keeper")
def test_every_fault_is_told_at_once() -> None:
    options = {"hooks": {"keeper": {"every": 0, "ratio": -1, "mode": "x"}}}
    _, problems = resolve_plan(discover(), PluginSelection(options=options))
    assert len(problems) == 3
    assert all(isinstance(problem, ConfigError) for problem in problems)


@pytest.mark.usefixtures("keeper")
def test_what_a_child_would_convert_may_be_given_as_text() -> None:
    plan = planned({"hooks": {"keeper": {"every": "8", "ratio": "0.25", "limits": {"low": 3.0}}}})
    assert plan.find("hooks", "keeper").options == {"every": "8", "ratio": "0.25", "limits": {"low": 3.0}}
    assert "keeper_pkg.plugin" not in sys.modules


def test_a_required_option_is_missed_in_the_launcher(site: Site) -> None:
    """Also when nothing at all is set for a plugin that was named."""
    source = PLUGIN.replace("note: str | None = None", "must: str")
    site.install("dist-needy", {"hash:needy": "needy_pkg.plugin:create"}, modules={"needy_pkg.plugin": source})
    site.write_module("needy_pkg.plugin", source.replace('"hooks"', '"hash"'))
    for path, text in manifests_of("dist-needy").items():
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"plugins\.hash\.needy\.must: Field required"):
        build_plan(discover(), PluginSelection(choices={"hash": "needy"}))
    build_plan(discover(), PluginSelection(choices={"hash": "needy"}, options={"hash": {"needy": {"must": "x"}}}))
    build_plan(discover(), PluginSelection())


def test_a_damaged_manifest_of_a_named_plugin_is_one_problem(keeper: Site) -> None:
    (keeper.root / "keeper_pkg" / "hardpoint.json").write_text("{")
    selection = PluginSelection(options={"hooks": {"keeper": {"every": 2}}}, choices={"hooks": "keeper"})
    _, problems = resolve_plan(discover(), selection)
    assert [str(problem) for problem in problems if "keeper_pkg" in str(problem)] == [str(problems[0])]
