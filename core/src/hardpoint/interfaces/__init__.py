"""The public contracts of Hardpoint: abstract classes and frozen records, one module per plugin kind.

The names and where they come from stand in ``__init__.pyi``. A module is imported when one of its names is first used,
so a plugin pays for the contracts of its own kind only.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

# This name is a module's as well: imported now, it stays the function's.
from hardpoint.interfaces.plugin import plugin as plugin

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
_IMPORTS = [node for node in _STUB.body if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
_MODULES = {alias.name: str(node.module) for node in _IMPORTS for alias in node.names}
__all__ = [*_MODULES]  # noqa: PLE0604 (names, from the stub)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
