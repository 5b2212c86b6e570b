"""The executors' parts on their own: frames, pending calls, the worker's serving loop, contexts."""

from __future__ import annotations

import dataclasses
import gc
import logging
import struct
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError, EngineDeadError, PluginMismatchError, WorkerError
from hardpoint.interfaces import NoOptions
from hardpoint.ipc import CodecError, encode
from hardpoint.testing import FakeWorker
from hardpoint.testing.executor_suite import executor_context, worker_config
from hardpoint_executors import group
from hardpoint_executors.build import nothing_collected
from hardpoint_executors.channel import Channel, channel_pair
from hardpoint_executors.errors import start_error, worker_error
from hardpoint_executors.group import rank_config
from hardpoint_executors.pending import PendingCalls
from hardpoint_executors.rpc import RpcCodec, RpcFailure
from hardpoint_executors.uniproc import create as create_uniproc
from hardpoint_executors.worker_process import serve

BOOM = RpcFailure("ValueError", "boom", "Traceback: boom")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 300_000).map(bytes)), max_size=6))
def test_frames_arrive_whole_and_in_order(frames: list[bytes]) -> None:
    near, far = channel_pair()

    def send_all() -> None:
        for frame in frames:
            near.send(frame)
        near.close()

    sender = threading.Thread(target=send_all)
    sender.start()
    received = []
    while (frame := far.receive()) is not None:
        received.append(frame)
    sender.join()
    far.close()
    assert received == frames


def test_a_frame_cut_short_is_an_end_and_a_giant_one_an_error() -> None:
    near, far = channel_pair()
    near._socket.sendall(struct.pack("<I", 10) + b"12345")
    near.close()
    assert far.receive() is None
    far.close()
    near, far = channel_pair()
    near._socket.sendall(struct.pack("<I", 2**32 - 1))
    with pytest.raises(CodecError, match="announces 4294967295 bytes"):
        far.receive()
    near.close()
    far.close()


def test_what_has_arrived_can_be_read_after_reading_was_ended() -> None:
    """A worker's last words are heard although its process is gone already."""
    near, far = channel_pair()
    near.send(b"last words")
    far.end_reading()
    assert far.receive() == b"last words"
    assert far.receive() is None
    near.close()
    far.close()
    far.end_reading()


def test_the_bell_wakes_and_tells_of_the_end() -> None:
    near, far = channel_pair()
    assert far.wait_for_bell(0.01)
    for _ in range(100_000):
        near.ring_bell()
    began = time.monotonic()
    assert far.wait_for_bell(5.0)
    assert time.monotonic() - began < 1.0
    near.close()
    while far.wait_for_bell(0.0):
        assert time.monotonic() - began < 5.0
    near.ring_bell()
    far.close()


def conversation(*frames: bytes, rank: int = 0) -> list[bytes]:
    """What a worker answers to ``frames`` before the other end goes away."""
    answers: list[bytes] = []
    waiting = iter(frames)
    serve(FakeWorker(), lambda: next(waiting, None), answers.append, rank)
    return answers


@pytest.mark.parametrize("method", ["__class__", "_run", "steps", "no_such", "__init__"])
def test_a_worker_refuses_what_is_not_registered(method: str) -> None:
    """Only ``WORKER_RPC`` can be called, whoever writes to the channel; the worker goes on."""
    codec = RpcCodec()
    answers = conversation(encode((1, method, ())), codec.encode_call(2, "kv_cache_budget"))
    refused, answered = map(codec.decode_reply, answers)
    assert refused.failure is not None
    assert refused.failure.kind == "ConfigError"
    assert "is not callable" in refused.failure.message
    assert codec.result(answered) == 1 << 20


def test_arguments_of_other_types_are_refused() -> None:
    codec = RpcCodec()
    (answer,) = conversation(encode((1, "initialize_kv_cache", ({"num_blocks": "many"},))))
    failure = codec.decode_reply(answer).failure
    assert failure is not None
    assert failure.kind == "CodecError"


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"cos\nsystem\n(S'true'\ntR.", encode({"method": "warm_up"})])
def test_a_frame_that_is_no_call_ends_the_worker(frame: bytes) -> None:
    with pytest.raises(CodecError):
        conversation(frame)


def test_ranks_that_need_not_answer_keep_quiet_unless_they_fail() -> None:
    codec = RpcCodec()
    answers = conversation(
        codec.encode_call(1, "warm_up", reply_ranks=(1,)), codec.encode_call(2, "sample", (5, None), reply_ranks=(1,))
    )
    (reply,) = map(codec.decode_reply, answers)
    assert reply.call_id == 2
    assert reply.failure is not None
    assert "no deferred step 5" in reply.failure.message


def test_a_call_for_other_ranks_is_passed_over() -> None:
    codec = RpcCodec()
    calls = [codec.encode_call(1, "sample", (5, None), ranks=(0, 2)), codec.encode_call(2, "warm_up", ranks=(1,))]
    assert [codec.decode_reply(answer).call_id for answer in conversation(*calls, rank=1)] == [2]


def test_shutdown_ends_the_loop() -> None:
    codec = RpcCodec()
    answers = conversation(codec.encode_call(1, "shutdown"), codec.encode_call(2, "warm_up"))
    assert [codec.decode_reply(answer).call_id for answer in answers] == [1]


class Replies:
    """Answers of ranks, as they would come over the wire."""

    def __init__(self, world_size: int, grace_s: float = 60.0) -> None:
        self.codec = RpcCodec()
        self.pending = PendingCalls(self.codec, world_size, grace_s)

    def result(self, call_id: int, rank: int, value: int) -> None:
        call = self.codec.decode_call(self.codec.encode_call(call_id, "kv_cache_budget"))
        self.pending.answer(rank, self.codec.decode_reply(self.codec.encode_result(call, rank, value)))

    def failure(self, call_id: int, rank: int) -> None:
        call = self.codec.decode_call(self.codec.encode_call(call_id, "kv_cache_budget"))
        self.pending.answer(rank, self.codec.decode_reply(self.codec.encode_failure(call, rank, BOOM)))


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_a_call_completes_when_all_asked_ranks_have_answered(order: list[int], failing: set[int]) -> None:
    """R4.2, R4.12: any order of answers, any set of failing ranks."""
    replies = Replies(4)
    call_id, future = replies.pending.open("kv_cache_budget", frozenset(range(4)))
    for rank in order:
        assert not future.done()
        if rank in failing:
            replies.failure(call_id, rank)
        else:
            replies.result(call_id, rank, 100 + rank)
    if not failing:
        assert future.result(0) == [100, 101, 102, 103]
        return
    error = future.exception(0)
    assert isinstance(error, WorkerError)
    assert error.rank == min(failing)
    assert error.results == {rank: 100 + rank for rank in range(4) if rank not in failing}
    assert f"{len(failing)} of 4 ranks failed" in str(error) or len(failing) == 1


def test_late_answers_to_a_withdrawn_call_change_nothing() -> None:
    replies = Replies(2)
    call_id, future = replies.pending.open("kv_cache_budget", frozenset({0, 1}))
    replies.result(call_id, 0, 1)
    assert replies.pending.withdraw(call_id) == {1}
    replies.result(call_id, 1, 1)
    replies.failure(call_id, 1)
    assert not future.done()
    assert replies.pending.failure_reason is None


def test_ranks_that_wait_for_a_failed_one_are_not_waited_for_forever() -> None:
    """R4.12: they may hang inside a collective; what is known by then arrives, and who kept silent is named."""
    replies = Replies(4, grace_s=0.05)
    call_id, future = replies.pending.open("kv_cache_budget", frozenset(range(4)))
    replies.result(call_id, 3, 103)
    replies.failure(call_id, 1)
    error = future.exception(60)
    assert isinstance(error, WorkerError)
    assert str(error) == (
        "worker rank 1 failed in kv_cache_budget: ValueError: boom (ranks [0, 2] have not answered since)"
    )
    assert error.results == {3: 103}
    replies.result(call_id, 0, 100)
    replies.failure(call_id, 2)
    assert replies.pending.failure_reason is None


def test_the_end_of_all_calls_ends_the_grace_too() -> None:
    replies = Replies(2, grace_s=0.05)
    call_id, future = replies.pending.open("kv_cache_budget", frozenset({0, 1}))
    replies.failure(call_id, 0)
    replies.pending.fail("gone")
    with pytest.raises(EngineDeadError, match="^gone$"):
        future.result(60)


def test_an_unasked_failure_fails_the_step_or_what_is_left_of_it() -> None:
    replies = Replies(2)
    call_id, future = replies.pending.open("kv_cache_budget", frozenset({0}), unwrap=True)
    replies.failure(call_id, 1)
    assert isinstance(future.exception(0), WorkerError)
    replies.result(call_id, 0, 5)
    assert replies.pending.failure_reason is None
    call_id, future = replies.pending.open("kv_cache_budget", frozenset({0}), unwrap=True)
    replies.result(call_id, 0, 5)
    assert future.result(0) == 5
    replies.failure(call_id, 1)
    assert replies.pending.failure_reason == "worker rank 1 failed in kv_cache_budget: ValueError: boom"


def test_only_the_first_reason_counts_and_is_told_once() -> None:
    replies = Replies(1)
    told: list[str] = []
    replies.pending.on_failure(told.append)
    _, future = replies.pending.open("kv_cache_budget", frozenset({0}))
    replies.pending.fail("first")
    replies.pending.fail("second")
    assert told == ["first"]
    for outcome in (future, replies.pending.open("kv_cache_budget", frozenset({0}))[1]):
        with pytest.raises(EngineDeadError, match="^first$"):
            outcome.result(0)


def test_one_can_wait_for_the_end_of_all_calls() -> None:
    """A peer's death explains a failure better than the failure does, if it shows soon."""
    pending = Replies(2).pending
    assert not pending.wait_failed(0.0)
    pending.fail("gone")
    assert pending.wait_failed(60.0)


def test_messages_name_every_failed_rank() -> None:
    """R4.12: with rank and original traceback; what several say alike is said once."""
    other = RpcFailure("OSError", "bang", "Traceback: bang")
    error = worker_error("warm_up", {2: other, 1: BOOM}, {0: None}, 3)
    assert str(error) == (
        "worker rank 1 failed in warm_up: ValueError: boom (2 of 3 ranks failed; rank 2: OSError: bang)"
    )
    assert error.remote_traceback == "[rank 1] Traceback: boom\n[rank 2] Traceback: bang"
    alike = worker_error("warm_up", {2: BOOM, 1: BOOM}, {0: None}, 3)
    assert str(alike) == "worker rank 1 failed in warm_up: ValueError: boom (2 of 3 ranks failed alike)"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("PluginMismatchError", PluginMismatchError),
        ("ConfigError", ConfigError),
        ("ValueError", WorkerError),
        ("WorkerError", WorkerError),
        ("OSError", WorkerError),
        ("__builtins__", WorkerError),
    ],
)
def test_only_the_projects_plain_errors_are_rebuilt(kind: str, expected: type[Exception]) -> None:
    error = start_error(1, RpcFailure(kind, "text", "tb"))
    assert type(error) is expected
    assert "text" in str(error)


def test_each_rank_sees_its_own_place() -> None:
    config = worker_config(2)
    second = rank_config(config, 1, 17).parallel
    assert (second.rank, second.local_rank, second.world_size) == (1, 1, 2)
    assert second.init_method == "file:///proc/self/fd/17"
    assert rank_config(worker_config(1), 0, 17).parallel.init_method is None
    given_address = msgspec.structs.replace(
        config, parallel=msgspec.structs.replace(config.parallel, init_method="tcp://127.0.0.1:1")
    )
    assert rank_config(given_address, 0, 17).parallel.init_method == "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("engine", "workers"),
    [(logging.DEBUG, "DEBUG"), (5, "DEBUG"), (logging.INFO, "INFO"), (25, "INFO"), (logging.CRITICAL, "ERROR")],
)
def test_workers_tell_as_much_as_their_engine(caplog: pytest.LogCaptureFixture, engine: int, workers: str) -> None:
    with caplog.at_level(engine, "hardpoint"):
        assert group._log_level() == workers


def test_uniproc_refuses_more_than_one_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="world size is 2; choose --executor multiproc"):
        create_uniproc(executor_context(tmp_path, worker_config(2)), NoOptions())


@pytest.mark.parametrize(("field", "value"), [("plugins", None), ("config", None), ("worker", "")])
def test_an_incomplete_context_is_named(tmp_path: Path, field: str, value: object) -> None:
    ctx = dataclasses.replace(executor_context(tmp_path, worker_config(1)), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"without {field} in its context"):
        create_uniproc(ctx, NoOptions())


def test_a_channel_can_be_rebuilt_from_a_descriptor() -> None:
    near, far = channel_pair()
    again = Channel.from_descriptor(far._socket.detach())
    near.send(b"x")
    assert again.receive() == b"x"
    near.close()
    again.close()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_while_a_worker_is_built_and_then_as_before(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with nothing_collected():
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
