"""What the benchmark says of a scheduler that breaks the rules of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from hardpoint.errors import HardpointError
from hardpoint.interfaces import Scheduler, SchedulerStats

__all__ = ["SchedulerFault", "blaming", "in_words", "require"]

_OWN = __name__.partition(".")[0]


class SchedulerFault(HardpointError):
    """The scheduler under test did what no scheduler may do, so its figures would mean nothing."""


def require(kept: bool, rule: str, found: str) -> None:
    """Raises :class:`SchedulerFault` with ``rule`` and what was ``found`` instead, unless the rule was kept."""
    if not kept:
        raise SchedulerFault(f"{rule}; {found}")


def in_words(stats: SchedulerStats) -> str:
    """Who runs and waits, and how many blocks are free."""
    blocks = f"{stats.num_free_blocks} of {stats.num_total_blocks} blocks free"
    return f"{stats.num_running} running, {stats.num_waiting} waiting, {blocks}, {stats.num_preemptions} preemptions"


@contextmanager
def blaming(label: str) -> Iterator[None]:
    """Turns errors that come out of a method of scheduler ``label``, or out of a policy or other plugin that it calls,
    into :class:`SchedulerFault`. Errors raised on purpose and those of the benchmark itself pass.
    """
    try:
        yield
    except HardpointError:
        raise
    except Exception as error:
        calls = list(walk_tb(error.__traceback__))
        own = [at for at, (frame, _) in enumerate(calls) if frame.f_globals.get("__name__", "").startswith(_OWN)]
        called = calls[own[-1] + 1 :]
        if not called or not hasattr(Scheduler, called[0][0].f_code.co_name):
            raise
        frame, line = called[-1]
        where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
        raise SchedulerFault(
            f"{label} raised {type(error).__name__}: {error} ({where}); HARDPOINT_TRACEBACK=1 shows how it came there"
        ) from error
