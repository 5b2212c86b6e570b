"""Exceptions a user of Hardpoint can meet.

Every message says what was given, what is allowed and which setting to change. Only :class:`InvalidRequestError`
may carry text that reaches an HTTP client verbatim, so it never contains addresses, paths or tracebacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping


class HardpointError(Exception):
    """Base of every error raised on purpose."""


def as_raised(kind: str, message: str) -> HardpointError | None:
    """The error that another process reported by class name and text; None for a class that is none of these."""
    known = globals().get(kind)
    if isinstance(known, type) and issubclass(known, HardpointError):
        with contextlib.suppress(TypeError):  # A class that takes more than a text.
            return known(message)
    return None


class ConfigError(HardpointError):
    """A setting has a value that cannot work. Raised in the launcher, before any process starts."""


class InvalidRequestError(HardpointError):
    """A client sent something unusable. Becomes a 4xx; never harms the engine.

    ``param`` names the offending request field; ``code`` is a short machine-readable word; ``status`` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class OverloadedError(HardpointError):
    """The queue is full: HTTP 429 with ``Retry-After``. ``retry_after_s`` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PluginError(HardpointError):
    """Base for everything that concerns a plugin; names kind, plugin and distribution in its message."""


class PluginNotFoundError(PluginError):
    """A named plugin is not installed; the message lists the alternatives and what to install."""


class PluginConflictError(PluginError):
    """Two plugins claim one name, or two candidates remain where exactly one is allowed."""


class PluginLoadError(PluginError):
    """A selected plugin failed to import, probe or construct."""


class PluginMismatchError(PluginError):
    """A process has other plugins or versions installed than the launcher's plan says."""


class ModelNotFoundError(HardpointError):
    """No model source knows the given name or path."""


class ModelFormatError(HardpointError):
    """A model file is corrupt, truncated, unsupported or incomplete; the message names the file."""


class UnsupportedModelError(HardpointError):
    """The architecture or one of its features has no installed plugin."""


class EngineDeadError(HardpointError):
    """The engine process ended or stopped answering; every waiting request is told."""


class EngineNotReadyError(HardpointError):
    """The engine is starting, draining or stopped: HTTP 503."""


class WorkerError(HardpointError):
    """A worker call failed. ``rank`` is the worker's global rank, ``remote_traceback`` the original text.

    ``kind`` is the original exception's class name; ``results`` holds what the other ranks answered, by rank.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        remote_traceback: str = "",
        kind: str = "",
        results: Mapping[int, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.remote_traceback = remote_traceback
        self.kind = kind
        self.results = dict(results or {})


class OutOfBlocksError(HardpointError):
    """The KV block pool was asked for more blocks than are free: a programming error of a manager."""
