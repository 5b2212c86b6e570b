"""The loop of the engine process on a thread of this one, over real sockets: what is fatal, and how it is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from hardpoint.engine import messages as wire
from hardpoint.engine.build import build_engine
from hardpoint.engine.core_process import EnginePayload, EngineServer, EngineSockets
from hardpoint.errors import ModelFormatError, PluginNotFoundError, as_raised
from hardpoint.interfaces import EngineOutput, EngineRequest, FinishReason, SamplingParams
from hardpoint.ipc import Decoder, encode, private_ipc_address


class Rig:
    """One engine server with one or more clients' sockets in the hands of the test."""

    def __init__(self, spec: Any, runtime: Any, num_clients: int = 1, input_address: str | None = None) -> None:
        self.context = zmq.Context()
        names = [f"out{index}" for index in range(num_clients)]
        addresses = tuple(private_ipc_address(spec.runtime_dir, name) for name in names)
        self.receivers = [self.context.socket(zmq.PULL) for _ in addresses]
        for receiver, address in zip(self.receivers, addresses, strict=True):
            receiver.setsockopt(zmq.RCVTIMEO, 5000)
            receiver.bind(address)
        self.sender = self.context.socket(zmq.PUSH)
        address = input_address or private_ipc_address(spec.runtime_dir, "in")
        self.sender.connect(address)
        self.decoder = Decoder[wire.FromEngine](wire.FromEngine)
        self.core = build_engine(spec, runtime)
        self.sockets = EngineSockets(EnginePayload(spec, address, addresses))
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.server = EngineServer(self.core, self.sockets, self.inbox, drain_timeout_s=5.0)
        self.codes: list[int] = []
        self.threads = [
            threading.Thread(target=self.sockets.receive_into, args=(self.inbox,)),
            threading.Thread(target=lambda: self.codes.append(self.server.run())),
        ]
        for thread in self.threads:
            thread.start()

    def send(self, message: wire.ToEngine) -> None:
        self.sender.send(encode(message))

    def receive(self, kind: type[Any], client: int = 0) -> Any:
        """The next message of ``kind``; others are passed over."""
        while True:
            message = self.decoder.decode(self.receivers[client].recv())
            if isinstance(message, kind):
                return message

    def exit_code(self) -> int:
        self.threads[1].join(5.0)
        return self.codes[0]

    def close(self) -> None:
        if self.threads[1].is_alive():
            self.inbox.put(wire.Shutdown(drain=False, timeout_s=0.0))
        self.threads[1].join(5.0)
        self.sockets.close()
        self.threads[0].join(5.0)
        self.context.destroy(linger=0)


@pytest.fixture
def make_rig(make_spec: Callable[..., Any], make_runtime: Callable[..., Any]) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(num_clients: int = 1, input_address: str | None = None, **options: Any) -> Rig:
        rigs.append(Rig(make_spec(**options), make_runtime(), num_clients, input_address))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def request(name: str, **fields: Any) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    ids = np.array([40, 41], dtype=np.int32)
    return EngineRequest(request_id=name, prompt_token_ids=ids, sampling=params, **fields)


def finished(rig: Rig, client: int = 0, count: int = 1) -> list[EngineOutput]:
    """Outputs until ``count`` requests have ended."""
    outputs: list[EngineOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < count:
        outputs += rig.receive(wire.Outputs, client).batch.outputs
    return outputs


def test_each_client_hears_of_its_own_requests_only(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(num_clients=2)
    rig.send(wire.Add([request("a"), request("b", client_index=1), request("nobody", client_index=7)]))
    assert {output.request_id for output in finished(rig, 0)} == {"a"}
    assert {output.request_id for output in finished(rig, 1)} == {"b"}
    rig.send(wire.Utility(5, 1, "stats"))
    assert rig.receive(wire.UtilityResult, 1).call_id == 5


def test_the_loop_beats_while_it_rests(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.receive(wire.Heartbeat)
    rig.receive(wire.Heartbeat)


def test_a_dead_input_thread_is_fatal_and_told(make_rig: Callable[..., Rig]) -> None:
    """Class 28: an engine that hears nothing any more must not look healthy."""
    rig = make_rig(input_address="ipc:///nonexistent/folder/in")
    assert "the input thread ended" in rig.receive(wire.Dead).reason
    assert rig.exit_code() == 1


@pytest.mark.parametrize("error", [RuntimeError("no stats"), SystemExit(0)])
def test_statistics_that_fail_are_fatal_and_told(make_rig: Callable[..., Rig], error: BaseException) -> None:
    """They are asked for between steps too; every request still ends."""

    def stats() -> Any:
        raise error

    rig = make_rig()
    rig.core.scheduler.stats = stats  # type: ignore[method-assign]
    rig.send(wire.Add([request("a")]))
    assert f"{type(error).__name__}: {error}" in rig.receive(wire.Dead).reason
    assert rig.exit_code() == 1


def test_an_output_that_cannot_be_sent_is_fatal_and_told(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    scheduler = rig.core.scheduler
    odd = EngineOutput("a", [], extensions={"odd": object()})
    monkeypatch.setattr(scheduler, "update", lambda step, output: [odd])
    rig.send(wire.Add([request("a")]))
    assert "cannot be sent" in rig.receive(wire.Dead).reason
    assert rig.exit_code() == 1


def test_a_call_whose_result_cannot_be_sent_fails_alone(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    monkeypatch.setattr(rig.core.scheduler, "reset_prefix_cache", lambda: object())
    rig.send(wire.Utility(1, 0, "reset_prefix_cache"))
    assert "cannot be sent" in rig.receive(wire.UtilityResult).error
    rig.send(wire.Utility(2, 0, "set_pause", ["sideways"]))
    assert "sideways" in rig.receive(wire.UtilityResult).error
    rig.send(wire.Add([request("a")]))
    assert finished(rig)[-1].finish_reason is FinishReason.LENGTH


def test_a_drain_ends_when_the_last_request_does(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(script={"step_delay_s": 0.05})
    rig.send(wire.Add([request("a")]))
    rig.send(wire.Shutdown(drain=True, timeout_s=60.0))
    rig.send(wire.Add([request("late")]))
    outputs = finished(rig, count=2)
    ends = {one.request_id: one.finish_reason for one in outputs if one.finish_reason is not None}
    assert ends == {"a": FinishReason.LENGTH, "late": FinishReason.ERROR}
    assert rig.exit_code() == 0


def test_abort_messages_reach_the_scheduler(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(script={"step_delay_s": 0.1})
    rig.send(wire.Add([request("a")]))
    rig.send(wire.Abort(["a", "unknown"]))
    assert finished(rig)[-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("ModelFormatError", ModelFormatError),
        ("PluginNotFoundError", PluginNotFoundError),
        ("WorkerError", None),
        ("ValueError", None),
        ("annotations", None),
        ("Mapping", None),
    ],
)
def test_reported_errors_keep_their_class_where_it_is_ours(kind: str, raised: type[Exception] | None) -> None:
    error = as_raised(kind, "what happened")
    assert (error and type(error)) is raised
    assert error is None or str(error) == "what happened"
