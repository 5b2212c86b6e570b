"""Starts the worker processes of one executor and ends them again."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from hardpoint.errors import EngineDeadError
from hardpoint.interfaces import ExecutorContext, WorkerConfig
from hardpoint.ipc import Decoder, anonymous_file, encode
from hardpoint.process import ChildProcess, describe_exit, spawn
from hardpoint_executors.channel import Channel, channel_pair
from hardpoint_executors.context import require
from hardpoint_executors.errors import start_error
from hardpoint_executors.messages import StartAnswer, WorkerReady, WorkerStart
from hardpoint_executors.ring import RingWriter

__all__ = ["RankProcess", "WorkerGroup", "start_group", "stop_ranks"]

_ENTRY = "hardpoint_executors.worker_process:main"
_logger = logging.getLogger("hardpoint.executors")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One running worker. The channel's reading ends by itself when the process does, however it ends."""

    rank: int
    process: ChildProcess
    channel: Channel

    @property
    def label(self) -> str:
        return f"worker rank {self.rank} (pid {self.process.pid})"

    def end_of_process(self) -> str:
        """How the process ended, for messages; waits a moment, since a socket closes before its process is gone."""
        returncode = self.process.wait(1.0)
        how = "closed its connection" if returncode is None else f"ended with {describe_exit(returncode)}"
        return f"{self.label} {how}"


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """All ranks of an executor in rank order, and the ring that carries calls to them."""

    ranks: tuple[RankProcess, ...]
    calls: RingWriter

    def close(self) -> None:
        """Give up channels and ring, once the processes have ended."""
        for entry in self.ranks:
            entry.channel.close()
        self.calls.close()


def start_group(ctx: ExecutorContext, timeout_s: float) -> WorkerGroup:
    """Start every rank at once and wait until all have built their worker.

    Raises what a worker raised while starting, ``EngineDeadError`` for one that died or was not ready after
    ``timeout_s`` seconds. No process is left behind then.
    """
    _, config = require(ctx)
    channels: list[Channel] = []
    meeting = anonymous_file("hardpoint-meeting", 0)
    calls = RingWriter(config.parallel.world_size, lambda rank: channels[rank].ring_bell())
    ranks: list[RankProcess] = []
    try:
        for rank in range(config.parallel.world_size):
            near, far = channel_pair()
            channels.append(near)
            with contextlib.closing(far):
                process = _spawn(ctx, rank_config(config, rank, meeting), far, calls, meeting)
            ranks.append(RankProcess(rank, process, near))
            # A grandchild may hold the far end open, so the channel alone does not tell of a death.
            process.on_exit(partial(_let_go, near, calls, rank))
        _wait_ready(ranks, timeout_s)
        return WorkerGroup(tuple(ranks), calls)
    except BaseException:
        stop_ranks(ranks, 0.0)
        for channel in channels:
            channel.close()
        calls.close()
        raise
    finally:
        os.close(meeting)


def _let_go(channel: Channel, calls: RingWriter, rank: int, returncode: int) -> None:
    channel.end_reading()
    calls.retire(rank)


def rank_config(config: WorkerConfig, rank: int, meeting: int) -> WorkerConfig:
    """``config`` as rank ``rank`` sees it.

    Unless an address is set, collectives meet at the nameless file ``meeting``, which the ranks inherit: nobody else
    can come, and nothing is left over however they end.
    """
    parallel = config.parallel
    address = parallel.init_method
    if address is None and parallel.world_size > 1:
        address = f"file:///proc/self/fd/{meeting}"
    place = msgspec.structs.replace(parallel, rank=rank, local_rank=rank, init_method=address)
    return msgspec.structs.replace(config, parallel=place)


def _spawn(ctx: ExecutorContext, config: WorkerConfig, far: Channel, calls: RingWriter, meeting: int) -> ChildProcess:
    start = WorkerStart(
        plan=ctx.plan,
        worker=ctx.worker,
        config=config,
        attributes=dict(ctx.worker_options),
        channel_fd=far.fileno(),
        ring_fd=calls.descriptor,
        meeting_fd=meeting,
        log_level=_log_level(),
    )
    inherited = (far.fileno(), calls.descriptor, meeting)
    return spawn(_ENTRY, encode(start), name=f"worker-{config.parallel.rank}", pass_fds=inherited)


def _log_level() -> str:
    """The level from which this process tells, so that the workers of a quiet one are quiet as well."""
    level = _logger.getEffectiveLevel()
    return next((name for name in ("ERROR", "WARNING", "INFO") if level >= getattr(logging, name)), "DEBUG")


def _wait_ready(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    decoder = Decoder[StartAnswer](StartAnswer)
    waiting = {entry.rank for entry in ranks}
    with selectors.DefaultSelector() as selector:
        for entry in ranks:
            selector.register(entry.channel, selectors.EVENT_READ, entry)
        while waiting:
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                late = ", ".join(entry.label for entry in ranks if entry.rank in waiting)
                raise EngineDeadError(
                    f"{late} not ready after {timeout_s:g} s; raise plugins.executor.multiproc.start_timeout_s"
                )
            for key, _ in events:
                entry = key.data
                frame = entry.channel.receive()
                if frame is None:
                    raise EngineDeadError(f"{entry.end_of_process()} while it started")
                answer = decoder.decode(frame)
                if not isinstance(answer, WorkerReady):
                    raise start_error(entry.rank, answer.failure)
                waiting.remove(entry.rank)
                selector.unregister(entry.channel)


def stop_ranks(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    """Wait up to ``timeout_s`` seconds in total for the processes to end by themselves, then kill the rest."""
    deadline = time.monotonic() + timeout_s
    for entry in ranks:
        if entry.process.wait(max(0.0, deadline - time.monotonic())) is None and timeout_s:
            _logger.warning("%s did not stop within %g s and is killed", entry.label, timeout_s)
        entry.process.close()
