"""Import-free discovery: which plugins are installed, from one pass over metadata, before any plugin code runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from packaging.requirements import InvalidRequirement, Requirement

from hardpoint.plugins.kinds import GROUP_PREFIX, KINDS
from hardpoint.plugins.metadata import (
    MetadataFolder,
    canonical_name,
    parse_entry_points,
    parse_headers,
    scan_metadata,
)
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin, ShadowedDistribution
from hardpoint.plugins.suggest import did_you_mean
from hardpoint.version import __version__

__all__ = ["discover"]

_GROUP = re.compile(re.escape(GROUP_PREFIX) + r"(?P<kind>\w+)\.v(?P<major>\d+)")
_VALUE = re.compile(r"(?P<target>[\w.]+:[\w.]+)\s*(\[.*\])?")
_CORE_NAMES = frozenset({"hardpoint", "hardpoint-core"})


def discover(search_path: Iterable[str] | None = None, *, core_version: str | None = None) -> Discovery:
    """Scan ``search_path`` (default ``sys.path``) once. ``core_version`` defaults to the running core's.

    Never raises for what a distribution did wrong: such entries are in ``refused`` with the reason.
    """
    version = __version__ if core_version is None else core_version
    first: dict[str, MetadataFolder] = {}
    provides: dict[str, bool] = {}
    plugins: list[DiscoveredPlugin] = []
    refused: list[RefusedPlugin] = []
    shadowed: list[ShadowedDistribution] = []
    for folder in scan_metadata(search_path):
        entries = _plugin_entries(folder)
        used = first.setdefault(folder.name, folder)
        if used is folder:
            provides[folder.name] = bool(entries)
            if entries:
                _classify(folder, entries, version, plugins, refused)
        elif entries or provides[folder.name]:
            same = used.location == folder.location
            shadowed.append(ShadowedDistribution(folder.name, used.path, folder.path, same))
    return Discovery(tuple(plugins), tuple(refused), tuple(shadowed), len(first))


def _plugin_entries(folder: MetadataFolder) -> list[tuple[str, str, str]]:
    text = folder.read("entry_points.txt")
    if text is None or GROUP_PREFIX not in text:
        return []
    return [entry for entry in parse_entry_points(text) if entry[0].startswith(GROUP_PREFIX)]


def _classify(
    folder: MetadataFolder,
    entries: list[tuple[str, str, str]],
    core_version: str,
    plugins: list[DiscoveredPlugin],
    refused: list[RefusedPlugin],
) -> None:
    headers = parse_headers(folder.read("METADATA") or folder.read("PKG-INFO") or "")
    name, version = headers.get("name", [""])[0], headers.get("version", [""])[0]
    requires = tuple(_core_requirements(headers.get("requires-dist", [])))
    fault = None if name and version else f"its metadata in {folder.path} lacks a name or version; install it again"
    fault = fault or _unmet(requires, core_version)
    for group, plugin, value in entries:
        match = _GROUP.fullmatch(group)
        target = _VALUE.fullmatch(value)
        reason = fault or _entry_fault(group, match, value, target)
        if reason or match is None or target is None:
            kind = match["kind"] if match else group.removeprefix(GROUP_PREFIX)
            refused.append(RefusedPlugin(kind, plugin, name or folder.name, reason or group))
            continue
        plugins.append(
            DiscoveredPlugin(
                kind=match["kind"],
                name=plugin,
                api_version=int(match["major"]),
                distribution=name,
                version=version,
                entry_point=target["target"],
                path=folder.path,
                requires=requires,
            )
        )


def _entry_fault(group: str, match: re.Match[str] | None, value: str, target: re.Match[str] | None) -> str | None:
    if match is None:
        return f"group {group!r} is not of the form hardpoint.<kind>.v<major>"
    spec = KINDS.get(match["kind"])
    if spec is None:
        return f"unknown plugin kind {match['kind']!r}{did_you_mean(match['kind'], KINDS)}"
    if int(match["major"]) != spec.api_version:
        return (
            f"written for API version {match['major']} of {spec.name!r}; this core speaks version {spec.api_version}: "
            "install a release of the plugin for it"
        )
    if target is None:
        return f"entry point value {value!r} is not of the form module:attribute"
    return None


def _core_requirements(lines: list[str]) -> Iterable[str]:
    for line in lines:
        if not line.lower().startswith("hardpoint"):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            yield line
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonical_name(requirement.name) in _CORE_NAMES and applies:
            yield line


def _unmet(requires: tuple[str, ...], core_version: str) -> str | None:
    for line in requires:
        try:
            allowed = Requirement(line).specifier
        except InvalidRequirement:
            return f"its requirement {line!r} cannot be read"
        if not allowed.contains(core_version, prereleases=True):
            return f"it requires {line!r}, but the core's version is {core_version}"
    return None
