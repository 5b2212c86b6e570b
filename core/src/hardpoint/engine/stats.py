"""Hands statistics events to the loggers and keeps a failing one from harming anything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from hardpoint.engine.output_processor import StatEvent
from hardpoint.errors import PluginError
from hardpoint.interfaces.stat_logger import RequestFinished, StatLogger, StepObserved, TokensEmitted

_METHODS = {StepObserved: "on_step", RequestFinished: "on_finished", TokensEmitted: "on_tokens"}
FailurePolicy = Callable[[str, Exception], None]
_logger = logging.getLogger("hardpoint.engine")


class StatFanout:
    """``quarantine(name, error)`` is told of a failing logger, which is left out from then on.

    Nothing raises here, whatever ``quarantine`` makes of it: requests are under way, and statistics may not harm them.
    """

    def __init__(self, loggers: Mapping[str, StatLogger], quarantine: FailurePolicy | None = None) -> None:
        self.loggers = dict(loggers)
        self._quarantine = quarantine

    def observe(self, event: StatEvent) -> None:
        for name, logger in list(self.loggers.items()):
            self._guard(name, getattr(logger, _METHODS[type(event)]), event)

    def flush(self) -> None:
        for name, logger in list(self.loggers.items()):
            self._guard(name, logger.flush)

    async def run(self) -> None:
        """Flush each logger at its own interval, until cancelled."""
        await asyncio.gather(*(self._flush_every(name, logger) for name, logger in self.loggers.items()))

    async def _flush_every(self, name: str, logger: StatLogger) -> None:
        while name in self.loggers:
            await asyncio.sleep(logger.interval_s)
            self._guard(name, logger.flush)

    def _guard(self, name: str, method: Callable[..., None], *args: StatEvent) -> None:
        try:
            method(*args)
        except (Exception, SystemExit) as raised:
            error = raised if isinstance(raised, Exception) else PluginError(f"SystemExit: {raised}")
            self.loggers.pop(name, None)
            _logger.warning("stat logger %r failed and is left out: %s: %s", name, type(raised).__name__, raised)
            if self._quarantine is not None:
                with contextlib.suppress(PluginError):
                    self._quarantine(name, error)
