"""Clients that leave: whatever they asked for and wherever it stood, their blocks are free within two seconds."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from server_process import PATIENCE, ServerProcess, Stream, open_request, serving, until
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.timeout(300 * PATIENCE)

FREE_WITHIN_S = 2.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTROL = {"prompt": "the control request", "max_tokens": 48}
ENDLESS = 15_000
MAX_NUM_SEQS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=32768)
    # Steps far smaller than a long prompt: its computation takes seconds.
    steps = ("--max-num-batched-tokens", "32", "--max-num-seqs", str(MAX_NUM_SEQS))
    with serving(model, *steps, "--num-kv-blocks", "32768") as made:
        yield made


@pytest.fixture(autouse=True)
def _idle_before_and_after(server: ServerProcess) -> Iterator[None]:
    until(server.is_idle, 5, "nothing runs before the test")
    engine = server.engine().pid
    yield
    until(server.is_idle, 5, "nothing runs after the test")
    assert server.engine().pid == engine
    assert server.status("/ready") == 200


def body(route: str, text: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": text} if route == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "temperature": 0, "ignore_eos": True, **fields}


def prefilling(route: str, salt: str, **fields: Any) -> dict[str, Any]:
    """Seconds of prompt, whatever the machine. ``salt`` comes first, so that no prefix is found in the cache."""
    return body(route, f"{salt} " + "a long story " * 2400, max_tokens=8, **fields)


def decoding(route: str, salt: str, **fields: Any) -> dict[str, Any]:
    return body(route, f"{salt} short", max_tokens=ENDLESS, **fields)


def running(server: ServerProcess, count: int) -> None:
    until(lambda: server.load()["running"] == count, 30, f"{count} requests run")


def has_all(server: ServerProcess, count: int) -> bool:
    load = server.load()
    return bool(load["running"] + load["waiting"] == count and load["running"] >= 20)


def assert_freed(server: ServerProcess, aborted_before: int, count: int = 1) -> None:
    """The bound runs from now: call it right after the last client left."""
    until(server.is_idle, FREE_WITHIN_S, "no request runs and every block is free")
    assert server.ended("abort") == aborted_before + count, "every request was aborted, none ended by itself"


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("phase", [prefilling, decoding])
def test_a_client_that_leaves_frees_its_blocks(server: ServerProcess, phase: Any, route: str, streaming: bool) -> None:
    aborted = server.ended("abort")
    request = phase(route, f"{phase.__name__} {route} {streaming}", stream=streaming)
    with open_request(server, route, request) as client:
        running(server, 1)
        if streaming and phase is decoding:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        else:
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
        load = server.load()
        assert load["free_kv_blocks"] < load["total_kv_blocks"]
    assert_freed(server, aborted)


def test_a_stalled_reader_holds_nobody_up_and_may_leave(server: ServerProcess) -> None:
    alone = server.complete(**CONTROL)["token_ids"]
    aborted = server.ended("abort")
    request = decoding(COMPLETIONS, "stalled", stream=True, logprobs=20)
    with open_request(server, COMPLETIONS, request):
        running(server, 1)
        # By then what was sent to nobody fills the sockets' buffers.
        generated = lambda: server.load()["total_kv_blocks"] - server.load()["free_kv_blocks"] > 100  # noqa: E731
        until(generated, 60, "some 1,600 tokens are generated, unread")
        assert server.complete(**CONTROL)["token_ids"] == alone
    assert_freed(server, aborted)


def test_a_reset_connection_counts_as_left(server: ServerProcess) -> None:
    aborted = server.ended("abort")
    with open_request(server, COMPLETIONS, decoding(COMPLETIONS, "reset", stream=True)) as client:
        running(server, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_freed(server, aborted)


def test_all_sequences_of_a_request_end(server: ServerProcess) -> None:
    aborted = server.ended("abort")
    fields = decoding(COMPLETIONS, "several", stream=True, n=3)
    fields.update(prompt=["one", "two"], temperature=1.0)
    with open_request(server, COMPLETIONS, fields):
        running(server, 6)
    assert_freed(server, aborted, 2)


def test_a_client_that_leaves_before_its_body_is_whole_starts_nothing(server: ServerProcess) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
    )
    before = server.ended("abort")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode() + b'{"prompt": "never')
    assert_freed(server, before, 0)


@pytest.mark.slow
def test_fifty_clients_that_leave_at_once(server: ServerProcess) -> None:
    """Some decode, some prefill, most wait; a reader who stays keeps its tokens, and the prefix cache stays right."""
    alone = server.complete(**CONTROL)["token_ids"]
    aborted = server.ended("abort")
    stays = Stream(server, prompt=CONTROL["prompt"], max_tokens=4000)
    stays.wait_begun()
    with contextlib.ExitStack() as clients:
        for index in range(50):
            # Long prompts after the first decoding ones, which they would keep from starting.
            phase = prefilling if 20 <= index < 30 else decoding
            route = CHAT if index % 2 else COMPLETIONS
            request = phase(route, f"storm {index}", stream=index % 3 > 0)
            clients.enter_context(open_request(server, route, request))
        until(lambda: has_all(server, 51), 30, "all requests are there, and most of the first 21 run")
    until(lambda: server.load()["running"] == 1 and not server.load()["waiting"], FREE_WITHIN_S, "only one is left")
    assert server.ended("abort") == aborted + 50
    stays.join()
    assert stays.ends == ["length"]
    assert stays.token_ids[: len(alone)] == alone
    until(server.is_idle, FREE_WITHIN_S, "every block is free")
    assert server.complete(**CONTROL)["token_ids"] == alone


def test_clients_that_come_and_leave_all_the_time(server: ServerProcess) -> None:
    alone = server.complete(**CONTROL)["token_ids"]
    for round_ in range(20):
        phase = prefilling if round_ % 2 else decoding
        with contextlib.ExitStack() as clients:
            for index in range(4):
                request = phase(COMPLETIONS, f"{round_} {index}", stream=bool(index % 2))
                clients.enter_context(open_request(server, COMPLETIONS, request))
            if round_ % 4 == 0:
                assert server.complete(**CONTROL)["token_ids"] == alone
    until(server.is_idle, FREE_WITHIN_S, "no request runs and every block is free")
    assert server.complete(**CONTROL)["token_ids"] == alone
