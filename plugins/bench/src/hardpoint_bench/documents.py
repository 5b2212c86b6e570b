"""Results as files: read where a command goes on with one, and written so that none is ever half there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hardpoint.errors import ConfigError

__all__ = ["check_same", "check_writable", "read_result", "write_text"]

_FORMAT = 1
_MACHINE = ("cpu", "cores", "threads")
_PARTS: dict[str, type] = {
    **dict.fromkeys(("settings", "machine", "missing_peers", "classes", "roofline", "scaling"), dict),
    **dict.fromkeys(("peaks", "targets"), list),
    "model": str,
}
"""What may be in a result, and as what."""


def read_result(path: Path | None, *, must_exist: bool = False) -> dict[str, Any]:
    """The document at ``path``; a new one where there is none. Raises ``ConfigError`` for a file that is no result."""
    if path is None:
        return {"format": _FORMAT}
    try:
        if not (must_exist or path.exists()):
            return {"format": _FORMAT}
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no result of a benchmark: {error}") from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ConfigError(f"{str(path)!r} is no result of a benchmark in format {_FORMAT}; name another file")
    for name, kind in _PARTS.items():
        if not isinstance(found.get(name, kind()), kind):
            raise ConfigError(f"{str(path)!r} is damaged: its {name!r} is no {kind.__name__}; remove the file")
    if any(name not in found["machine"] for name in _MACHINE if found.get("machine")):
        raise ConfigError(
            f"{str(path)!r} is damaged: its 'machine' lacks one of {', '.join(_MACHINE)}; remove the file"
        )
    return found


def check_writable(path: Path) -> None:
    """Raises ``ConfigError`` where :func:`write_text` would, which nobody wants to learn after an hour of measuring."""
    probe = path.with_name(f"{path.name}.{os.getpid()}.probe")
    write_text(probe, "")
    probe.unlink()


def check_same(path: Path, found: dict[str, Any], model: str, machine: dict[str, Any]) -> None:
    """Raises ``ConfigError`` where a result goes on on another machine or with another model: figures would mix."""
    if not found.get("machine"):
        return
    known = (found["model"], *(found["machine"][name] for name in _MACHINE))
    now = (model, *(machine[name] for name in _MACHINE))
    if known != now:
        raise ConfigError(
            f"--output {str(path)!r} has figures of {known} (model, {', '.join(_MACHINE)}), not of {now}; remove the "
            "file or name another one"
        )


def write_text(path: Path, text: str) -> None:
    """In one step. Raises ``ConfigError`` where that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None
