"""Calls that wait for answers, and the one moment at which everything fails."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hardpoint.errors import EngineDeadError
from hardpoint_executors.errors import worker_error
from hardpoint_executors.rpc import RpcCodec, RpcFailure, RpcReply

__all__ = ["PendingCalls"]

_MAX_REMEMBERED = 256
_GRACE_S = 5.0


@dataclass(slots=True)
class _Pending:
    """``results`` and ``failures`` by rank; complete when ``wanted`` is covered. ``timer`` runs since a failure."""

    method: str
    wanted: frozenset[int]
    future: Future[Any]
    unwrap: bool
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, RpcFailure] = field(default_factory=dict)
    timer: threading.Timer | None = None

    @property
    def silent(self) -> frozenset[int]:
        """The ranks that are still to answer."""
        return self.wanted - self.results.keys() - self.failures.keys()


class PendingCalls:
    """Shared by the engine's thread, which opens calls, and the reader threads, which answer them.

    A future's value is the list of results in rank order, or the only one of them for a call opened with ``unwrap``.
    Once failed, everything open and new fails with the reason. Answers of one rank complete in the order of the calls;
    only a failure of a rank that was not asked can overtake them. After a first failure the others are given
    ``grace_s`` seconds more: they may be waiting for the failed rank inside a collective.
    """

    def __init__(self, codec: RpcCodec, world_size: int, grace_s: float = _GRACE_S) -> None:
        self._codec = codec
        self._world_size = world_size
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._open: dict[int, _Pending] = {}
        self._given_up: deque[int] = deque(maxlen=_MAX_REMEMBERED)
        self._last_id = 0
        self._reason: str | None = None
        self._failed = threading.Event()
        self._callbacks: list[Callable[[str], None]] = []

    @property
    def failure_reason(self) -> str | None:
        return self._reason

    def wait_failed(self, timeout_s: float) -> bool:
        """Whether everything has failed, at the latest after ``timeout_s`` seconds."""
        return self._failed.wait(timeout_s)

    def open(self, method: str, ranks: frozenset[int], *, unwrap: bool = False) -> tuple[int, Future[Any]]:
        """A new call id, and the future of the answers of ``ranks``."""
        future: Future[Any] = Future()
        with self._lock:
            self._last_id += 1
            if self._reason is None:
                self._open[self._last_id] = _Pending(method, ranks, future, unwrap)
                return self._last_id, future
            reason = self._reason
        future.set_exception(EngineDeadError(reason))
        return self._last_id, future

    def withdraw(self, call_id: int) -> frozenset[int]:
        """Forget a call that took too long; returns the ranks that have not answered."""
        with self._lock:
            call = self._open.pop(call_id, None)
            self._given_up.append(call_id)
        return call.silent if call is not None else frozenset()

    def answer(self, rank: int, reply: RpcReply) -> None:
        """Take one answer. Raises ``CodecError`` for a result of another type than the method's.

        A rank that was not asked to answer does so only to report a failure. When that comes after the step's result
        was handed out, the ranks have diverged and the whole executor fails.
        """
        with self._lock:
            call = self._open.get(reply.call_id)
            is_known_failure = reply.call_id in self._given_up
        if call is None:
            if reply.failure is not None and not is_known_failure:
                self.fail(f"worker rank {rank} failed in {reply.method}: {reply.failure.kind}: {reply.failure.message}")
            return
        if reply.failure is not None:
            call.failures[rank] = reply.failure
        else:
            call.results[rank] = self._codec.result(reply)
        self._settle(reply.call_id, call)

    def _settle(self, call_id: int, call: _Pending, *, gives_up: bool = False) -> None:
        with self._lock:
            unasked_failure = bool(call.failures.keys() - call.wanted)
            if call.silent and not (unasked_failure or gives_up):
                self._limit(call_id, call)
                return
            if self._open.pop(call_id, None) is None:
                return
            if call.timer is not None:
                call.timer.cancel()
            if call.failures:
                self._given_up.append(call_id)
            late = call.silent if gives_up else frozenset()
        if call.failures:
            call.future.set_exception(
                worker_error(call.method, call.failures, call.results, self._world_size, late=late)
            )
        else:
            results = [call.results[rank] for rank in sorted(call.wanted)]
            call.future.set_result(results[0] if call.unwrap else results)

    def _limit(self, call_id: int, call: _Pending) -> None:
        if call.failures and call.timer is None:
            call.timer = threading.Timer(self._grace_s, self._settle, (call_id, call), {"gives_up": True})
            call.timer.daemon = True
            call.timer.start()

    def on_failure(self, callback: Callable[[str], None]) -> None:
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        callback(self._reason)

    def fail(self, reason: str, *, tell: bool = True) -> None:
        """End every open call with ``EngineDeadError``; the first reason counts. ``tell`` runs the callbacks."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            calls, self._open = list(self._open.values()), {}
            callbacks, self._callbacks = self._callbacks, []
        self._failed.set()
        for call in calls:
            if call.timer is not None:
                call.timer.cancel()
            call.future.set_exception(EngineDeadError(reason))
        for callback in callbacks if tell else ():
            callback(reason)
