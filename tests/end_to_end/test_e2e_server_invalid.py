"""Rule U on a live server: whatever a client sends is refused within a second and harms nobody.

Nobody means: the engine process stays the same, ``/ready`` stays 200, a control request meanwhile has the tokens it has
alone, memory does not grow, and every block is free afterwards.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from invalid_values import (
    BASE,
    CHAT,
    COMPLETIONS,
    HUGE,
    MALFORMED,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    assert_refusal,
    bad_values,
)
from server_process import PATIENCE, ServerProcess, serving, until
from tiny_llama import CONFIG, write_tiny_llama

pytestmark = pytest.mark.timeout(300 * PATIENCE)

ANSWER_S = 1.0
GROWTH_BYTES = 50 * 2**20
CONTROL = {"prompt": "the control request", "max_tokens": 64}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    assert CONFIG["vocab_size"] <= VOCAB_SIZE
    model = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    with serving(model, "--max-model-len", str(MAX_MODEL_LEN), "--num-kv-blocks", "2048") as made:
        yield made


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> list[int]:
    tokens: list[int] = server.complete(**CONTROL)["token_ids"]
    return tokens


def memory(server: ServerProcess) -> int:
    """Resident bytes of all processes together."""
    return sum(process.memory_info().rss for process in server.survivors())


@contextmanager
def unharmed(server: ServerProcess, alone: list[int]) -> Iterator[None]:
    """Runs control requests all the while, and compares before and after."""
    engine, before = server.engine().pid, memory(server)
    done = threading.Event()

    def control() -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            assert server.complete(**CONTROL)["token_ids"] == alone
            assert server.status("/ready") == 200
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(control)
        try:
            yield
        finally:
            done.set()
        assert running.result(60 * PATIENCE) >= 1
    until(server.is_idle, 5, "nothing runs and every block is free")
    assert server.engine().pid == engine
    assert memory(server) - before < GROWTH_BYTES
    assert server.complete(**CONTROL)["token_ids"] == alone


def refusals(send: Callable[[], httpx.Response], what: str, *statuses: int) -> list[str]:
    """What is wrong with the answer to one request; nothing, one hopes."""
    begun = time.monotonic()
    answer = send()
    seconds = time.monotonic() - begun
    late = [f"{what}: took {seconds:.2f} s"] if seconds > ANSWER_S * PATIENCE else []
    try:
        assert_refusal(answer, *statuses)
    except (AssertionError, ValueError) as error:
        return [*late, f"{what}: {answer.status_code}: {error}"]
    return late


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_bad_values(server: ServerProcess, alone: list[int], route: str, streaming: bool) -> None:
    cases = [(field, value) for of, field, value in bad_values() if of == route]
    assert len(cases) > 80
    wrong = []
    with unharmed(server, alone):
        for field, value in cases:
            body = {**BASE[route], "stream": streaming, field: value}
            what = f"{field}={json.dumps(value)[:60]}"
            wrong += refusals(lambda body=body: server.http.post(route, json=body), what, 400)  # type: ignore[misc]
    assert wrong == []


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_bodies_that_are_no_request(server: ServerProcess, alone: list[int], route: str) -> None:
    headers = {"content-type": "application/json"}
    wrong = []
    with unharmed(server, alone):
        for content in MALFORMED:
            send = lambda content=content: server.http.post(route, content=content, headers=headers)  # noqa: E731
            wrong += refusals(send, repr(content[:60]), 400)
    assert wrong == []


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias", "n"])
def test_fifty_bad_values_at_once(server: ServerProcess, alone: list[int], route: str, field: str) -> None:
    """Classes 27 and 29."""
    value: Any = {"n": 10**9, "logit_bias": {str(HUGE): 1}}.get(field, [HUGE])
    body = {**BASE[route], field: value}
    with unharmed(server, alone), ThreadPoolExecutor(50) as pool:
        statuses = list(pool.map(lambda _: server.http.post(route, json=body).status_code, range(50)))
    assert statuses == [400] * 50


def test_good_and_bad_prompts_of_one_request(server: ServerProcess, alone: list[int]) -> None:
    """The good prompts may have begun; they end with the request."""
    with unharmed(server, alone):
        for bad in ([HUGE], [-1], [VOCAB_SIZE], [5] * MAX_MODEL_LEN):
            for streaming in (False, True):
                body = {"prompt": [[5, 6, 7], bad], "max_tokens": 400, "ignore_eos": True, "stream": streaming}
                assert_refusal(server.http.post(COMPLETIONS, json=body), 400)


def announce(server: ServerProcess, content_length: int) -> bytes:
    """The first line of the answer to a body that is announced and does not come."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {content_length}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10 * PATIENCE) as client:
        client.sendall(head.encode())
        return client.recv(1 << 16).partition(b"\r\n")[0]


def test_what_a_shell_refuses(server: ServerProcess, alone: list[int]) -> None:
    """Class 41, and paths and methods that do not exist."""
    with unharmed(server, alone):
        large = server.http.post(COMPLETIONS, headers={"x-large": "x" * 70_000}, json=BASE[COMPLETIONS])
        assert large.status_code == 431
        assert b" 413 " in announce(server, 10**12)
        assert_refusal(server.http.post(COMPLETIONS, content=b"{}", headers={"content-type": "text/plain"}), 415)
        assert_refusal(server.http.get("/v1/no-such-route"), 404)
        assert_refusal(server.http.put(COMPLETIONS, json={}), 405)
        compressed = {"content-type": "application/json", "content-encoding": "gzip"}
        assert server.http.post(COMPLETIONS, headers=compressed, content=b"x").status_code == 415


def test_two_clients_with_one_request_id(server: ServerProcess, alone: list[int]) -> None:
    """Class 44: a client's id is echoed and never a key."""
    headers = {"x-request-id": "the-same"}
    body = {**CONTROL, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.http.post(COMPLETIONS, json=body, headers=headers), range(8)))
    assert {answer.headers["x-request-id"] for answer in answers} == {"the-same"}
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [alone] * 8
    assert len({answer.json()["id"] for answer in answers}) == 8
