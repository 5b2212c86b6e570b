"""A distribution may serve cores of several API versions; each core takes its own entry and shows the other."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.testing.doctor import diagnose

if TYPE_CHECKING:
    from .conftest import Site

OURS = KINDS["scheduler"].api_version
NEXT = OURS + 1


def install(site: Site, *majors: int) -> None:
    """A scheduler ``fair`` for each of ``majors``, in a module of its own."""
    points = {f"hardpoint.scheduler.v{major}|fair": f"acme_fair_v{major}:create" for major in majors}
    modules = {f"acme_fair_v{major}": "def create(ctx, options): return ctx.api_version" for major in majors}
    site.install("acme-fair", points, modules=modules)


def test_each_core_takes_its_own(site: Site) -> None:
    """L12.11: both are seen, one is used, the other is refused with both versions; neither hinders the other."""
    install(site, OURS, NEXT)
    found = discover([str(site.root)])
    assert [plugin.entry_point for plugin in found.plugins] == [f"acme_fair_v{OURS}:create"]
    (refused,) = found.refused
    assert refused.reason == f"written for API version {NEXT} of 'scheduler'; this core speaks version {OURS}"
    plan = build_plan(found, PluginSelection(choices={"scheduler": "fair"}))
    runtime = PluginRuntime(plan, {ProcessRole.ENGINE}, installed=found)
    assert runtime.create("scheduler", "fair", runtime.context("scheduler", "fair")) == OURS
    assert f"acme_fair_v{NEXT}" not in sys.modules


@pytest.mark.parametrize("major", [NEXT, 99, 0])
def test_one_for_another_core_only_is_an_error_for_those_who_name_it(site: Site, major: int) -> None:
    """L12.11: and for nobody else: being installed breaks nothing."""
    install(site, major)
    assert build_plan(discover([str(site.root)]), PluginSelection()).of("scheduler") == ()
    told = f"API version {major} of 'scheduler'; this core speaks version {OURS}"
    with pytest.raises(PluginNotFoundError, match=told):
        build_plan(discover([str(site.root)]), PluginSelection(choices={"scheduler": "fair"}))
    assert f"acme_fair_v{major}" not in sys.modules


def test_the_doctor_shows_both_and_calls_neither_a_problem(site: Site) -> None:
    """L12.11."""
    install(site, OURS, NEXT)
    report = diagnose(PluginSelection(), search_path=[str(site.root)], probe=False)
    assert [entry.name for entry in report.refused] == ["fair"]
    assert not [problem for problem in report.problems if "fair" in problem]
