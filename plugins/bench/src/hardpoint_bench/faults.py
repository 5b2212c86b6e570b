"""What the benchmark says of a scheduler that breaks the rules of its kind."""

from __future__ import annotations

from hardpoint.errors import HardpointError

__all__ = ["SchedulerFault", "require"]


class SchedulerFault(HardpointError):
    """The scheduler under test did what no scheduler may do, so its figures would mean nothing."""


def require(kept: bool, rule: str, found: str) -> None:
    """Raises :class:`SchedulerFault` with ``rule`` and what was ``found`` instead, unless the rule was kept."""
    if not kept:
        raise SchedulerFault(f"{rule}; {found}")
