"""Which layers a method takes, which it leaves alone and why: said once, after loading."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections import defaultdict
from collections.abc import Sequence

__all__ = ["Selection"]


class Selection:
    """The layers of one model in one worker. ``ignore`` holds exact names and fnmatch patterns."""

    def __init__(self, method: str, ignore: Sequence[str], logger: logging.Logger) -> None:
        self._method = method
        self._ignore = tuple(ignore)
        self._logger = logger
        self._names: dict[str, None] = {}
        self._left: dict[str, str] = {}

    def is_ignored(self, name: str) -> bool:
        """Whether a pattern of ``ignore`` names the layer; it is then noted as left alone."""
        self._names[name] = None
        pattern = next((one for one in self._ignore if fnmatch.fnmatchcase(name, one)), None)
        if pattern is not None:
            self.leave(name, f"ignored by {pattern!r}")
        return pattern is not None

    def leave(self, name: str, reason: str) -> None:
        """Note that the layer stays dense."""
        self._names[name] = None
        self._left[name] = reason

    @property
    def left_dense(self) -> dict[str, str]:
        """Reason by name of the layer."""
        return dict(self._left)

    def unmatched(self) -> list[str]:
        """Patterns that named no layer, each with the names most like it."""
        found = []
        for pattern in self._ignore:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self._names):
                near = difflib.get_close_matches(pattern, self._names, n=3, cutoff=0.3)
                found.append(f"{pattern!r} (near: {', '.join(near) or 'none'})")
        return found

    def report(self) -> None:
        """Log how many layers were quantized, and which were not, by reason."""
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for name, reason in self._left.items():
            by_reason[reason].append(name)
        quantized = len(self._names) - len(self._left)
        left = "; ".join(f"{_some(names)}: {reason}" for reason, names in by_reason.items())
        self._logger.info("%s: %d layers quantized, left dense: %s", self._method, quantized, left or "none")
        for pattern in self.unmatched():
            self._logger.warning(
                "%s: the ignore pattern %s matches no layer of this model, so nothing was left out for it",
                self._method,
                pattern,
            )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} such as {names[0]}"
