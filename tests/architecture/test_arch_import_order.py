"""L12.3: importing resolves nothing. Plugins may be imported first, in any order, and everything is decided later."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from workspace import plugin_distributions

pytestmark = pytest.mark.timeout(240)

MODULES = sorted({
    target.partition(":")[0]
    for distribution in plugin_distributions()
    for names in distribution.entry_points.values()
    for target in names.values()
})  # fmt: skip
IMPORT_FIRST = """
import importlib, json, os, sys, threading

DECISIONS = {"discover", "scan_metadata", "build_plan", "resolve_plan", "select_platform", "load_factory", "create_all",
             "from_runtime", "boot", "verify"}
seen, threads, variables = [], threading.active_count(), dict(os.environ)

def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name in DECISIONS and f"{os.sep}hardpoint{os.sep}" in code.co_filename:
        seen.append(code.co_name)

sys.setprofile(watch)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
sys.setprofile(None)
early = list(seen)

sys.setprofile(watch)
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.platform_selection import select_platform
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
found = discover()
name, _ = select_platform(build_plan(found, PluginSelection(allow=("cpu",))), installed=found)
sys.setprofile(None)
print(json.dumps({"early": early, "later": sorted({*seen}), "platform": name}))
"""


@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_importing_plugins_first_decides_nothing(backwards: bool) -> None:
    """L12.3: no scan, plan, choice or creation happens while the modules of all plugins are imported."""
    modules = sorted(MODULES, reverse=backwards)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_FIRST, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["early"] == []
    assert {"discover", "build_plan", "select_platform"} <= set(told["later"]), "the watch sees nothing"
    assert told["platform"] == "cpu"


@pytest.mark.parametrize("module", ["hardpoint", "hardpoint.interfaces", "hardpoint.config", "hardpoint.process"])
def test_importing_the_core_decides_nothing(module: str) -> None:
    """L12.3."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_FIRST, json.dumps([module])],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["early"] == []
