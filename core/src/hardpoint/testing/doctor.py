"""Explains the plugin system's state: what is installed, from where, what is used or refused, and what is wrong."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any

import msgspec

from hardpoint.errors import PluginError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS, no_candidate
from hardpoint.plugins.manifest import PluginManifest, read_manifest
from hardpoint.plugins.metadata import search_locations
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin, ShadowedDistribution
from hardpoint.plugins.resolve import resolve_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.version import __version__


class ProbeReport(msgspec.Struct, frozen=True):
    """An answer. ``faults`` are what was found wrong with the plugin on the way to it."""

    status: str
    reason: str
    details: dict[str, str] = {}
    faults: tuple[str, ...] = ()


Probes = Mapping[tuple[str, str], ProbeReport]


class PluginReport(msgspec.Struct, frozen=True):
    """One installed plugin. ``state`` is ``active``, ``available`` or ``refused``; ``options`` are the keys set.

    ``capabilities`` and ``required_tasks`` are those its manifest declares; ``faults`` name what to do.
    """

    plugin: DiscoveredPlugin
    state: str
    reason: str
    has_manifest: bool
    options: tuple[str, ...] = ()
    probe: ProbeReport | None = None
    capabilities: dict[str, Any] = {}
    required_tasks: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class KindReport(msgspec.Struct, frozen=True):
    kind: str
    group: str
    cardinality: str
    roles: tuple[str, ...]
    plugins: tuple[PluginReport, ...]


class DoctorReport(msgspec.Struct, frozen=True):
    """``problems`` must be mended before a start; ``warnings`` deserve a look. ``refused`` got no kind's row.

    ``environment`` are the variables in force, without secrets; ``archives`` the parts of the search path that are not
    looked into.
    """

    core_version: str
    num_distributions: int
    kinds: tuple[KindReport, ...]
    refused: tuple[RefusedPlugin, ...]
    shadowed: tuple[ShadowedDistribution, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    environment: dict[str, str] = {}
    archives: tuple[str, ...] = ()

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def diagnose(
    selection: PluginSelection | None = None,
    *,
    search_path: Iterable[str] | None = None,
    probe: bool = True,
    probe_workers: Callable[[PluginPlan], Probes] | None = None,
    settings_faults: Callable[[PluginPlan], Iterable[str]] | None = None,
) -> DoctorReport:
    """Examine what ``selection`` would use; ``settings_faults`` says what else is wrong with the plan.

    ``probe`` imports and asks platform factories here; ``probe_workers`` asks others elsewhere. No other code is run.
    """
    discovery, archives = discover(search_path), _archives(search_path)
    selection = selection or PluginSelection()
    plan, faults = resolve_plan(discovery, selection)
    problems = [str(fault) for fault in faults]
    probes = {**(_probe(plan, discovery, problems) if probe else {}), **(probe_workers(plan) if probe_workers else {})}
    problems += [no_candidate(kind) for kind, spec in KINDS.items() if spec.required and not plan.of(kind)]
    problems += [double.fault for double in discovery.shadowed if double.same_folder]
    further = dict.fromkeys(settings_faults(plan)) if settings_faults else {}
    problems += [fault for fault in further if fault not in problems]
    warnings = [notice for notice in plan.notices if notice not in problems]
    warnings += [] if faults else selection.without_effect()
    warnings += [double.fault for double in discovery.shadowed if not double.same_folder]
    warnings += [f"{entry.kind}:{entry.name} ({entry.distribution}): {entry.reason}" for entry in discovery.refused]
    warnings += [f"{archive} is an archive: no plugin in it is found; install it as a folder" for archive in archives]
    kinds = tuple(_kind(kind, discovery, plan, probes) for kind in KINDS)
    for row in (row for kind in kinds for row in kind.plugins) if probe else ():
        found = [f"{row.plugin.kind}:{row.plugin.name} ({row.plugin.distribution}): {fault}" for fault in row.faults]
        (problems if row.state == "active" else warnings).extend(text for text in found if text not in problems)
    return DoctorReport(
        core_version=__version__,
        num_distributions=discovery.num_distributions,
        kinds=kinds,
        refused=discovery.refused,
        shadowed=discovery.shadowed,
        problems=tuple(problems),
        warnings=tuple(warnings),
        environment={name: _shown(name) for name in sorted(os.environ) if name.startswith("HARDPOINT_")},
        archives=archives,
    )


def _archives(search_path: Iterable[str] | None) -> tuple[str, ...]:
    """Zip files and eggs in the search path. What they hold can be imported, but none of their plugins is found."""
    return tuple(
        location
        for location in search_locations(search_path)
        if os.path.isfile(location) or (location.endswith(".egg") and os.path.isdir(os.path.join(location, "EGG-INFO")))
    )


def _shown(variable: str) -> str:
    secret = variable.endswith("_KEY") or variable.startswith("HARDPOINT_PLUGIN__")  # whose options may be secrets
    return "(set, not shown)" if secret else os.environ[variable]


def _probe(plan: PluginPlan, discovery: Discovery, problems: list[str]) -> Probes:
    # Deferred: reports without probing need neither pydantic nor the runtime.
    from hardpoint.plugins.platform_selection import judge, probe_platform
    from hardpoint.plugins.runtime import PluginRuntime
    from hardpoint.roles import ProcessRole

    platforms = plan.of("platform")
    if not platforms:
        return {}
    requested = next((planned.name for planned in platforms if planned.active), None)
    runtime = PluginRuntime(plan, {ProcessRole.LAUNCHER}, installed=discovery)
    probes = [probe_platform(runtime, planned.name) for planned in platforms]
    automatic = runtime.candidates("platform")
    try:
        asked = [probe for probe in probes if requested or probe.name in automatic]
        judge(asked, requested, runtime.names("platform"))
    except PluginError as error:
        problems.append(str(error))
    reports = [ProbeReport(p.result.status, p.result.reason, dict(p.result.details)) for p in probes]
    return {("platform", probe.name): report for probe, report in zip(probes, reports, strict=True)}


def _absent_module(plugin: DiscoveredPlugin) -> Iterator[str]:
    """The fault of a plugin whose code is not there, found without importing it."""
    package = plugin.entry_point.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
        here = spec or PathFinder.find_spec(package, [os.path.dirname(plugin.path)])
    except (ImportError, ValueError):
        here = None
    if here is None:
        yield f"its module {package!r} is not there; install the distribution again"


def _kind(kind: str, discovery: Discovery, plan: PluginPlan, probes: Probes) -> KindReport:
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
        probe = probes.get((kind, plugin.name)) if planned else None
        entry, faults = _manifest(plugin, discovery)
        faults += [*_absent_module(plugin), *(probe.faults if probe else ())]
        stated = (entry.capabilities, entry.required_tasks) if entry else ({}, ())
        rows.append(PluginReport(plugin, state, reason, entry is not None, options, probe, *stated, tuple(faults)))
    return KindReport(kind, spec.group, spec.cardinality, tuple(sorted(spec.roles)), tuple(rows))


def _manifest(plugin: DiscoveredPlugin, discovery: Discovery) -> tuple[PluginManifest | None, list[str]]:
    """The plugin's entry, and what is wrong with the file it should be in."""
    try:
        manifest = read_manifest(plugin)
    except PluginError as error:
        return None, [str(error)]
    if manifest is None:
        return None, []
    mine = {(p.kind, p.name) for p in discovery.plugins if p.distribution == plugin.distribution}
    told = {(kind, name) for kind, entries in manifest.plugins.items() for name in entries}
    entry = manifest.plugins.get(plugin.kind, {}).get(plugin.name)
    advice = f"it is out of date: write it again with `hardpoint plugins manifest {plugin.distribution}`"
    # Conformance classes are in no manifest: they have no options.
    faults = [] if entry or plugin.kind == "conformance" else [f"its package's manifest does not tell of it; {advice}"]
    stray = ", ".join(f"{kind}:{name}" for kind, name in sorted(told - mine))
    return entry, faults + ([f"its manifest tells of {stray}, which it does not provide; {advice}"] if stray else [])
