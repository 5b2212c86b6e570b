"""Notices patches: compares the functions and classes of loaded modules before and after foreign code ran."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

__all__ = ["ModuleGuard"]

_FUNCTIONS = (FunctionType, BuiltinFunctionType, staticmethod, classmethod, property)


class ModuleGuard:
    """Remembers every function, class and method in the loaded modules below ``packages``.

    Values of other types are left out: caches and counters change by themselves. Modules loaded later are no concern,
    since nobody can have relied on them. Reading runs no code of what is read (R10.51). Packages in ``self_changing``
    may replace parts of themselves by their own, as frameworks do when a part of theirs is first used.
    """

    def __init__(self, packages: Iterable[str] = ("hardpoint",), *, self_changing: Iterable[str] = ()) -> None:
        self._self_changing = frozenset(self_changing)
        self._packages = frozenset(packages) | self._self_changing
        self._before = dict(self._entries())

    def changes(self) -> list[str]:
        """Dotted names that were replaced or removed since the guard was made, in alphabetical order."""
        now = dict(self._entries())
        changed = {name: now.get(name) for name, value in self._before.items() if now.get(name) is not value}
        return sorted(name for name, value in changed.items() if not self._by_itself(name, value))

    def _by_itself(self, name: str, value: Any) -> bool:
        package = name.partition(".")[0]
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        origin = getattr(function, "__module__", None) or ""
        return package in self._self_changing and origin.partition(".")[0] == package

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] not in self._packages or not issubclass(type(module), ModuleType):
                continue
            for name, value in list(vars(module).items()):
                # Never isinstance: a proxy would be asked for its class, which may import or warn.
                is_class = issubclass(type(value), type)
                if is_class or issubclass(type(value), _FUNCTIONS):
                    yield f"{module_name}.{name}", value
                if is_class and type.__getattribute__(value, "__module__") == module_name:
                    for key, member in list(type.__getattribute__(value, "__dict__").items()):
                        if issubclass(type(member), _FUNCTIONS):
                            yield f"{module_name}.{name}.{key}", member
