"""A typed table of named things that plugins fill."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from hardpoint.errors import PluginConflictError, PluginNotFoundError
from hardpoint.plugins.suggest import did_you_mean

__all__ = ["Registry"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Registry(Generic[K, V]):
    """Keys to values, each with the source it came from. ``label`` says in messages what is registered."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._entries: dict[K, tuple[V, str]] = {}

    def register(self, key: K, value: V, *, source: str) -> None:
        """Add ``value``; the same or an equal value again changes nothing.

        Raises ``PluginConflictError`` naming both sources when ``key`` holds something else.
        """
        held, owner = self._entries.setdefault(key, (value, source))
        if held is not value and held != value:
            raise PluginConflictError(
                f"{self.label} {key!r} is registered by both {owner} ({held!r}) and {source} ({value!r})"
            )

    def get(self, key: K) -> V:
        """Raises ``PluginNotFoundError`` listing the valid keys."""
        return self._entry(key)[0]

    def source(self, key: K) -> str:
        """Who registered ``key``. Raises ``PluginNotFoundError`` listing the valid keys."""
        return self._entry(key)[1]

    def _entry(self, key: K) -> tuple[V, str]:
        try:
            return self._entries[key]
        except KeyError:
            names = [str(known) for known in self._entries]
            hint = did_you_mean(str(key), names)
            valid = ", ".join(sorted(names)) or "none"
            raise PluginNotFoundError(f"unknown {self.label} {key!r}{hint}; registered: {valid}") from None

    def items(self) -> Iterator[tuple[K, V]]:
        """In order of registration."""
        return ((key, value) for key, (value, _) in self._entries.items())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
