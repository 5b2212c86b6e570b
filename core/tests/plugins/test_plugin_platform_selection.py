"""Choosing the platform: broken is fatal, fallbacks come last, and several candidates need a name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import PluginConflictError, PluginLoadError, PluginNotFoundError
from hardpoint.interfaces.plugin import ProbeStatus
from hardpoint.plugins.plan import SelectedBy
from hardpoint.plugins.platform_selection import PlatformProbe, select_platform

if TYPE_CHECKING:
    from .conftest import Site

SOURCE = """
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus, plugin
def probe():
    {probe}
@plugin("platform", probe=probe, capabilities={{"fallback": {fallback}}})
def create(ctx, options): raise RuntimeError("the choice creates nothing")
"""


def install(site: Site, name: str, status: str, *, fallback: bool = False, probe: str | None = None) -> None:
    body = probe or f"return ProbeResult(ProbeStatus.{status}, 'because of {name}')"
    source = SOURCE.format(probe=body, fallback=fallback)
    site.install(f"plat-{name}", {f"platform:{name}": f"plat_{name}:create"}, modules={f"plat_{name}": source})


def select(site: Site, requested: str | None = None, **selection: Any) -> tuple[str, list[PlatformProbe]]:
    return select_platform(site.plan(**selection), requested, installed=site.discover())


def test_the_only_available_platform_is_taken(site: Site) -> None:
    """R12.26."""
    install(site, "gpu", "AVAILABLE")
    install(site, "other", "ABSENT")
    install(site, "host", "AVAILABLE", fallback=True)
    name, probes = select(site)
    assert name == "gpu"
    assert [(probe.name, probe.result.status) for probe in probes] == [
        ("gpu", ProbeStatus.AVAILABLE),
        ("host", ProbeStatus.AVAILABLE),
        ("other", ProbeStatus.ABSENT),
    ]


def test_a_fallback_serves_where_nothing_else_is(site: Site) -> None:
    """R12.26."""
    install(site, "gpu", "ABSENT")
    install(site, "host", "AVAILABLE", fallback=True)
    assert select(site)[0] == "host"


def test_broken_hardware_never_becomes_the_fallback(site: Site) -> None:
    """L12.1: a platform's failed registration is swallowed and the server silently runs on CPU."""
    install(site, "gpu", "BROKEN")
    install(site, "host", "AVAILABLE", fallback=True)
    with pytest.raises(PluginLoadError, match=r"platform gpu is broken .*because of gpu.*--platform"):
        select(site)
    assert select(site, "host")[0] == "host"
    assert select(site, choices={"platform": "host"})[0] == "host"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('driver fault')", "its probe raised OSError: driver fault"),
        ("import hardpoint_absent_module", "No module named"),
        ("raise SystemExit(0)", "its probe raised SystemExit: 0"),
        ("return None", "raised TypeError: it answered None, not a ProbeResult"),
        ("return 'available'", "raised TypeError: it answered 'available', not a ProbeResult"),
        ("return ProbeResult('available', 'yes')", "status='available'.*not a ProbeResult with a ProbeStatus"),
        ("return ProbeResult(ProbeStatus.AVAILABLE, 'yes', details=5)", "raised TypeError: 'int' object"),
    ],
)
def test_a_raising_probe_is_broken(site: Site, source: str, reason: str) -> None:
    """L12.1."""
    install(site, "gpu", "", probe=source)
    install(site, "host", "AVAILABLE", fallback=True)
    with pytest.raises(PluginLoadError, match=f"platform gpu is broken .*{reason}"):
        select(site)


def test_an_import_failure_is_broken_and_so_is_a_missing_probe(site: Site) -> None:
    """L12.1."""
    site.install("plat-x", {"platform:x": "plat_x:create"}, modules={"plat_x": "import hardpoint_absent_module"})
    with pytest.raises(PluginLoadError, match="platform x is broken .*No module named"):
        select(site)
    site.install("plat-y", {"platform:y": "plat_y:create"}, modules={"plat_y": "def create(ctx, options): ..."})
    with pytest.raises(PluginLoadError, match="platform 'y' was asked for but is broken: it declares no probe"):
        select(site, "y")


def test_two_available_platforms_need_a_name(site: Site) -> None:
    """R12.26 as amended, L12.19: no platform outranks another for where it came from."""
    install(site, "one", "AVAILABLE")
    install(site, "two", "AVAILABLE")
    install(site, "host", "AVAILABLE", fallback=True)
    with pytest.raises(
        PluginConflictError, match="several platforms are available: one, two; name one with --platform"
    ):
        select(site)
    assert select(site, "two") == ("two", select(site, "two")[1])
    assert select(site, allow=("two", "host"))[0] == "two"


def test_a_named_platform_must_be_available(site: Site) -> None:
    install(site, "gpu", "ABSENT")
    install(site, "host", "AVAILABLE", fallback=True)
    with pytest.raises(PluginLoadError, match="'gpu' was asked for but is absent: because of gpu"):
        select(site, "gpu")
    with pytest.raises(PluginNotFoundError, match=r"no platform plugin 'gpx' .did you mean 'gpu'"):
        select(site, "gpx")


def test_a_list_without_platforms_is_named_as_the_reason(site: Site) -> None:
    install(site, "host", "AVAILABLE", fallback=True)
    with pytest.raises(PluginNotFoundError, match=r"HARDPOINT_PLUGINS admits no platform \(installed: host\)"):
        select(site, allow=())
    assert select(site, "host", allow=())[0] == "host"


def test_naming_one_leaves_the_others_unimported(site: Site) -> None:
    """R12.25."""
    install(site, "gpu", "BROKEN")
    install(site, "host", "AVAILABLE", fallback=True)
    select(site, "host")
    assert "plat_gpu" not in sys.modules


def test_nothing_usable_says_what_was_found(site: Site) -> None:
    with pytest.raises(
        PluginNotFoundError, match=r"no platform plugin is installed; install a distribution .*platform\.v1"
    ):
        select(site)
    install(site, "gpu", "ABSENT")
    with pytest.raises(
        PluginNotFoundError, match="no installed platform is available here .gpu: absent, because of gpu"
    ):
        select(site)


def test_the_choice_goes_into_the_plan(site: Site) -> None:
    install(site, "gpu", "AVAILABLE")
    install(site, "host", "AVAILABLE", fallback=True)
    plan = site.plan()
    name, _ = select_platform(plan, installed=site.discover())
    assert (
        plan.choose("platform", name, SelectedBy.DEFAULT, "the only one available").selected("platform").name == "gpu"
    )
