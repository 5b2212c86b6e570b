"""Compiles all cases of a distribution in a few processes and gathers what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hardpoint_testing_torch.triton_aot import TARGETS, Resources, load_cases
from hardpoint_testing_torch.triton_aot_table import ResourceTable

__all__ = ["Outcome", "cache_folder", "compile_all", "excess"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``faults``: what does not compile, spills more than its budget or needs more shared memory than there is."""

    table: ResourceTable
    faults: tuple[str, ...]
    num_cached: int


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where results are kept, a file for each hash."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hardpoint" / "triton-aot"


def compile_all(provider: str, *, jobs: int = 2, cold: bool = False) -> Outcome:
    """Compile the cases of ``provider`` for all their targets; ``cold`` ignores earlier results.

    Works from a process that interprets its kernels: those that compile are others. Raises ``RuntimeError`` with their
    last words when one of them ends before its work.
    """
    cases = load_cases(provider)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(share) for share in range(jobs)]
        processes = [_start(provider, f"{folder.name}/{jobs}", folder, cold) for folder in folders]
        outputs = [_finish(process, folder) for process, folder in zip(processes, folders, strict=True)]
    rows: dict[str, dict[str, Resources]] = {case.name: {} for case in cases}
    answers = {(answer["case"], answer["target"]): answer for output in outputs for answer in output}
    faults = []
    for case in cases:
        for target in case.all_targets:
            answer = answers[case.name, target.name]
            if "error" in answer:
                faults.append(f"{case.name} does not compile for {target.name}: {answer['error']}")
                continue
            row = rows[case.name][target.name] = Resources(**answer["resources"])
            faults += excess(f"{case.name} on {target.name}", row, case.spill_budget, target.name)
    num_cached = sum(answer["cached"] for answer in answers.values())
    return Outcome(ResourceTable(version("triton"), rows), tuple(faults), num_cached)


def excess(label: str, row: Resources, spill_budget: int, target: str) -> list[str]:
    """In words, what ``row`` needs beyond its budget of bytes per thread or beyond what a block of ``target`` has."""
    found = []
    if row.spill_bytes > spill_budget:
        found.append(f"{label} spills {row.spill_bytes} bytes a thread; its budget is {spill_budget}")
    if row.shared_bytes > TARGETS[target].shared_limit:
        found.append(f"{label} needs {row.shared_bytes} bytes shared memory; {TARGETS[target].shared_limit} are there")
    return found


def _start(provider: str, share: str, folder: Path, cold: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hardpoint_testing_torch.triton_aot_worker", provider, "--share", share]
    if not cold:
        command += ["--cache", str(cache_folder())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    # Fixed, so that nobody's settings change the table; Triton's own cache would only keep binaries nobody runs.
    environment |= {"TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    folder.mkdir()
    with open(folder / "answers", "wb") as answers, open(folder / "errors", "wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=answers, stderr=errors)


def _finish(process: subprocess.Popen[bytes], folder: Path) -> list[dict[str, Any]]:
    if process.wait():
        errors = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip()
        raise RuntimeError(f"a compiling process ended with {process.returncode}: {errors[-2000:]}")
    lines = (folder / "answers").read_text(encoding="utf-8").splitlines()
    # Compilers print what they please between the answers, code in braces too.
    return [json.loads(line) for line in lines if line.startswith('{"case": ')]
