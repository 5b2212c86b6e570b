"""Plugin kind ``compiler``: replaces ranges of a loaded model by faster callables. Eager execution stays the oracle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Inclusive range of step token counts a lowered callable serves."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LoweredRange:
    """One replaced range of layers, or the reason it stays eager (``reason`` set, ``tokens`` None)."""

    layer_names: tuple[str, ...]
    tokens: TokenRange | None
    reason: str | None = None


class Compiler(ABC):
    name: str

    @abstractmethod
    def lower(self, model: Any) -> list[LoweredRange]:
        """Install callables on ``model`` after weights are loaded; report every range, refused ones with a reason.

        Must not change results beyond the tolerance it declares. What is kept beyond the process goes by a key that
        contains ``PluginAccess.fingerprint()``: it changes with operators and kernel overrides.
        """
