"""The engine process: sockets in, step loop, frames out.

The main thread owns the engine core and the outgoing sockets; one thread receives and decodes. Only frames of known
types do anything; others are logged and dropped.
"""

from __future__ import annotations

import gc
import logging
import queue
import signal
import threading
import time
from types import FrameType
from typing import Any

import msgspec
import zmq

from hardpoint.engine import messages as wire
from hardpoint.engine.build import build_engine
from hardpoint.engine.core import EngineCore
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import HardpointError
from hardpoint.interfaces.request import EngineOutputs
from hardpoint.ipc import CodecError, Decoder, encode
from hardpoint.process import announce_stop, boot
from hardpoint.roles import ProcessRole

_logger = logging.getLogger("hardpoint.engine")

ENTRY = "hardpoint.engine.core_process:main"
HEARTBEAT_S = 1.0
STALLED_WAIT_S = 0.001


class EnginePayload(msgspec.Struct, frozen=True):
    """``input_address`` is bound by the engine, each of ``output_addresses`` by the client of that index."""

    spec: EngineSpec
    input_address: str
    output_addresses: tuple[str, ...]


class _Terminated(BaseException):
    """SIGTERM before the engine was ready; derived so that no plugin's error handling catches it."""


class _Wake(msgspec.Struct, frozen=True):
    """Nothing but a reason to look again; ``fatal`` ends the engine."""

    fatal: str | None = None


_Inbox = queue.SimpleQueue[wire.ToEngine | _Wake]


def main(payload: bytes) -> int:
    """Entry point of the process. Exit codes: 0 after an orderly end, 1 after a failure, which was reported."""
    job = Decoder[EnginePayload](EnginePayload).decode(payload)
    sockets = EngineSockets(job)
    inbox: _Inbox = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, _leave)
    try:
        roles = {ProcessRole.ENGINE}
        if job.spec.worker_config.parallel.world_size == 1:
            roles.add(ProcessRole.WORKER)
        runtime = boot(job.spec.plan, roles, log_level=job.spec.log_level)
        core = build_engine(job.spec, runtime)
        # What start-up made stays: no step shall pay for a full collection that walks through all of it.
        gc.collect()
        gc.freeze()
        server = EngineServer(core, sockets, inbox, drain_timeout_s=job.spec.drain_timeout_s)
        signal.signal(signal.SIGTERM, server.on_sigterm)
    except _Terminated:
        return 0
    except (Exception, SystemExit) as error:
        # The launcher ends this process as soon as it has read the report; that must not interrupt the reporting.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        known = isinstance(error, HardpointError)
        _logger.error("the engine could not start: %s: %s", type(error).__name__, error, exc_info=not known)
        sockets.send_all(wire.StartupFailed(type(error).__name__, str(error)))
        sockets.close()
        return 1
    threading.Thread(target=sockets.receive_into, args=(inbox,), name="engine-input", daemon=True).start()
    sockets.send_all(wire.Ready(core.executor.supported_tasks()))
    code = server.run()
    announce_stop(runtime)
    sockets.close()
    return code


def _leave(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


class EngineSockets:
    """Outgoing sockets belong to the main thread, the incoming one to the thread of :meth:`receive_into`."""

    def __init__(self, job: EnginePayload) -> None:
        self._context = zmq.Context()
        self._input_address = job.input_address
        self._outputs = [self._context.socket(zmq.PUSH) for _ in job.output_addresses]
        for socket, address in zip(self._outputs, job.output_addresses, strict=True):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(address)

    def send(self, client: int, message: wire.FromEngine) -> None:
        if not 0 <= client < len(self._outputs):
            _logger.error("a message for client %d is dropped: there are %d", client, len(self._outputs))
            return
        self._outputs[client].send(encode(message))

    def send_all(self, message: wire.FromEngine) -> None:
        for client in range(len(self._outputs)):
            self.send(client, message)

    def close(self) -> None:
        """Give what was sent two seconds to leave."""
        for socket in self._outputs:
            socket.close(linger=2000)
        self._context.term()

    def receive_into(self, inbox: _Inbox) -> None:
        """Body of the input thread. Its end, other than with the process, is fatal for the engine (class 28)."""
        decoder = Decoder[wire.ToEngine](wire.ToEngine)
        try:
            with self._context.socket(zmq.PULL) as socket:
                socket.setsockopt(zmq.RCVHWM, 0)
                socket.bind(self._input_address)
                while True:
                    data = socket.recv()
                    try:
                        inbox.put(decoder.decode(data))
                    except CodecError as error:
                        _logger.error("a message of %d bytes is dropped: %s", len(data), error)
        except zmq.ContextTerminated:
            return
        except Exception as error:
            inbox.put(_Wake(f"the input thread ended: {type(error).__name__}: {error}"))


class EngineServer:
    """The loop around an engine core: messages, steps, heartbeats, and the ways to end."""

    def __init__(self, core: EngineCore, sockets: EngineSockets, inbox: _Inbox, *, drain_timeout_s: float) -> None:
        self._core = core
        self._sockets = sockets
        self._inbox = inbox
        self._drain_timeout_s = drain_timeout_s
        self._drain_until: float | None = None
        self._next_beat = 0.0
        core.wake = lambda: inbox.put(_Wake())

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """First time: finish what runs; second time: abort it. Queueing is safe inside a signal handler."""
        self._inbox.put(wire.Shutdown(drain=not self._core.is_draining, timeout_s=self._drain_timeout_s))

    def run(self) -> int:
        """Until shut down or dead; returns the exit code."""
        try:
            fatal = self._loop()
        except (Exception, SystemExit) as error:
            fatal = self._core.fail(error)
        self._core.begin_drain()
        self._core.abort_all()
        self._send_frames(self._core.take_frames())
        if fatal is not None:
            self._sockets.send_all(wire.Dead(fatal))
        self._core.shutdown()
        return 0 if fatal is None else 1

    def _loop(self) -> str | None:
        """Returns why the engine is dead, None after a shutdown."""
        fatal: str | None = None
        while fatal is None and not self._is_done():
            fatal = self._receive()
            self._advance()
            fatal = fatal or self._core.dead_reason
        return fatal

    def _is_done(self) -> bool:
        """Whether a shutdown was asked for and nothing is left to wait for."""
        if self._drain_until is None:
            return False
        return time.monotonic() >= self._drain_until or not (self._core.num_live or self._core.has_work())

    def _advance(self) -> None:
        self._send_frames(self._core.step())
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            self._sockets.send_all(wire.Heartbeat(self._core.num_steps))
            news = self._core.untold_stats()
            if news is not None:
                self._sockets.send_all(wire.Outputs(news))

    def _send_frames(self, frames: dict[int, EngineOutputs]) -> None:
        for client, batch in frames.items():
            self._sockets.send(client, wire.Outputs(batch))

    def _receive(self) -> str | None:
        """Handle what has come; wait for something only when there is nothing to compute. Returns a fatal reason."""
        try:
            message = self._inbox.get(timeout=self._wait_s())
            while True:
                if isinstance(message, _Wake):
                    if message.fatal is not None:
                        return message.fatal
                else:
                    self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _wait_s(self) -> float:
        if self._core.has_work():
            return 0.0 if self._core.made_progress else STALLED_WAIT_S
        deadline = self._core.next_deadline()
        wait = HEARTBEAT_S if deadline is None else min(max(deadline - time.time(), STALLED_WAIT_S), HEARTBEAT_S)
        return wait if self._drain_until is None else min(wait, max(self._drain_until - time.monotonic(), 0.001))

    def _handle(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Add):
            for request in message.requests:
                self._core.add(request)
        elif isinstance(message, wire.Abort):
            self._core.abort(message.request_ids)
        elif isinstance(message, wire.Utility):
            self._sockets.send(message.client_index, self._call(message))
        else:
            self._core.begin_drain()
            self._drain_until = time.monotonic() + (message.timeout_s if message.drain else 0.0)

    def _call(self, message: wire.Utility) -> wire.UtilityResult:
        try:
            result: Any = self._core.utility(message.method, message.args)
            encode(result)
        except (Exception, SystemExit) as error:
            return wire.UtilityResult(message.call_id, error=f"{type(error).__name__}: {error}")
        return wire.UtilityResult(message.call_id, result)
