"""Import-free discovery: which plugins are installed, from one pass over metadata, before any plugin code runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from hardpoint.plugins.kinds import GROUP_PREFIX, KINDS
from hardpoint.plugins.metadata import MetadataFolder, canonical_name, parse_entry_points, parse_headers, scan_metadata
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin, ShadowedDistribution
from hardpoint.plugins.suggest import did_you_mean
from hardpoint.version import __version__

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


_GROUP = re.compile(re.escape(GROUP_PREFIX) + r"(\w+)\.v(\d{1,4})")
_VALUE = re.compile(r"([\w.]+:[\w.]+)\s*(\[.*\])?")
_REQUIREMENT = re.compile(r"(\w++(?:[.-]++\w++)*+)\s*+(\[[\w\s,.-]*+\])?+\s*+\(?([^;@()]*+)\)?")
_CORE_NAMES = ("hardpoint", "hardpoint-core")


def discover(search_path: Iterable[str] | None = None, *, core_version: str = __version__) -> Discovery:
    """Scan ``search_path`` (default ``sys.path``) once. The first folder of a distribution counts.

    Never raises for what a distribution did wrong: such entries are in ``refused`` with the reason.
    """
    first: dict[str, tuple[MetadataFolder, bool]] = {}
    found: list[DiscoveredPlugin | RefusedPlugin] = []
    shadowed: list[ShadowedDistribution] = []
    for folder in scan_metadata(search_path):
        text = folder.read("entry_points.txt") or ""
        entries = [e for e in parse_entry_points(text) if e[0].startswith(GROUP_PREFIX)] if GROUP_PREFIX in text else []
        used, offers = first.setdefault(folder.name, (folder, bool(entries)))
        if used is folder:
            found += _classify(folder, entries, core_version) if entries else ()
        elif entries or offers:
            same = used.location == folder.location
            shadowed.append(ShadowedDistribution(folder.name, used.path, folder.path, same))
    plugins = tuple(entry for entry in found if isinstance(entry, DiscoveredPlugin))
    refused = tuple(entry for entry in found if isinstance(entry, RefusedPlugin))
    return Discovery(plugins, refused, tuple(shadowed), len(first))


def _classify(
    folder: MetadataFolder, entries: list[tuple[str, str, str]], core_version: str
) -> Iterable[DiscoveredPlugin | RefusedPlugin]:
    headers = parse_headers(folder.read("METADATA") or folder.read("PKG-INFO") or "")
    distribution, version = headers.get("name", [""])[0], headers.get("version", [""])[0]
    requires, fault = _core_range(headers.get("requires-dist", []), core_version)
    if not (distribution and version):
        fault = f"its metadata in {folder.path} lacks a name or version; install it again"
    for group, name, value in entries:
        split, target = _GROUP.fullmatch(group), _VALUE.fullmatch(value)
        kind = split[1] if split else group.removeprefix(GROUP_PREFIX)
        reason = fault or _group_fault(group, split)
        if reason or target is None:
            reason = reason or f"entry point value {value!r:.200} is not of the form module:attribute"
            yield RefusedPlugin(kind, name, distribution or folder.name, reason)
        else:
            ours = KINDS[kind].api_version
            yield DiscoveredPlugin(kind, name, ours, distribution, version, target[1], folder.path, requires)


def _group_fault(group: str, split: re.Match[str] | None) -> str:
    if split is None:
        return f"group {group!r:.200} is not of the form {GROUP_PREFIX}<kind>.v<major>"
    kind, major = split[1], int(split[2])
    if kind not in KINDS:
        return f"unknown plugin kind {kind!r}{did_you_mean(kind, KINDS)}"
    ours = KINDS[kind].api_version
    return "" if major == ours else f"written for API version {major} of {kind!r}; this core speaks version {ours}"


def _core_range(lines: list[str], core_version: str) -> tuple[tuple[str, ...], str]:
    """The distribution's requirements on the core, and what is wrong with them, if anything."""
    judged = {line: _judge(line, core_version) for line in lines if line[:9].lower() == "hardpoint"}
    applying = tuple(line for line, (applies, _) in judged.items() if applies)
    return applying, next((fault for _, fault in judged.values() if fault), "")


@cache  # Most distributions say the same of the core.
def _judge(line: str, core_version: str) -> tuple[bool, str]:
    """Whether a requirement is on the core, here; and what is wrong with it."""
    try:
        name, allowed = _split_requirement(line)
        if allowed is None or canonical_name(name) not in _CORE_NAMES:
            return False, ""
        fits = allowed.contains(core_version, prereleases=True)
    except (ValueError, RecursionError):
        return True, f"its requirement {line!r:.200} cannot be read"
    return True, "" if fits else f"it requires {line!r}, but the core's version is {core_version}"


def _split_requirement(line: str) -> tuple[str, SpecifierSet | None]:
    """Name and range, the latter ``None`` where a marker excludes this environment. Raises ``ValueError``."""
    simple = _REQUIREMENT.fullmatch(line)
    if simple is not None:
        from packaging.specifiers import SpecifierSet  # a third of the time that importing the full parser takes

        return simple[1], SpecifierSet(simple[3])
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return requirement.name, requirement.specifier if applies else None
