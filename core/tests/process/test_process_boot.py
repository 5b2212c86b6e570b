"""The first act of every process: plan, verification, platform, hooks."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.errors import PluginError, PluginLoadError, PluginMismatchError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PluginPlan, SelectedBy
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.process import announce_stop, boot
from hardpoint.roles import ProcessRole
from hardpoint.testing.executor_suite import install_fake_worker
from hardpoint.testing.hooks_reset import forget_hooks

MODULE = """
import os
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import plugin
SEEN = []

class Device:
    name = "paper"

class Observer:
    @hookimpl
    def process_started(self, roles, rank):
        SEEN.append(("started", sorted(roles), rank))

    @hookimpl
    def process_booting(self, roles, rank, environ):
        SEEN.append(("booting", sorted(roles), rank))
        environ["BOOT_PARTS"] = "yes"

    @hookimpl
    def process_stopping(self):
        SEEN.append("stopping")

@plugin("hooks")
def observer(ctx, options):
    SEEN.append(("hooks", ctx.platform))
    return Observer()

@plugin("platform")
def paper(ctx, options):
    SEEN.append(("platform", os.environ["BOOT_PARTS"]))
    return Device()

@plugin("platform")
def torn(ctx, options):
    raise OSError("torn")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BOOT_PARTS", "no")
    metadata = tmp_path / "boot_parts.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: boot-parts\nVersion: 2.0\n")
    (metadata / "entry_points.txt").write_text(
        "[hardpoint.hooks.v1]\nobserver = boot_parts:observer\n"
        "[hardpoint.platform.v1]\npaper = boot_parts:paper\ntorn = boot_parts:torn\n"
    )
    (tmp_path / "boot_parts.py").write_text(MODULE)
    install_fake_worker(tmp_path)
    importlib.invalidate_caches()
    level = logging.getLogger("hardpoint").level
    yield tmp_path
    forget_hooks()
    logging.getLogger("hardpoint").setLevel(level)
    sys.modules.pop("boot_parts", None)


def plan(site: Path, **selection: object) -> PluginPlan:
    return build_plan(discover([str(site)]), PluginSelection(**selection))  # type: ignore[arg-type]


def seen() -> list[object]:
    return list(importlib.import_module("boot_parts").SEEN)


def test_hooks_come_before_the_platform_and_both_before_any_work(site: Path) -> None:
    chosen = plan(site, choices={"platform": "paper"}).to_bytes()
    runtime = boot(chosen, {ProcessRole.WORKER}, rank=2)
    assert runtime.platform is not None
    assert runtime.context("worker", "faulty").rank == 2
    assert seen() == [("hooks", None), ("booting", ["worker"], 2), ("platform", "yes"), ("started", ["worker"], 2)]
    announce_stop(runtime)
    assert seen()[-1] == "stopping"
    assert [f"{s.kind}:{s.name}" for s in runtime.report().plugins if s.state == "created"] == [
        "hooks:observer",
        "platform:paper",
    ]


def test_a_second_boot_in_one_process_runs_no_hook_twice(site: Path) -> None:
    """R12.12, R12.13."""
    data = plan(site).to_bytes()
    first, second = boot(data, {ProcessRole.ENGINE}), boot(data, {ProcessRole.WORKER}, rank=0)
    assert seen() == [("hooks", None), ("booting", ["engine"], None), ("started", ["engine"], None)]
    announce_stop(first)
    assert seen()[-1] != "stopping"
    announce_stop(second)
    assert seen()[3:] == ["stopping"]


def test_the_platform_is_the_plans_and_none_chosen_means_none(site: Path) -> None:
    open_plan = plan(site)
    assert boot(open_plan.to_bytes(), {ProcessRole.API}).platform is None
    chosen = open_plan.choose("platform", "paper", SelectedBy.NAMED, "for the test")
    runtime = boot(chosen.to_bytes(), {ProcessRole.API})
    assert getattr(runtime.platform, "name", None) == "paper"


def test_a_platform_that_fails_stops_the_process(site: Path) -> None:
    chosen = plan(site).choose("platform", "torn", SelectedBy.NAMED, "for the test")
    with pytest.raises(PluginLoadError, match="platform:torn .*torn"):
        boot(chosen.to_bytes(), {ProcessRole.WORKER}, rank=0)


def test_other_plugins_than_the_plans_stop_the_process_before_it_works(site: Path) -> None:
    data = plan(site).to_bytes()
    install_fake_worker(site, version="3.0")
    with pytest.raises(PluginMismatchError, match=r"rank 1\) differs from the plan: .*1\.0.*3\.0"):
        boot(data, {ProcessRole.WORKER}, rank=1)
    assert "boot_parts" not in sys.modules


@pytest.mark.parametrize("data", [b"", b"\xc1", b"cos\nsystem\n(S'true'\ntR.", b"\x80"])
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(PluginError, match="not a plugin plan"):
        boot(data, {ProcessRole.WORKER}, rank=0)
