"""Log lines of every process: one format with the process's name and id, the level from one variable."""

from __future__ import annotations

import logging
import os
import sys

from hardpoint.errors import ConfigError

__all__ = ["LEVEL_VARIABLE", "configure_logging", "get_logger"]

LEVEL_VARIABLE = "HARDPOINT_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class _ProcessHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, so that configuring again replaces it."""


def configure_logging(process: str, level: str | None = None) -> None:
    """Send ``hardpoint`` log lines to stderr under the name ``process``; calling again replaces the configuration.

    ``level`` None takes ``HARDPOINT_LOG_LEVEL``, else INFO. An application that has set up the root logger keeps its
    own handlers: only the level is set then. Raises ``ConfigError`` for an unknown level.
    """
    chosen = (level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    if chosen not in _LEVELS:
        raise ConfigError(f"log level {chosen!r} is unknown; set {LEVEL_VARIABLE} to one of {', '.join(_LEVELS)}")
    logger = logging.getLogger("hardpoint")
    logger.setLevel(chosen)
    for handler in [h for h in logger.handlers if isinstance(h, _ProcessHandler)]:
        logger.removeHandler(handler)
    if logging.getLogger().handlers:
        return
    handler = _ProcessHandler(sys.stderr)
    name = process.replace("%", "%%")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {name}[%(process)d] %(name)s: %(message)s"))
    logger.addHandler(handler)


def get_logger(name: str) -> logging.Logger:
    """A logger below ``hardpoint``, whatever package asks: ``get_logger("hardpoint_x.y")`` is ``hardpoint.x.y``."""
    if name.startswith("hardpoint_"):
        name = "hardpoint." + name.removeprefix("hardpoint_")
    return logging.getLogger(name if name.startswith("hardpoint") else f"hardpoint.{name}")
