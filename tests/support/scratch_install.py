"""Metadata such as an installer would write, for packages that must not enter the environment itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["write_metadata"]


def write_metadata(project: dict[str, Any], site: Path) -> Path:
    """Write the ``dist-info`` folder of a project table into ``site``: name, version, requirements, entry points."""
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    headers = ["Metadata-Version: 2.3", f"Name: {project['name']}", f"Version: {project['version']}"]
    headers += [f"Requires-Dist: {line}" for line in project.get("dependencies", [])]
    (folder / "METADATA").write_text("\n".join(headers) + "\n", encoding="utf-8")
    groups: dict[str, dict[str, str]] = project.get("entry-points", {})
    sections = [
        "\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in row.items())]) for name, row in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return folder
