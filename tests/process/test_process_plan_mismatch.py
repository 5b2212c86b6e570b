"""Processes with other plugins than the plan's stop the start before weights load, naming process, plugin and versions.

A hooks plugin stands for an installation that differs between one process of an instance and the next: what
it does to its own search path is what the processes it starts will see.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli_support import run_process
from scratch_install import write_metadata
from server_process import PATIENCE, ServerProcess

pytestmark = pytest.mark.timeout(300 * PATIENCE)

SWAP = """
import os
import sys
from hardpoint.interfaces.hooks import hookimpl

class Swap:
    @hookimpl
    def process_started(self, roles):
        if os.environ["SWAP_BEHIND"] in roles:
            sys.path.remove(os.environ["SWAP_FROM"])
            sys.path.insert(0, os.environ["SWAP_TO"])

def create(ctx, options): return Swap()
"""
WATCH = """
import json, os, sys

def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(os.environ["WATCHED"]):
        line = {"child": sys.argv[1].partition("-")[0] if len(sys.argv) == 4 else "", "file": str(arguments[0])}
        descriptor = os.open(os.environ["WATCH_LOG"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, (json.dumps(line) + chr(10)).encode())
        os.close(descriptor)

sys.addaudithook(watch)
"""
POINTS = {"hardpoint.hooks.v1": {"swap": "swap_part:create"}, "hardpoint.worker.v1": {"spare": "swap_part:create"}}


@dataclass(frozen=True, slots=True)
class Swapped:
    """An environment in which processes below the one with role ``behind`` see another installation."""

    environ: Mapping[str, str]
    log: Path

    def files_read(self, child: str) -> set[str]:
        """Names of the model's files that processes of the kind ``child`` opened; the launcher's kind is empty."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        read = [json.loads(line) for line in lines]
        return {Path(entry["file"]).name for entry in read if entry["child"] == child}


def swapped(folder: Path, model: Path, behind: str, version: str, points: Mapping[str, object] = POINTS) -> Swapped:
    """``version`` is what the other installation has; none of it when empty."""
    here, there = folder / "here", folder / "there"
    there.mkdir()
    write_metadata({"name": "swap-part", "version": "1.0", "entry-points": POINTS}, here)
    (here / "swap_part.py").write_text(SWAP)
    (here / "sitecustomize.py").write_text(WATCH)
    if version:
        write_metadata({"name": "swap-part", "version": version, "entry-points": points}, there)
    environ = {
        "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "SWAP_BEHIND": behind,
        "SWAP_FROM": str(here),
        "SWAP_TO": str(there),
        "WATCHED": str(model),
        "WATCH_LOG": str(folder / "opened.jsonl"),
    }
    return Swapped(environ, folder / "opened.jsonl")


def generate(model: Path, swap: Swapped, executor: str = "multiproc") -> str:
    """What ``hardpoint generate`` says; the launcher is the engine, and the worker has a process of its own."""
    command = ("generate", model, "--prompt", "Hi", "--max-tokens", "2", "--num-kv-blocks", "4096", "--json")
    done = run_process(*command, "--executor", executor, environ=swap.environ)
    return done.complaint() if done.status else done.out


@pytest.mark.slow
def test_where_all_are_equal_the_worker_reads_the_weights(tmp_path: Path, tiny: Path) -> None:
    """The counter-check: the watch sees what the other tests say does not happen."""
    swap = swapped(tmp_path, tiny, "nobody", "2.0")
    assert len(json.loads(generate(tiny, swap))["token_ids"]) == 2
    assert "model.safetensors" in swap.files_read("worker")
    assert "config.json" in swap.files_read("")


def test_a_worker_with_another_version_stops_the_start(tmp_path: Path, tiny: Path) -> None:
    """L12.5."""
    swap = swapped(tmp_path, tiny, "engine", "2.0")
    said = generate(tiny, swap)
    assert said.startswith("hardpoint: PluginMismatchError: process "), said
    assert "(worker, rank 0) differs from the plan: " in said
    assert "hooks:swap (swap-part 1.0): version 2.0 is installed here" in said
    assert "worker:spare (swap-part 1.0): version 2.0 is installed here" in said, "what is not active counts as well"
    assert "install the same distributions for every process" in said
    assert swap.files_read("worker") == set()


def test_a_worker_without_the_plugin_stops_the_start(tmp_path: Path, tiny: Path) -> None:
    """L12.5."""
    swap = swapped(tmp_path, tiny, "engine", "")
    said = generate(tiny, swap)
    assert "(worker, rank 0) differs from the plan: hooks:swap (swap-part 1.0) is not installed here" in said, said
    assert swap.files_read("worker") == set()


def test_an_entry_point_that_leads_elsewhere_stops_the_start(tmp_path: Path, tiny: Path) -> None:
    points = {**POINTS, "hardpoint.worker.v1": {"spare": "other:create"}}
    swap = swapped(tmp_path, tiny, "engine", "1.0", points)
    said = generate(tiny, swap)
    assert "worker:spare (swap-part 1.0) is other:create here, swap_part:create in the plan" in said, said
    assert "hooks:swap" not in said
    assert swap.files_read("worker") == set()


@pytest.mark.slow
def test_one_process_alone_has_nothing_to_differ_from(tmp_path: Path, tiny: Path) -> None:
    swap = swapped(tmp_path, tiny, "engine", "2.0")
    assert len(json.loads(generate(tiny, swap, "uniproc"))["token_ids"]) == 2


@pytest.mark.parametrize(
    ("behind", "process"), [("api", "(engine+worker) differs"), ("engine", "(worker, rank 0) differs")]
)
def test_a_server_ends_with_the_difference(tmp_path: Path, tiny: Path, behind: str, process: str) -> None:
    """L12.5: the engine is compared with the launcher's plan, so is each worker; both are told where people look."""
    swap = swapped(tmp_path, tiny, behind, "2.0")
    flags = ("--executor", "multiproc", "--num-kv-blocks", "4096")
    server = ServerProcess(tiny, *flags, environ=swap.environ)
    try:
        assert server.wait(60) == 1
        (said,) = [line for line in server.log().splitlines() if line.startswith("hardpoint: ")]
        assert f"PluginMismatchError: process {said.split()[3]} {process} from the plan" in said
        assert "hooks:swap (swap-part 1.0): version 2.0 is installed here" in said
        assert swap.files_read("engine") == swap.files_read("worker") == set()
        server.assert_gone()
    finally:
        server.close()
