"""The roles of a process. Apart from everything else, so that metadata-only commands import nothing heavy."""

from __future__ import annotations

import enum


class ProcessRole(enum.StrEnum):
    """What a process does. A process holds a *set* of roles, and plugin policy is judged against the set."""

    LAUNCHER = "launcher"
    API = "api"
    ENGINE = "engine"
    WORKER = "worker"
