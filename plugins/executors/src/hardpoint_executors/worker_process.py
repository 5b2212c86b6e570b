"""A worker process: boot from the plan, build the worker, answer calls until told to stop or left alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.interfaces.worker import PendingOutput, Worker
from hardpoint.ipc import Decoder, encode
from hardpoint.process import announce_stop, boot
from hardpoint_executors.build import build_worker, load_model
from hardpoint_executors.channel import Channel
from hardpoint_executors.messages import StartFailure, WorkerReady, WorkerStart
from hardpoint_executors.outputs import OutputQueue
from hardpoint_executors.ring import RingReader
from hardpoint_executors.rpc import LOAD_REPORT, RpcCall, RpcCodec, RpcFailure

__all__ = ["main", "serve"]


def main(payload: bytes) -> int:
    """Entry of ``hardpoint.process.spawn``. Exit code 1 means that it could not start and has said why."""
    # The engine decides when workers stop; a SIGTERM to the whole group must not end a step half done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = Decoder[WorkerStart](WorkerStart).decode(payload)
    rank = start.config.parallel.rank
    os.set_inheritable(start.meeting_fd, False)
    channel = Channel.from_descriptor(start.channel_fd)
    calls = RingReader(start.ring_fd, rank, start.config.parallel.world_size, channel.wait_for_bell)
    try:
        runtime = boot(start.plan, {ProcessRole.WORKER}, rank=rank, log_level=start.log_level)
        worker = build_worker(runtime, start.worker, start.config, start.attributes)
    except Exception as error:
        channel.send(encode(StartFailure(RpcFailure.of(error))))
        return 1
    channel.send(encode(WorkerReady()))
    loads = partial(load_model, worker, runtime, start.config)
    try:
        serve(worker, calls.receive, channel.send, rank, {LOAD_REPORT: runtime.report, "load_model": loads})
    except BrokenPipeError:
        return 1
    announce_stop(runtime)
    return 0


def serve(
    worker: Worker,
    receive: Callable[[], bytes | None],
    send: Callable[[bytes], None],
    rank: int,
    own: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> None:
    """Answer calls in order. Returns after ``shutdown``, or when the other end is gone.

    ``own`` are the methods that the process answers in the worker's stead.
    ``send`` is used by one thread at a time. Raises ``OSError`` when an answer can no longer be delivered,
    ``CodecError`` for a frame that is no call at all.
    """
    codec = RpcCodec()
    outputs = OutputQueue("outputs")
    while (frame := receive()) is not None:
        call = codec.decode_call(frame)
        if call.ranks is not None and rank not in call.ranks:
            continue
        try:
            # Checks the method too, so nothing of the worker is touched before.
            arguments = codec.arguments(call)
            result: Any = (own.get(call.method) or getattr(worker, call.method))(*arguments)
        except Exception as error:
            result = error
        deliver = partial(_deliver, codec, call, rank, result, send)
        outputs.deliver(deliver, waits=isinstance(result, PendingOutput))
        if call.method == "shutdown":
            break
    else:
        worker.shutdown()
    outputs.close()


def _deliver(codec: RpcCodec, call: RpcCall, rank: int, result: Any, send: Callable[[bytes], None]) -> None:
    try:
        if isinstance(result, Exception):
            raise result
        value = result.result() if isinstance(result, PendingOutput) else result
        if call.reply_ranks is not None and rank not in call.reply_ranks:
            return
        reply = codec.encode_result(call, rank, value)
    except Exception as error:
        reply = codec.encode_failure(call, rank, RpcFailure.of(error))
    send(reply)
