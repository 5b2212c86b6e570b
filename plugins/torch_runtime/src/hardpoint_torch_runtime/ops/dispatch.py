"""Chooses the kernel of every seam, once, before the model is created; what was refused and why stays visible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hardpoint.errors import ConfigError, PluginError
from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint_torch_runtime.ops.seams import SEAMS, Kernels, KernelSeam, check_signature, seam

__all__ = ["REFERENCE", "KernelChoice", "KernelTable", "select_kernels"]

REFERENCE = "reference"
"""The name of the plain kernel wherever an override can be named."""


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
    enabled: bool = True,
    logger: logging.Logger | None = None,
) -> KernelTable:
    """The first override named for a seam that accepts, and the plain kernel only where nobody named another.

    ``named`` maps seams to plugins in order of preference; :data:`REFERENCE` among them permits the plain kernel.
    ``create`` loads one by name; ``case`` is taken for every seam with its own name and dtype. Not ``enabled``: plain
    kernels everywhere, nothing is loaded.

    Raises ``ConfigError`` for an unknown seam or when all that is named for a seam refuses, with each reason;
    ``PluginError`` for an override that cannot be loaded or does not fit its seam.
    """
    for name in named:
        seam(name)
    replaced: dict[str, Any] = {}
    choices = []
    for row in SEAMS.values():
        wanted = named.get(row.name, ())
        if not wanted or not enabled:
            reason = "no override is named" if not wanted else f"overrides are switched off, {', '.join(wanted)} too"
            choices.append(KernelChoice(row.name, REFERENCE, reason))
            continue
        own_case = replace(case, seam=row.name, dtype=row.dtype or case.dtype)
        choice, function = _choose(row, wanted, create, own_case)
        choices.append(choice)
        if function is not None:
            replaced[row.name] = function
    table = KernelTable(Kernels(**replaced), tuple(choices))
    if logger is not None:
        logger.log(logging.INFO if named else logging.DEBUG, "kernels by seam:\n%s", table)
    return table


def _choose(
    row: KernelSeam, wanted: Sequence[str], create: Callable[[str], KernelOverride], case: KernelCase
) -> tuple[KernelChoice, Callable[..., object] | None]:
    refused: list[tuple[str, str]] = []
    for name in wanted:
        if name == REFERENCE:
            return KernelChoice(row.name, REFERENCE, "named", tuple(refused)), None
        override = create(name)
        if not isinstance(override, KernelOverride):
            raise PluginError(f"kernel_override:{name} returned a {type(override).__name__}, not a KernelOverride")
        reason = override.refusal(case)
        if reason is None:
            try:
                check_signature(row, override.function)
            except PluginError as error:
                raise PluginError(f"kernel_override:{name} does not fit its seam: {error}") from error
            return KernelChoice(row.name, name, "named", tuple(refused)), override.function
        refused.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise ConfigError(
        f"no kernel named for the seam {row.name!r} serves {case.dtype} on {case.device_type}: {reasons}; name another "
        f"one under plugins.worker.torch.kernel_overrides, or add {REFERENCE!r} to permit the plain kernel"
    )
