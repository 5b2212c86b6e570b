"""Probes of worker plugins in a child process: every way to answer, and every way not to."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint.plugins.cli import run_plugins
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing.manifest_writer import manifest_text
from hardpoint.testing.probing import PROBED_KINDS, probe_in_child

SOURCE = """
import os, sys, time
from hardpoint.interfaces.custom_op import CustomOperator, CustomOps
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus, plugin

def answer(status, reason="because"):
    return lambda: ProbeResult(ProbeStatus(status), reason, {"driver": "1"})

@plugin("attention_backend", probe=answer("available"), capabilities={"returns_lse": True})
def good(ctx, options): raise RuntimeError("probing creates nothing")

@plugin("attention_backend", probe=answer("absent", "no device"))
def absent(ctx, options): ...

@plugin("attention_backend")
def mute(ctx, options): ...

def noisy_probe():
    print("noise on standard output", flush=True)
    raise ValueError("no driver")

@plugin("attention_backend", probe=noisy_probe)
def noisy(ctx, options): ...

@plugin("attention_backend", probe=lambda: os._exit(7))
def crash(ctx, options): ...

@plugin("attention_backend", probe=lambda: time.sleep(60))
def hang(ctx, options): ...

def operator(name, status):
    return CustomOperator(name, {}, print, lambda device: [], probe=answer(status, f"{name} is {status}"))

@plugin("custom_op")
def ops(ctx, options): return CustomOps((operator("a", "available"), operator("b", "available")))

@plugin("custom_op")
def some_ops(ctx, options): return CustomOps((operator("a", "absent"), operator("b", "broken")))

class Early:
    @hookimpl
    def process_booting(self): ...

def hooks(ctx, options): raise RuntimeError("probing creates nothing")
"""
NAMES = {
    "attention_backend": ("good", "absent", "mute", "noisy", "crash", "hang", "not_there"),
    "custom_op": ("ops", "some_ops"),
    "hooks": ("hooks",),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "acme_probed").mkdir()
    (tmp_path / "acme_probed" / "__init__.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("acme_probed", None)


def install(folder: Path, **names: tuple[str, ...]) -> PluginPlan:
    metadata = folder / "acme_probed-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-probed\nVersion: 1.0\n")
    lines = [f"[hardpoint.{kind}.v1]\n" + "\n".join(f"{n} = acme_probed:{n}" for n in ns) for kind, ns in names.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()
    return build_plan(discover([str(folder)]), PluginSelection())


def test_each_plugin_is_answered_for_whatever_its_neighbors_do(folder: Path) -> None:
    """A crash or a hang is the fault of the one that was asked; the others are asked again elsewhere."""
    found = probe_in_child(install(folder, **NAMES), timeout_s=5.0)
    assert set(found) == {(kind, name) for kind, names in NAMES.items() for name in names}
    told = {name: (report.status, report.reason) for (_, name), report in found.items()}
    assert told["good"] == ("available", "because")
    assert told["absent"] == ("absent", "no device")
    assert told["mute"] == ("available", "imports; it declares no probe")
    assert told["noisy"] == ("broken", "ValueError: no driver")
    assert told["crash"] == ("broken", "the process that asked it ended with exit code 7")
    assert told["hang"] == ("broken", "it gave no answer for 5 s")
    assert told["not_there"][0] == "broken"
    assert "not_there" in told["not_there"][1]
    assert told["ops"] == ("available", "2 operators")
    assert told["some_ops"] == ("broken", "b: b is broken")
    assert told["hooks"] == ("available", "imports; runs early, by process_booting, in every process")
    assert found["attention_backend", "good"].details == {"driver": "1"}
    assert [name for name, (status, _) in told.items() if status == "broken"] == [
        name for (_, name), report in found.items() if report.faults
    ]
    assert "acme_probed" not in sys.modules, "this process imports nothing of it"


def test_nothing_to_ask_starts_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint.testing.probing.ask_child", None)
    assert probe_in_child(install(folder, tokenizer=("good",))) == {}
    assert "platform" not in PROBED_KINDS, "platforms answer in the launcher, without a framework"


def test_a_manifest_behind_the_code_is_a_fault(folder: Path) -> None:
    """Entry points alone look right: only the code knows its capabilities."""
    plan = install(folder, attention_backend=("good",))
    path = folder / "acme_probed" / "hardpoint.json"
    module: Any = importlib.import_module("acme_probed")
    from hardpoint.interfaces.plugin import declaration_of

    declared = declaration_of(module.good)
    assert declared is not None
    path.write_text(manifest_text({("attention_backend", "good"): declared}))
    assert probe_in_child(plan)["attention_backend", "good"].faults == ()
    path.write_text(json.dumps({"plugins": {"attention_backend": {"good": {"capabilities": {"returns_lse": False}}}}}))
    (fault,) = probe_in_child(plan)["attention_backend", "good"].faults
    assert "`hardpoint plugins manifest acme-probed`" in fault


def test_the_doctor_asks_only_when_told_to(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """JSON stays JSON, whatever plugins print."""
    install(folder, attention_backend=("good", "noisy"))
    run_plugins(["doctor", "attention_backend", "--json"])
    assert probes(capfd) == {"good": None, "noisy": None}
    run_plugins(["doctor", "attention_backend", "--json", "--probe"])
    assert probes(capfd) == {"good": "available", "noisy": "broken"}


def probes(capfd: pytest.CaptureFixture[str]) -> dict[str, str | None]:
    (kind,) = json.loads(capfd.readouterr().out)["kinds"]
    rows = [row for row in kind["plugins"] if row["plugin"]["distribution"] == "acme-probed"]
    return {row["plugin"]["name"]: row["probe"] and row["probe"]["status"] for row in rows}
