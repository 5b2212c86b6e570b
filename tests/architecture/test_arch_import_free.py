"""Commands that only tell load neither torch nor transformers nor any plugin, and are quick."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from workspace import plugin_distributions

SCRIPT = """
import json, sys
sys.argv = ["hardpoint", *{arguments!r}]
from hardpoint.cli import main
try:
    status = main()
except SystemExit as stop:
    status = stop.code
tops = sorted({{name.partition(".")[0] for name in sys.modules}})
print("\\n" + json.dumps([status or 0, tops]))
"""
FORBIDDEN = {"torch", "transformers"} | {distribution.package for distribution in plugin_distributions()}
MAX_VERSION_SECONDS = 0.3


def modules_after(source: str) -> tuple[int, set[str]]:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    status, names = json.loads(done.stdout.splitlines()[-1])
    return status, set(names)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["plugins", "list"], ["plugins", "--help"]], ids=" ".join
)
def test_command_imports_neither_torch_nor_plugins(arguments: list[str]) -> None:
    """L12.9."""
    status, names = modules_after(SCRIPT.format(arguments=arguments))
    assert status == 0
    assert names & FORBIDDEN == set()


def test_importing_the_package_and_its_interfaces_is_as_light() -> None:
    source = (
        "import json, sys, hardpoint, hardpoint.interfaces;"
        "print(json.dumps([0, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    _, names = modules_after(source)
    assert names & FORBIDDEN == set()


def test_version_is_told_within_its_budget() -> None:
    """L12.8."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hardpoint.cli", "--version"], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < MAX_VERSION_SECONDS
