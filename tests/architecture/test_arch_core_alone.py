"""The core's wheel alone, in an environment of its own, without torch and without any plugin."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from workspace import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHOWN_LINES = 60
TEST_TOOLS = ["pytest-timeout", "pytest-xdist", "httpx", "psutil"]


def run(command: Sequence[object], cwd: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)


def succeed(command: Sequence[object], cwd: Path) -> str:
    done = run(command, cwd)
    if done.returncode != 0:
        shown = (done.stdout + done.stderr).splitlines()[-SHOWN_LINES:]
        pytest.fail("\n".join([f"{list(map(str, command))} exited with {done.returncode}", *shown]), pytrace=False)
    return done.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``venv`` (the core's wheel and its requirements only) and ``wheels``."""
    folder = tmp_path_factory.mktemp("core_alone")
    pip = [sys.executable, "-m", "pip", "-q", "wheel", "--no-deps", "--no-build-isolation"]
    succeed([*pip, "-w", folder / "wheels", ROOT / "core"], folder)
    succeed([sys.executable, "-m", "venv", folder / "venv"], folder)
    install(folder, wheel(folder))
    return folder


def wheel(folder: Path) -> Path:
    (found,) = (folder / "wheels").glob("hardpoint_core-*.whl")
    return found


def install(folder: Path, *requirements: object) -> None:
    pip = [folder / "venv/bin/python", "-m", "pip", "-q", "install", "-c", ROOT / "constraints.txt"]
    succeed([*pip, *requirements], folder)


def test_it_imports_and_carries_its_type_marker(scratch: Path) -> None:
    source = "import hardpoint, hardpoint.interfaces, pathlib; print(pathlib.Path(hardpoint.__file__).parent)"
    package = Path(succeed([scratch / "venv/bin/python", "-c", source], scratch).strip())
    assert package.is_relative_to(scratch / "venv")
    assert (package / "py.typed").is_file()


def test_torch_is_not_there(scratch: Path) -> None:
    """L12.12."""
    done = run([scratch / "venv/bin/python", "-c", "import torch"], scratch)
    assert "ModuleNotFoundError" in done.stderr


def test_plugins_list_works(scratch: Path) -> None:
    succeed([scratch / "venv/bin/hardpoint", "plugins", "list"], scratch)


def test_plugins_doctor_tells_what_is_missing_without_failing_itself(scratch: Path) -> None:
    done = run([scratch / "venv/bin/hardpoint", "plugins", "doctor"], scratch)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    assert "platform" in done.stdout


def test_the_core_passes_its_own_tests(scratch: Path) -> None:
    """I12.6."""
    install(scratch, f"{wheel(scratch)}[server,testing]", *TEST_TOOLS)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    succeed([scratch / "venv/bin/python", "-m", "pytest", *options, ROOT / "core/tests"], scratch)
