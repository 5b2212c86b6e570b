"""Explains the plugin system's state: what is installed, from where, what is used or refused, and what is wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from importlib.machinery import PathFinder

import msgspec

from hardpoint.errors import PluginError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS, no_candidate
from hardpoint.plugins.manifest import load_manifest
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin, ShadowedDistribution
from hardpoint.plugins.resolve import resolve_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.version import __version__

__all__ = ["DoctorReport", "KindReport", "PluginReport", "ProbeReport", "diagnose"]


class ProbeReport(msgspec.Struct, frozen=True):
    status: str
    reason: str
    details: dict[str, str] = {}


class PluginReport(msgspec.Struct, frozen=True):
    """One installed plugin. ``state`` is ``active``, ``available`` or ``refused``; ``options`` are the keys set."""

    plugin: DiscoveredPlugin
    state: str
    reason: str
    has_manifest: bool
    options: tuple[str, ...] = ()
    probe: ProbeReport | None = None


class KindReport(msgspec.Struct, frozen=True):
    kind: str
    group: str
    cardinality: str
    roles: tuple[str, ...]
    plugins: tuple[PluginReport, ...]


class DoctorReport(msgspec.Struct, frozen=True):
    """``problems`` must be mended before a start; ``warnings`` deserve a look. ``refused`` got no kind's row."""

    core_version: str
    num_distributions: int
    kinds: tuple[KindReport, ...]
    refused: tuple[RefusedPlugin, ...]
    shadowed: tuple[ShadowedDistribution, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def diagnose(
    selection: PluginSelection | None = None, *, search_path: Iterable[str] | None = None, probe: bool = True
) -> DoctorReport:
    """Examine what ``selection`` would use. ``probe`` imports and asks platform factories; nothing else is imported."""
    discovery = discover(search_path)
    plan, faults = resolve_plan(discovery, selection or PluginSelection())
    problems = [str(fault) for fault in faults]
    probes = _probe(plan, discovery, problems) if probe else {}
    for spec in KINDS.values():
        if spec.required and not plan.of(spec.name):
            problems.append(no_candidate(spec.name))
    if probe:
        problems += [
            fault for planned in plan.plugins if planned.active and (fault := _absent_module(planned, search_path))
        ]
    problems += [double.fault for double in discovery.shadowed if double.same_folder]
    warnings = [notice for notice in plan.notices if notice not in problems]
    warnings += [double.fault for double in discovery.shadowed if not double.same_folder]
    warnings += [f"{entry.kind}:{entry.name} ({entry.distribution}): {entry.reason}" for entry in discovery.refused]
    kinds = tuple(_kind(kind, discovery, plan, probes, problems) for kind in KINDS)
    return DoctorReport(
        core_version=__version__,
        num_distributions=discovery.num_distributions,
        kinds=kinds,
        refused=discovery.refused,
        shadowed=discovery.shadowed,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def _probe(plan: PluginPlan, discovery: Discovery, problems: list[str]) -> dict[str, ProbeReport]:
    # Deferred: reports without probing need neither pydantic nor the runtime.
    from hardpoint.plugins.platform_selection import judge, probe_platforms
    from hardpoint.plugins.runtime import PluginRuntime
    from hardpoint.roles import ProcessRole

    platforms = plan.of("platform")
    if not platforms:
        return {}
    requested = next((planned.name for planned in platforms if planned.active), None)
    runtime = PluginRuntime(plan, {ProcessRole.LAUNCHER}, installed=discovery)
    probes = probe_platforms(runtime, tuple(planned.name for planned in platforms))
    automatic = runtime.candidates("platform")
    try:
        asked = [probe for probe in probes if requested or probe.name in automatic]
        judge(asked, requested, runtime.names("platform"))
    except PluginError as error:
        problems.append(str(error))
    return {p.name: ProbeReport(p.result.status, p.result.reason, dict(p.result.details)) for p in probes}


def _absent_module(planned: PlannedPlugin, search_path: Iterable[str] | None) -> str:
    """The fault of a plugin whose code is not there, found without importing it."""
    package = planned.entry_point.partition(":")[0].partition(".")[0]
    try:
        here = (
            importlib.util.find_spec(package)
            if search_path is None
            else PathFinder.find_spec(package, list(search_path))
        )
    except (ImportError, ValueError):
        here = None
    if here is not None:
        return ""
    return f"{planned.label}: its module {package!r} is not there; install the distribution again"


def _has_manifest(plugin: DiscoveredPlugin, problems: list[str]) -> bool:
    try:
        return load_manifest(plugin) is not None
    except PluginError as error:
        if str(error) not in problems:
            problems.append(str(error))
        return False


def _kind(
    kind: str, discovery: Discovery, plan: PluginPlan, probes: dict[str, ProbeReport], problems: list[str]
) -> KindReport:
    spec = KINDS[kind]
    admitted = {(planned.name, planned.distribution): planned for planned in plan.of(kind)}
    denied = {(entry.name, entry.distribution): entry.reason for entry in plan.refused if entry.kind == kind}
    rows = []
    for plugin in discovery.of(kind):
        key = (plugin.name, plugin.distribution)
        planned = admitted.get(key)
        state = ("active" if planned.active else "available") if planned else "refused"
        reason = planned.reason if planned else denied.get(key, "another distribution has the same name")
        options = tuple(planned.options) if planned else ()
        probe = probes.get(plugin.name) if kind == "platform" else None
        rows.append(PluginReport(plugin, state, reason, _has_manifest(plugin, problems), options, probe))
    return KindReport(kind, spec.group, spec.cardinality, tuple(sorted(spec.roles)), tuple(rows))
