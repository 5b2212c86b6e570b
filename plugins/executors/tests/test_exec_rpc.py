"""Calls on workers: typed by the table on both sides, and nothing outside the table exists."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import WORKER_RPC, Deferred, RunnerOutput, Worker
from hardpoint.ipc import CodecError, encode
from hardpoint.testing.record_values import same, values
from hardpoint_executors.rpc import RpcCall, RpcCodec, RpcFailure


@pytest.mark.parametrize("method", sorted(WORKER_RPC))
def test_every_method_survives_the_wire(method: str) -> None:
    codec = RpcCodec()
    rpc = WORKER_RPC[method]

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*map(values, rpc.arguments)), values(rpc.result))
    def check(arguments: tuple[Any, ...], result: Any) -> None:
        call = codec.decode_call(codec.encode_call(7, method, arguments, ranks=(0, 3), reply_ranks=(0,)))
        assert (call.call_id, call.method, call.ranks, call.reply_ranks) == (7, method, (0, 3), (0,))
        assert same(codec.arguments(call), arguments)
        reply = codec.decode_reply(codec.encode_result(call, 3, result))
        assert (reply.call_id, reply.rank, reply.failure) == (7, 3, None)
        assert same(codec.result(reply), result)

    check()


@pytest.mark.parametrize("method", sorted(WORKER_RPC))
def test_the_table_names_methods_every_worker_has(method: str) -> None:
    assert method in Worker.__abstractmethods__


def test_the_two_outcomes_of_a_step_stay_apart() -> None:
    """R4.10: a deferred step is not an output."""
    codec = RpcCodec()
    call = RpcCall(1, "execute", msgspec.Raw(b"\x90"))
    none = np.zeros(0, np.int32)
    output = RunnerOutput(step_id=4, slots=none, generations=none, num_sampled=none, token_ids=none)
    assert isinstance(codec.result(codec.decode_reply(codec.encode_result(call, 0, output))), RunnerOutput)
    assert codec.result(codec.decode_reply(codec.encode_result(call, 0, Deferred(4)))) == Deferred(4)


def test_a_failure_keeps_class_message_and_traceback() -> None:
    """R4.12: the original text crosses the process boundary."""
    codec = RpcCodec()
    call = codec.decode_call(codec.encode_call(1, "warm_up"))
    try:
        raise ValueError("too warm")
    except ValueError as error:
        failure = RpcFailure.of(error)
    reply = codec.decode_reply(codec.encode_failure(call, 2, failure))
    assert reply.rank == 2
    assert reply.failure is not None
    assert (reply.failure.kind, reply.failure.message) == ("ValueError", "too warm")
    assert "test_a_failure_keeps_class" in reply.failure.traceback


@pytest.mark.parametrize("method", ["__class__", "__init__", "_run", "executes", "", "os.system"])
def test_methods_outside_the_table_do_not_exist_on_either_side(method: str) -> None:
    codec = RpcCodec()
    with pytest.raises(ConfigError, match="is not callable; allowed: check_health, execute"):
        codec.encode_call(1, method)
    forged = codec.decode_call(encode((1, method, ())))
    with pytest.raises(ConfigError, match="is not callable"):
        codec.arguments(forged)
    with pytest.raises(CodecError, match="unknown method"):
        codec.result(codec.decode_reply(encode((1, 0, method, None, None))))


def test_wrong_arguments_are_refused_by_sender_and_receiver() -> None:
    codec = RpcCodec()
    with pytest.raises(ConfigError, match="takes 2 arguments, got 1"):
        codec.encode_call(1, "sample", (1,))
    wrong: list[tuple[Any, ...]] = [(), ("text", None), (1, None, 3), ({}, None)]
    for arguments in wrong:
        forged = codec.decode_call(encode((1, "sample", arguments)))
        with pytest.raises(CodecError, match="not a valid"):
            codec.arguments(forged)


def test_the_size_of_a_step_does_not_depend_on_what_it_computes() -> None:
    """R4.7: control messages only; a decode step of one row stays small however long its sequence is."""
    sizes = []
    for computed in (10, 10_000_000):
        one = np.ones(1, np.int32)
        step = {"num_computed_tokens": one * computed, "slots": one}
        sizes.append(len(encode(step)))
    assert sizes[0] == sizes[1]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_garbage_instead_of_a_call_is_one_named_error(data: bytes) -> None:
    codec = RpcCodec()
    for decode in (lambda: codec.arguments(codec.decode_call(data)), lambda: codec.result(codec.decode_reply(data))):
        try:
            decode()
        except (CodecError, ConfigError):
            continue
