"""``hardpoint plugins manifest``: writes a distribution's ``hardpoint.json``, or says whether it is in step."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint.testing.manifest_writer import manifests_of

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("distribution", metavar="DIST", help="an installed distribution with plugins (an editable one while you write)")
    add("--check", action="store_true", help="write nothing; exit status 1 and the difference if the file is stale")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--write", metavar="PATH", help="this file instead of hardpoint.json in the package's folder")
    place.add_argument("--stdout", action="store_true", help="print it instead of writing a file")


def run(arguments: argparse.Namespace) -> int:
    """0, or with ``--check`` 1 when a file differs. Raises ``ConfigError`` and the plugin errors."""
    manifests = manifests_of(arguments.distribution)
    if arguments.check and arguments.stdout:
        raise ConfigError("--check compares a file and prints the difference; leave out --stdout")
    if arguments.write is not None:
        if len(manifests) > 1:
            raise ConfigError(
                f"{arguments.distribution} has plugins in {len(manifests)} packages, so --write names too few files; "
                "leave it out to write each package's own"
            )
        manifests = {Path(arguments.write): text for text in manifests.values()}
    if arguments.stdout:
        print("".join(manifests.values()), end="")
        return 0
    if arguments.check:
        return max(_check(path, text) for path, text in manifests.items())
    for path, text in manifests.items():
        _write(path, text)
    return 0


def _check(path: Path, text: str) -> int:
    present = path.read_text(encoding="utf-8") if path.is_file() else ""
    if present == text:
        print(f"{path} is in step with the code")
        return 0
    lines = difflib.unified_diff(
        present.splitlines(), text.splitlines(), str(path), "what the code declares", lineterm="", n=2
    )
    print("\n".join(lines))
    return 1


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; use --write PATH or --stdout") from None
    print(f"wrote {path}")
