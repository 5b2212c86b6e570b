"""Virtual environments that lack some distributions of this one: metadata, path entries and modules.

Everything else is linked, so that an environment is made in milliseconds and its child processes see the same.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

__all__ = ["make_environment", "site_packages"]


def make_environment(folder: Path, hidden: Iterable[str]) -> Path:
    """The Python of a new environment in ``folder`` without the distributions named in ``hidden``."""
    missing = {entry for name in hidden for entry in _site_entries(name)}
    site = site_packages(folder)
    site.mkdir(parents=True)
    for entry in os.scandir(sysconfig.get_path("purelib")):
        if entry.name not in missing:
            (site / entry.name).symlink_to(entry.path)
    python = folder / "bin/python"
    python.parent.mkdir()
    base = Path(os.path.realpath(sys.executable))
    python.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n", encoding="utf-8")
    return python


def site_packages(folder: Path) -> Path:
    major, minor = sys.version_info[:2]
    return folder / f"lib/python{major}.{minor}/site-packages"


def _site_entries(name: str) -> set[str]:
    """What the distribution put directly into the folder of installed packages, a ``.pth`` of an editable one too."""
    files = metadata.distribution(name).files
    if not files:
        raise AssertionError(f"the metadata of {name} list no files")
    return {file.parts[0] for file in files if file.parts[0] != ".."}
