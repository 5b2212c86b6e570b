"""The front end's side of an engine process: its sockets, its calls and its life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from hardpoint.engine import messages as wire
from hardpoint.engine.core_process import ENTRY, EnginePayload
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import EngineDeadError, HardpointError, as_raised
from hardpoint.interfaces.request import EngineOutputs, EngineRequest
from hardpoint.ipc import Decoder, create_runtime_dir, encode, private_ipc_address
from hardpoint.process import ChildProcess, describe_exit, spawn

_logger = logging.getLogger("hardpoint.engine")
LAST_WORDS_S = 0.1
"""After a child's exit: time for frames it had sent to arrive."""
KILL_AFTER_S = 5.0
"""What a child gets to end after it was told to."""


class ProcessClient:
    """One engine process, its sockets and its life, on one event loop.

    ``tasks`` are what the engine offers, None until it is loaded. Set ``on_outputs`` and ``on_dead`` before the first
    request. ``on_dead`` runs once, whatever ended the engine.
    """

    def __init__(self, child: ChildProcess, receiver: zmq.asyncio.Socket, address: str, stall_after_s: float) -> None:
        self.child = child
        self.on_outputs: Callable[[EngineOutputs], None] = lambda batch: None
        self.on_dead: Callable[[str], None] = lambda reason: None
        self.tasks: tuple[str, ...] | None = None
        self.dead_reason: str | None = None
        self.is_closing = False
        self._stall_after_s = stall_after_s
        self._loop = asyncio.get_running_loop()
        self._last_sign = time.monotonic()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._receiver = receiver
        self._context = zmq.Context()
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.setsockopt(zmq.SNDHWM, 0)
        self._sender.connect(address)
        self._decoder = Decoder[wire.FromEngine](wire.FromEngine)
        self._reader = self._loop.create_task(self._receive(), name="engine-frames")
        self._reader.add_done_callback(self._reader_ended)
        child.on_exit(self._on_exit)

    @classmethod
    async def launch(cls, spec: EngineSpec) -> ProcessClient:
        """Start the engine process and wait until it is loaded.

        Raises the error that stopped its start, as its own class where it is one of ours; ``EngineDeadError`` else.
        """
        folder = spec.runtime_dir or create_runtime_dir()
        name = f"engine-{uuid.uuid4().hex[:8]}"
        addresses = [private_ipc_address(folder, f"{name}.{end}") for end in ("in", "out")]
        context = zmq.asyncio.Context()
        receiver = context.socket(zmq.PULL)
        receiver.setsockopt(zmq.RCVHWM, 0)
        receiver.bind(addresses[1])
        payload = EnginePayload(spec, addresses[0], (addresses[1],))
        child = spawn(ENTRY, encode(payload), name=f"engine-{spec.model_name}")
        client = cls(child, receiver, addresses[0], spec.stall_after_s)
        try:
            await client._ready
        except BaseException:
            await client.shutdown(drain=False)
            raise
        return client

    @property
    def silence_s(self) -> float:
        """Seconds since the step loop last showed that it advances."""
        return time.monotonic() - self._last_sign

    @property
    def is_alive(self) -> bool:
        return self.dead_reason is None and self.silence_s < self._stall_after_s

    @property
    def is_ready(self) -> bool:
        """Loaded, and advancing within a third of the time after which it counts as stalled."""
        responsive = self.silence_s < self._stall_after_s / 3
        running = self.child.is_alive and self.dead_reason is None and not self.is_closing
        return self.tasks is not None and running and responsive

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._send(wire.Add(list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids and self.dead_reason is None:
            self._send(wire.Abort(list(request_ids)))

    async def utility(self, method: str, *args: Any) -> Any:
        """Call one of ``core.UTILITIES``. Raises ``HardpointError`` with the engine's text, ``EngineDeadError``."""
        self._num_calls += 1
        call_id = self._num_calls
        self._calls[call_id] = self._loop.create_future()
        try:
            self._send(wire.Utility(call_id, 0, method, list(args)))
            return await self._calls[call_id]
        finally:
            del self._calls[call_id]

    async def shutdown(self, *, drain: bool = True, timeout_s: float = 30.0) -> int | None:
        """End the process, by force when it takes too long: live requests get ``timeout_s`` if ``drain``, else nothing.

        Returns the exit code, None after a kill.
        """
        already, self.is_closing = self.is_closing, True
        if self.tasks is None:
            self.child.terminate()  # While it loads it listens to nothing else.
        elif not already and self.child.is_alive and self.dead_reason is None:
            self._send(wire.Shutdown(drain, timeout_s))
        grace = KILL_AFTER_S + (timeout_s if drain else 0.0)
        code = await asyncio.to_thread(self.child.wait, grace)
        await asyncio.sleep(LAST_WORDS_S)
        if code is None:
            _logger.warning("the engine process did not end within %.0f s and is killed", grace)
        await asyncio.to_thread(self.child.close)
        self._die("the engine was shut down")
        self._reader.cancel()
        await asyncio.wait({self._reader})  # Its error, if it had one, was told when it ended.
        self._receiver.context.destroy(linger=0)
        self._context.destroy(linger=0)
        return code

    def _send(self, message: wire.ToEngine) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        self._sender.send(encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            data = await self._receiver.recv()
            try:
                self._handle(self._decoder.decode(data))
            except Exception:
                # A dead reader would let every request hang: nothing a frame causes may end it.
                _logger.exception("a frame of %d bytes from the engine could not be handled", len(data))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self._die(f"receiving from the engine failed: {reader.exception()}")

    def _handle(self, message: wire.FromEngine) -> None:
        self._last_sign = time.monotonic()
        if isinstance(message, wire.Outputs):
            self.on_outputs(message.batch)
        elif isinstance(message, wire.UtilityResult):
            outcome = message.result if message.error is None else HardpointError(message.error)
            _settle(self._calls.get(message.call_id), outcome)
        elif isinstance(message, wire.Ready):
            self.tasks = message.tasks
            _settle(self._ready, None)
        elif isinstance(message, wire.StartupFailed):
            text = f"{message.kind}: {message.message}"
            fallback = EngineDeadError(f"the engine could not start: {text}")
            self._die(text, as_raised(message.kind, message.message) or fallback)
        elif isinstance(message, wire.Dead):
            self._die(message.reason)

    def _on_exit(self, returncode: int) -> None:
        """On the watcher's thread."""
        reason = f"the engine process ended with {describe_exit(returncode)}"
        with contextlib.suppress(RuntimeError):  # The loop may be closed by now; then nobody waits.
            self._loop.call_soon_threadsafe(lambda: self._loop.call_later(LAST_WORDS_S, self._die, reason))

    def _die(self, reason: str, error: HardpointError | None = None) -> None:
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if not self.is_closing:
            _logger.error("the engine is gone: %s", reason)
        for waiting in [*self._calls.values(), self._ready]:
            _settle(waiting, error or EngineDeadError(reason))
        self.on_dead(reason)


def _settle(waiting: asyncio.Future[Any] | None, outcome: Any) -> None:
    """Give the waiting caller its result or exception, if there still is one."""
    if waiting is None or waiting.done():
        return
    if isinstance(outcome, Exception):
        waiting.set_exception(outcome)
        waiting.exception()  # Looked at, so that a caller who gave up meanwhile leaves no complaint behind.
    else:
        waiting.set_result(outcome)
