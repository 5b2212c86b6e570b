"""The way of a step to a worker process and back, and of its outputs to a client: what the product adds to a step.

Steps and answers travel as frames over a socket pair, outputs as one ZeroMQ message per step on a private address, all
of them in the codec of ``hardpoint.ipc``. The other ends are processes of their own.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import zmq

from hardpoint.errors import EngineDeadError
from hardpoint.interfaces import (
    EngineOutput,
    EngineOutputs,
    RunnerOutput,
    SchedulerLimits,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint.ipc import Decoder, create_runtime_dir, encode, private_ipc_address
from hardpoint.process import ChildProcess, spawn
from hardpoint_bench.faults import require
from hardpoint_bench.scripted_worker import ScriptedWorker

__all__ = ["Hops", "client_main", "worker_main"]

_HEADER = struct.Struct("<I")
_STOP_S = 10.0


class WorkerStart(msgspec.Struct, frozen=True):
    descriptor: int
    limits: SchedulerLimits
    num_blocks: int
    block_size: int


class ClientStart(msgspec.Struct, frozen=True):
    descriptor: int
    address: str


class Call(msgspec.Struct, frozen=True):
    step: SchedulerOutput
    ending: bool


class Answer(msgspec.Struct, frozen=True):
    """``busy_ns``: what the script itself took, which is no part of the way."""

    output: RunnerOutput
    busy_ns: int


class Tally(msgspec.Struct, frozen=True):
    """What a client has received."""

    frames: int
    tokens: int


def _send(link: socket.socket, frame: bytes) -> None:
    link.sendall(_HEADER.pack(len(frame)) + frame)


def _receive(link: socket.socket) -> bytes:
    """The next frame; empty when the other end is gone."""
    header = link.recv(_HEADER.size, socket.MSG_WAITALL)
    if len(header) < _HEADER.size:
        return b""
    return link.recv(_HEADER.unpack(header)[0], socket.MSG_WAITALL)


def _inherited(descriptor: int) -> socket.socket:
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    return link


def worker_main(payload: bytes) -> int:
    """Entry of the worker process: answers calls until the other end closes."""
    start = Decoder[WorkerStart](WorkerStart).decode(payload)
    worker = ScriptedWorker(start.limits, num_blocks=start.num_blocks, block_size=start.block_size)
    calls = Decoder[Call](Call)
    with _inherited(start.descriptor) as link:
        while frame := _receive(link):
            call = calls.decode(frame)
            worker.ending = call.ending
            started = perf_counter_ns()
            output = worker.execute(call.step)
            _send(link, encode(Answer(output, perf_counter_ns() - started)))
    return 0


def client_main(payload: bytes) -> int:
    """Entry of the client process: takes frames until it has as many as the other end tells it to expect."""
    start = Decoder[ClientStart](ClientStart).decode(payload)
    frames = Decoder[EngineOutputs](EngineOutputs)
    num_frames = num_tokens = 0
    expected: int | None = None
    with _inherited(start.descriptor) as link, zmq.Context() as context, context.socket(zmq.PULL) as inbox:
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.bind(start.address)
        _send(link, b"ready")
        poller = zmq.Poller()
        poller.register(inbox, zmq.POLLIN)
        poller.register(link, zmq.POLLIN)
        while expected is None or num_frames < expected:
            ready = dict(poller.poll())
            if inbox in ready:
                num_frames += 1
                num_tokens += sum(len(o.new_token_ids) for o in frames.decode(inbox.recv()).outputs)
            elif ready:
                told = _receive(link)
                if not told:
                    return 0
                expected = int(told)
        _send(link, encode(Tally(num_frames, num_tokens)))
    return 0


class Hops:
    """Both ways, as a context manager. :attr:`nanoseconds` grows by what they take; set it to 0 between steps."""

    def __init__(self, limits: SchedulerLimits, *, num_blocks: int, block_size: int) -> None:
        self.nanoseconds = 0
        self._num_frames = 0
        self._num_tokens = 0
        self._links: list[socket.socket] = []
        self._children: list[ChildProcess] = []
        self._answers = Decoder[Answer](Answer)
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        try:
            fields = (limits, num_blocks, block_size)
            self._worker = self._start("worker", lambda descriptor: WorkerStart(descriptor, *fields))
            address = private_ipc_address(create_runtime_dir(), "bench-client")
            self._client = self._start("client", lambda descriptor: ClientStart(descriptor, address))
            self._outbox.setsockopt(zmq.SNDHWM, 0)
            self._ask(self._client, "client")
            self._outbox.connect(address)
        except BaseException:
            self.close()
            raise

    def _start(self, role: str, start: Callable[[int], msgspec.Struct]) -> socket.socket:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._links.append(near)
        with far:
            entry = f"{__name__}:{role}_main"
            payload = encode(start(far.fileno()))
            self._children.append(spawn(entry, payload, name=f"bench-{role}", pass_fds=(far.fileno(),)))
        return near

    def _ask(self, link: socket.socket, role: str, frame: bytes = b"") -> bytes:
        """Send ``frame`` unless it is empty, and wait for one. Raises ``EngineDeadError`` when the process is gone."""
        try:
            if frame:
                _send(link, frame)
            answer = _receive(link)
        except OSError:
            answer = b""
        if not answer:
            raise EngineDeadError(f"the benchmark's {role} process has ended; its log says why")
        return answer

    def execute(self, step: SchedulerOutput, expected: RunnerOutput, *, ending: bool) -> RunnerOutput:
        """The answer of the worker process. Raises ``SchedulerFault`` when it differs from ``expected``."""
        started = perf_counter_ns()
        answer = self._answers.decode(self._ask(self._worker, "worker", encode(Call(step, ending))))
        self.nanoseconds += perf_counter_ns() - started - answer.busy_ns
        same = np.array_equal(answer.output.token_ids, expected.token_ids)
        require(same, "a step means the same in every process", f"step {step.step_id} was answered otherwise")
        return answer.output

    def deliver(self, outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        """One frame to the client, as the engine sends it."""
        started = perf_counter_ns()
        frame = EngineOutputs(list(outputs), stats, time.time())
        self._outbox.send(encode(frame))
        self.nanoseconds += perf_counter_ns() - started
        self._num_frames += 1
        self._num_tokens += sum(len(output.new_token_ids) for output in outputs)

    def settle(self) -> None:
        """Wait until the client has everything. Raises ``SchedulerFault`` when it got other than was sent."""
        tally = Decoder[Tally](Tally).decode(self._ask(self._client, "client", str(self._num_frames).encode()))
        sent = Tally(self._num_frames, self._num_tokens)
        require(tally == sent, f"the client gets what was sent ({sent})", f"it got {tally}")

    def close(self) -> None:
        for link in self._links:
            link.close()
        for child in self._children:
            child.wait(_STOP_S)
            child.close()
        self._outbox.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
