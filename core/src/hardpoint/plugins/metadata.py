"""Reads installed distributions' metadata folders: one listing per search path entry, each needed file once.

``importlib.metadata`` parses every METADATA file to learn a distribution's name. With hundreds of distributions that
costs more than the whole start-up budget, so names come from the folders and only plugin distributions are parsed.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class MetadataFolder(NamedTuple):
    """One distribution's metadata; ``location`` is the search path entry that holds it."""

    name: str
    path: str
    location: str

    def read(self, file: str) -> str | None:
        """A file's text, or ``None`` when it is absent."""
        try:
            with open(os.path.join(self.path, file), encoding="utf-8", errors="replace") as stream:
                return stream.read()
        except OSError:
            return None


def canonical_name(name: str) -> str:
    """Distribution names compare without regard to case and to runs of ``-``, ``_`` and ``.``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def scan_metadata(search_path: Iterable[str] | None = None) -> Iterator[MetadataFolder]:
    """All metadata folders in search order, those of one entry by name; none in archives."""
    for location in search_locations(search_path):
        try:
            entries = sorted(os.listdir(location))
        except OSError:
            continue  # like Python itself, which ignores what it cannot list
        for entry in entries:
            # pip renames a folder it failed to remove to "~name".
            if entry.endswith((".dist-info", ".egg-info")) and entry[0].isalnum():
                name = canonical_name(entry.rpartition(".")[0].partition("-")[0])
                yield MetadataFolder(name, os.path.join(location, entry), location)


def search_locations(search_path: Iterable[str] | None) -> Iterable[str]:
    """The entries of the search path, each once, as real paths."""
    entries = sys.path if search_path is None else search_path
    return dict.fromkeys(os.path.realpath(entry or os.curdir) for entry in entries)


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
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        headers.setdefault(key.lower(), []).append(value.strip())
    return headers
