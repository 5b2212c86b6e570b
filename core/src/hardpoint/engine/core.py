"""The engine core: owns scheduler, executor and every live request; driven from one thread.

Each request that enters leaves with exactly one terminal output, whatever fails in between: :meth:`EngineCore._deliver`
is the only way out and forgets a request with its terminal output.
"""

from __future__ import annotations

import heapq
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.errors import ConfigError, EngineDeadError, EngineNotReadyError, InvalidRequestError, OverloadedError
from hardpoint.interfaces.executor import Executor
from hardpoint.interfaces.kv_events import KVEventBatch
from hardpoint.interfaces.request import EngineOutput, EngineOutputs, EngineRequest, FinishReason, SchedulerStats
from hardpoint.interfaces.scheduler import PauseMode, Scheduler
from hardpoint.plugins.report import LoadReport

_logger = logging.getLogger("hardpoint.engine")

ERROR_CODE = "error_code"
"""Key in ``EngineOutput.extensions`` under which a refusal names the class of errors that the front end is to raise."""

_CHECK_S = 1.0
"""How often a busy engine looks for requests that its scheduler lost; an idle one looks at once."""

UTILITIES = ("reset_prefix_cache", "set_pause", "stats", "check_health", "load_reports")


class EngineCore:
    """``hook(name, **arguments)`` calls this process's observers. ``wake`` may be set by the owner of the loop; it is
    called from any thread when a worker dies. ``load_reports`` tells the state of plugins here and in the workers.

    A failed step, scheduler or worker makes the engine dead: the state behind it is unknown, so every live request
    ends with ``ERROR`` and :attr:`dead_reason` says why. Failed rows of a step end only their own requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        max_inflight_steps: int = 1,
        hook: Callable[..., object] = lambda name, **arguments: None,
        load_reports: Callable[[], Sequence[LoadReport]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.dead_reason: str | None = None
        self.is_draining = False
        self.made_progress = False
        self.load_reports = load_reports
        self.wake: Callable[[], None] = lambda: None
        self._pipeline = StepPipeline(scheduler, executor, max_inflight_steps=max_inflight_steps)
        self._run_hook = hook
        self._clock = clock
        self._clients: dict[str, int] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._outbox: dict[int, list[EngineOutput]] = {}
        self._told: SchedulerStats | None = None
        self._num_event_batches = 0
        self._lost_worker: str | None = None
        self._needs_check = False
        self._next_check = 0.0
        executor.on_failure(self._worker_died)

    @property
    def num_live(self) -> int:
        return len(self._clients)

    @property
    def num_steps(self) -> int:
        """Steps completed; grows while the loop advances."""
        return self._pipeline.num_steps_updated

    def has_work(self) -> bool:
        """Whether :meth:`step` would do something now; False while paused or idle."""
        is_running = self.dead_reason is None and self._pipeline.has_work()
        return is_running or bool(self._outbox) or self._lost_worker is not None

    def next_deadline(self) -> float | None:
        """Absolute seconds of the earliest deadline, possibly of a request that ended already."""
        return self._deadlines[0][0] if self._deadlines else None

    def add(self, request: EngineRequest) -> None:
        """Take a request; its refusal too comes as a terminal output of the next :meth:`step`."""
        name = request.request_id
        if name in self._clients:
            _logger.error("request %s is already live; the second one of that name is dropped", name)
            return
        self._clients[name] = request.client_index
        if self.dead_reason is not None or self.is_draining:
            self._refuse(name, "the engine takes no new requests", EngineNotReadyError)
            return
        try:
            ended = self.scheduler.add(request)
        except (OverloadedError, InvalidRequestError) as error:
            kind = OverloadedError if isinstance(error, OverloadedError) else InvalidRequestError
            self._refuse(name, str(error), kind)
            return
        except (Exception, SystemExit) as error:
            self.fail(error)
            return
        self._needs_check = True
        if request.deadline is not None:
            self._remember_deadline(request.deadline, name)
        self._hook("request_added", request=request)
        self._deliver([] if ended is None else [ended])

    def abort(self, names: Iterable[str], reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        """End requests from outside; unknown and ended ones are ignored."""
        known = [name for name in names if name in self._clients]
        if known and self.dead_reason is None:
            self._guard(lambda: self._deliver(self.scheduler.finish(known, reason, error)))

    def abort_all(self) -> None:
        self.abort(list(self._clients), error="the engine is shutting down")

    def begin_drain(self) -> None:
        """Refuse new requests from now on; live ones go on to their end."""
        self.is_draining = True

    def step(self) -> dict[int, EngineOutputs]:
        """Advance by one step, or check the books if there is none to take. Never raises for a failed step.

        Returns one frame per client that has news.
        :attr:`made_progress` tells afterwards whether anything moved; if not, there is no use in calling at once again.
        """
        if self._lost_worker is not None:
            self.fail(EngineDeadError(self._lost_worker))
        steps = self.num_steps
        if self.dead_reason is None:
            self._guard(self._advance)
        self.made_progress = self.num_steps > steps or bool(self._outbox)
        return self.take_frames()

    def take_frames(self) -> dict[int, EngineOutputs]:
        """What is ready for each client, without computing anything."""
        events = self.scheduler.take_events() if self.dead_reason is None else ()
        if events:
            self._outbox.setdefault(0, [])
        if self._outbox:
            self._told = self.scheduler.stats() if self.dead_reason is None else None
        outbox, self._outbox = self._outbox, {}
        now = self._clock()
        frames = {client: EngineOutputs(outputs, self._told, now) for client, outputs in outbox.items()}
        if events:
            self._num_event_batches += 1
            batch = KVEventBatch(self._num_event_batches, now, list(events))
            frames[0] = msgspec.structs.replace(frames[0], kv_events=batch)
        return frames

    def untold_stats(self) -> EngineOutputs | None:
        """A frame of statistics alone, if they changed since the last frame: steps without outputs tell nothing."""
        stats = self.scheduler.stats() if self.dead_reason is None else None
        if stats is None or stats == self._told:
            return None
        self._told = stats
        return EngineOutputs([], stats, self._clock())

    def utility(self, method: str, args: Sequence[Any] = ()) -> Any:
        """Run one of :data:`UTILITIES`. Raises ``ConfigError`` for another name and whatever the call raises."""
        if method not in UTILITIES:
            raise ConfigError(f"engine call {method!r} does not exist; known: {', '.join(UTILITIES)}")
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if method == "set_pause":
            return self.scheduler.set_pause(PauseMode(args[0]))
        if method == "check_health":
            self.executor.collective_rpc("check_health")
            return None
        if method == "load_reports":
            return tuple(self.load_reports())
        while method == "reset_prefix_cache" and self._pipeline.inflight and not self._clients:
            # Planned before the last request ended: nobody waits for such a step, but it still holds blocks.
            self._advance()
        return getattr(self.scheduler, method)()

    def shutdown(self) -> None:
        """End live requests with ``ABORT`` (see :meth:`take_frames`) and stop the workers. No step may follow."""
        self.begin_drain()
        self.abort_all()
        self.executor.shutdown()

    def _advance(self) -> None:
        self._expire()
        if self._pipeline.has_work():
            self._needs_check = True
            steps = self.num_steps
            self._deliver(outputs := self._pipeline.advance())
            if self.num_steps > steps:
                self._hook("step_finished", stats=self.scheduler.stats(), outputs=outputs)
        elif self._needs_check:
            self._needs_check = False
            self.scheduler.check_integrity()
            self._end_lost()

    def _end_lost(self) -> None:
        """Between steps, whoever is live here must be live in the scheduler too, or would never hear anything."""
        lost = self._clients.keys() - set(self.scheduler.live_request_ids())
        if lost:
            _logger.error("the scheduler lost %d requests: %s", len(lost), ", ".join(sorted(lost)[:8]))
            self._deliver([EngineOutput(name, [], FinishReason.ERROR, error="internal error") for name in lost])

    def _expire(self) -> None:
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + _CHECK_S
            self._end_lost()
        while self._deadlines and self._deadlines[0][0] <= now:
            self.abort([heapq.heappop(self._deadlines)[1]], error="the request's time limit has passed")

    def _remember_deadline(self, deadline: float, name: str) -> None:
        """Deadlines of ended requests stay until they are most of the heap: a long limit must not keep them all."""
        if len(self._deadlines) > 2 * len(self._clients) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._clients]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, name))

    def _refuse(self, name: str, message: str, kind: type[Exception]) -> None:
        extensions = {ERROR_CODE: kind.__name__}
        self._deliver([EngineOutput(name, [], FinishReason.ERROR, error=message, extensions=extensions)])

    def _deliver(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            client = self._clients.get(output.request_id)
            if client is None:
                _logger.debug("output for request %s, which is not live, is dropped", output.request_id)
                continue
            self._outbox.setdefault(client, []).append(output)
            if output.finish_reason is not None:
                del self._clients[output.request_id]
                self._hook("request_finished", output=output)

    def _hook(self, name: str, **arguments: object) -> None:
        self._guard(lambda: self._run_hook(name, **arguments))

    def _guard(self, action: Callable[[], object]) -> None:
        """Whatever a scheduler, executor or strict hook raises leaves unknown state behind: the engine ends."""
        try:
            action()
        except (Exception, SystemExit) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> str:
        """End the engine and every live request because of ``error``; why it is dead, also from an earlier call."""
        reason, self._lost_worker = f"{type(error).__name__}: {error}", None
        if isinstance(error, SystemExit):
            # It carries a number at best; where it was raised says whose it is.
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            reason += f", called for by {frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
        _logger.error("the engine failed: %s", reason, exc_info=error)
        if self.dead_reason is None:
            self.dead_reason = reason
            for name in tuple(self._clients):
                self._refuse(name, "the engine failed during this request", EngineDeadError)
        return self.dead_reason

    def _worker_died(self, reason: str) -> None:
        self._lost_worker = reason
        self.wake()
