"""A worker process: boot from the plan, build the worker, answer calls until told to stop or left alone."""

from __future__ import annotations

import signal
from collections.abc import Callable

from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.interfaces.worker import Worker
from hardpoint.ipc import Decoder, RingReader, RpcCall, RpcCodec, RpcFailure, encode
from hardpoint.process import announce_stop, boot
from hardpoint_executors.build import build_worker
from hardpoint_executors.channel import Channel
from hardpoint_executors.messages import StartFailure, WorkerReady, WorkerStart

__all__ = ["main", "serve"]


def main(payload: bytes) -> int:
    """Entry of ``hardpoint.process.spawn``. Exit code 1 means that it could not start and has said why."""
    # The engine decides when workers stop; a SIGTERM to the whole group must not end a step half done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = Decoder[WorkerStart](WorkerStart).decode(payload)
    rank = start.config.parallel.rank
    channel = Channel.from_descriptor(start.channel_fd)
    calls = RingReader(start.ring_fd, rank, start.config.parallel.world_size, channel.wait_for_bell)
    try:
        runtime = boot(start.plan, {ProcessRole.WORKER}, rank=rank, log_level=start.log_level)
        worker = build_worker(runtime, start.worker, start.config, start.attributes)
    except Exception as error:
        channel.send(encode(StartFailure(RpcFailure.of(error))))
        return 1
    channel.send(encode(WorkerReady(runtime.report())))
    try:
        serve(worker, calls.receive, channel.send, rank)
    except BrokenPipeError:
        return 1
    announce_stop(runtime)
    return 0


def serve(worker: Worker, receive: Callable[[], bytes | None], send: Callable[[bytes], None], rank: int) -> None:
    """Answer calls in order. Returns after ``shutdown``, or when the other end is gone. Raises ``OSError`` when an
    answer can no longer be delivered, ``CodecError`` for a frame that is no call at all."""
    codec = RpcCodec()
    while (frame := receive()) is not None:
        call = codec.decode_call(frame)
        if call.ranks is not None and rank not in call.ranks:
            continue
        reply = _answer(worker, codec, call, rank)
        if reply is not None:
            send(reply)
        if call.method == "shutdown":
            return
    worker.shutdown()


def _answer(worker: Worker, codec: RpcCodec, call: RpcCall, rank: int) -> bytes | None:
    try:
        arguments = codec.arguments(call)
        result = getattr(worker, call.method)(*arguments)
        if call.reply_ranks is not None and rank not in call.reply_ranks:
            return None
        return codec.encode_result(call, rank, result)
    except Exception as error:
        return codec.encode_failure(call, rank, RpcFailure.of(error))
