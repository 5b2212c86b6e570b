"""Reads installed distributions' metadata folders: one listing per search path entry, each needed file once.

``importlib.metadata`` parses every METADATA file to learn a distribution's name. With hundreds of distributions that
costs more than the whole start-up budget, so names come from the folders and only plugin distributions are parsed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

__all__ = ["MetadataFolder", "canonical_name", "parse_entry_points", "parse_headers", "scan_metadata"]

_SUFFIXES = (".dist-info", ".egg-info")


@dataclass(frozen=True, slots=True)
class MetadataFolder:
    """One distribution's metadata. ``read(file)`` gives a file's text, or ``None`` when it is absent.

    ``location`` is the search path entry that holds it; ``version`` is what the folder's name says.
    """

    name: str
    version: str
    path: str
    location: str
    read: Callable[[str], str | None]


def canonical_name(name: str) -> str:
    """Distribution names compare without regard to case and to runs of ``-``, ``_`` and ``.``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def scan_metadata(search_path: Iterable[str] | None = None) -> Iterator[MetadataFolder]:
    """All metadata folders in search order; of several versions within one entry, the highest comes first."""
    seen: set[str] = set()
    for entry in sys.path if search_path is None else search_path:
        location = os.path.realpath(entry or os.curdir)
        if location in seen:
            continue
        seen.add(location)
        if os.path.isdir(location):
            yield from _scan_folder(location)
        elif os.path.isfile(location):
            yield from _scan_archive(location)


def _scan_folder(location: str) -> Iterator[MetadataFolder]:
    try:
        entries = sorted(entry for entry in os.listdir(location) if entry.endswith(_SUFFIXES))
    except OSError:
        return  # Python itself ignores search path entries it may not read
    by_name: dict[str, list[MetadataFolder]] = {}
    for entry in entries:
        if entry[0].isalnum():  # pip renames a folder it failed to remove to "~name"
            folder = _folder(entry, os.path.join(location, entry), location)
            by_name.setdefault(folder.name, []).append(folder)
    for folders in by_name.values():
        yield from folders if len(folders) == 1 else sorted(folders, key=_version_key, reverse=True)


def _folder(entry: str, path: str, location: str) -> MetadataFolder:
    def read(file: str) -> str | None:
        try:
            with open(os.path.join(path, file), encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return None

    name, _, version = entry.rpartition(".")[0].partition("-")
    return MetadataFolder(canonical_name(name), version, path, location, read)


def _scan_archive(location: str) -> Iterator[MetadataFolder]:
    # Zipped packages are rare, so the general but slow reader will do.
    from importlib.metadata import distributions

    for found in distributions(path=[location]):
        yield MetadataFolder(canonical_name(found.name), found.version, location, location, found.read_text)


def _version_key(folder: MetadataFolder) -> Version:
    try:
        return Version(folder.version.partition("-py")[0])
    except InvalidVersion:
        return Version("0")


def parse_entry_points(text: str) -> Iterator[tuple[str, str, str]]:
    """``(group, name, value)`` of each line of an ``entry_points.txt``."""
    group = ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif line and line[0] not in "#;" and "=" in line:
            name, _, value = line.partition("=")
            yield group, name.strip(), value.strip()


def parse_headers(text: str) -> dict[str, list[str]]:
    """The header lines of a METADATA file by lower-case name; the description below them is skipped."""
    headers: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line:
            break
        key, colon, value = line.partition(":")
        if colon and not key[:1].isspace():
            headers.setdefault(key.lower(), []).append(value.strip())
    return headers
