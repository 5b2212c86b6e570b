"""Chooses the kernel of every seam, once, before the model is created; what was refused and why stays visible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hardpoint.errors import ConfigError, PluginError
from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint_torch_runtime.ops.seams import SEAMS, Kernels, KernelSeam, check_signature, seam

__all__ = ["REFERENCE", "KernelChoice", "KernelTable", "select_kernels"]

REFERENCE = "reference"
"""The name of the plain kernel wherever an override can be named."""

_NOT_NAMED = "no override is named"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel of one seam: a plugin's name or :data:`REFERENCE`, with the overrides refused before it."""

    seam: str
    kernel: str
    reason: str
    refused: tuple[tuple[str, str], ...] = ()

    def row(self) -> str:
        """One line: everything that was looked at, in order, with what became of it."""
        looked_at = [f"{name} refused ({why})" for name, why in self.refused]
        return ", ".join([*looked_at, f"{self.kernel} ({self.reason})"])


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels a model is built with, and how each was chosen, in the order of the table of seams."""

    kernels: Kernels
    choices: tuple[KernelChoice, ...]

    @property
    def overrides(self) -> dict[str, str]:
        """Seam to plugin, where a plugin's kernel is used."""
        return {choice.seam: choice.kernel for choice in self.choices if choice.kernel != REFERENCE}

    def __str__(self) -> str:
        width = max(len(choice.seam) for choice in self.choices)
        return "\n".join(f"  {choice.seam:<{width}}  {choice.row()}" for choice in self.choices)


def select_kernels(
    create: Callable[[str], KernelOverride],
    named: Mapping[str, Sequence[str]],
    case: KernelCase,
    *,
    candidates: Mapping[str, Sequence[str]] = MappingProxyType({}),
    enabled: bool = True,
    logger: logging.Logger | None = None,
) -> KernelTable:
    """The kernel of every seam. ``create`` loads an override by name; ``case`` holds for every seam, with its own name
    and dtype.

    ``named`` are the operator's, by seam in order of preference: the first that accepts is taken, and the plain kernel
    only if :data:`REFERENCE` is among them. ``candidates`` are the platform's, for seams that the operator does not
    name: the first that loads and accepts, else the plain kernel. Not ``enabled``: plain kernels everywhere, nothing is
    loaded.

    Raises ``ConfigError`` for an unknown seam or when all that is named for a seam refuses, with each reason;
    ``PluginError`` for a named override that cannot be loaded or does not fit its seam.
    """
    for name in (*named, *candidates):
        seam(name)
    table = _Selection(create, case, enabled)
    for row in SEAMS.values():
        table.choose(row, named.get(row.name, ()), candidates.get(row.name, ()))
    if logger is not None:
        level = logging.INFO if named or candidates else logging.DEBUG
        logger.log(level, "kernels by seam:\n%s", table.result())
    return table.result()


class _Selection:
    """Choices made so far."""

    def __init__(self, create: Callable[[str], KernelOverride], case: KernelCase, enabled: bool) -> None:
        self._create = create
        self._case = case
        self._enabled = enabled
        self._functions: dict[str, Any] = {}
        self._choices: list[KernelChoice] = []

    def result(self) -> KernelTable:
        return KernelTable(Kernels(**self._functions), tuple(self._choices))

    def choose(self, row: KernelSeam, named: Sequence[str], candidates: Sequence[str]) -> None:
        if not self._enabled:
            wanted = ", ".join(named or candidates)
            self._note(row, REFERENCE, f"overrides are switched off, {wanted} too" if wanted else _NOT_NAMED)
        elif named:
            self._choose_named(row, named)
        else:
            self._choose_candidate(row, candidates)

    def _choose_named(self, row: KernelSeam, named: Sequence[str]) -> None:
        case = self._case_of(row)
        refused: list[tuple[str, str]] = []
        for name in named:
            if name == REFERENCE:
                return self._note(row, REFERENCE, "named", refused)
            reason = self._try(row, name, case)
            if reason is None:
                return self._note(row, name, "named", refused)
            refused.append((name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ConfigError(
            f"no kernel named for the seam {row.name!r} serves {case.dtype} on {case.device_type}: {reasons}; name "
            f"another one under plugins.worker.torch.kernel_overrides, or add {REFERENCE!r} to permit the plain kernel"
        )

    def _choose_candidate(self, row: KernelSeam, candidates: Sequence[str]) -> None:
        """Nobody asked for these by name, so one that cannot be loaded is passed over like one that refuses."""
        case = self._case_of(row)
        refused: list[tuple[str, str]] = []
        for name in candidates:
            try:
                reason = self._try(row, name, case)
            except PluginError as error:
                reason = str(error)
            if reason is None:
                return self._note(row, name, "the platform's choice", refused)
            refused.append((name, reason))
        self._note(row, REFERENCE, _NOT_NAMED if not candidates else "none of the platform's", refused)
        return None

    def _try(self, row: KernelSeam, name: str, case: KernelCase) -> str | None:
        """Why the override is not used, or None once it is the seam's kernel."""
        override = self._create(name)
        if not isinstance(override, KernelOverride):
            raise PluginError(f"kernel_override:{name} returned a {type(override).__name__}, not a KernelOverride")
        reason = override.refusal(case)
        if reason is None:
            try:
                check_signature(row, override.function)
            except PluginError as error:
                raise PluginError(f"kernel_override:{name} does not fit its seam: {error}") from error
            self._functions[row.name] = override.function
        return reason

    def _case_of(self, row: KernelSeam) -> KernelCase:
        return replace(self._case, seam=row.name, dtype=row.dtype or self._case.dtype)

    def _note(self, row: KernelSeam, kernel: str, reason: str, refused: Sequence[tuple[str, str]] = ()) -> None:
        self._choices.append(KernelChoice(row.name, kernel, reason, tuple(refused)))
