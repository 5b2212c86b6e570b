"""What a worker process is told at its start, and what it answers once."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.interfaces import WorkerConfig
from hardpoint_executors.rpc import RpcFailure

__all__ = ["StartAnswer", "StartFailure", "WorkerReady", "WorkerStart"]


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors are inherited: the worker's end of its channel, the call ring, and the file to meet at."""

    plan: bytes
    worker: str
    config: WorkerConfig
    attributes: dict[str, Any]
    channel_fd: int
    ring_fd: int
    meeting_fd: int
    log_level: str | None = None


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker is built and waits for calls."""


class StartFailure(msgspec.Struct, frozen=True, tag=True):
    failure: RpcFailure


StartAnswer = WorkerReady | StartFailure
