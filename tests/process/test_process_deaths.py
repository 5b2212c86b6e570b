"""Sudden death of any process of a real server: every client is told, probes say so, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from invalid_values import LEAK
from server_process import PATIENCE, ServerProcess, Stream, WholeAnswer, serving, until

pytestmark = pytest.mark.timeout(300 * PATIENCE)

ENDLESS = 30_000
STREAMS_END_S = 5.0
NOT_READY_S = 2.0
ORPHANS_END_S = 10.0


def endless_streams(server: ServerProcess) -> list[Stream]:
    """Streams that produce tokens, and one whose prompt takes long to compute."""
    streams = [Stream(server, prompt=f"prompt {index}", max_tokens=ENDLESS) for index in range(6)]
    for stream in streams:
        stream.wait_begun()
    streams.append(Stream(server, prompt="long " * 6000, max_tokens=100))
    server.wait_inside(len(streams))
    return streams


@pytest.mark.parametrize(
    ("executor", "victim"),
    [
        ("uniproc", "engine-"),
        pytest.param("multiproc", "engine-", marks=pytest.mark.slow),
        ("multiproc", "worker-"),
        pytest.param("multiproc --async-scheduling", "worker-", marks=pytest.mark.slow),
    ],
)
def test_a_killed_engine_or_worker_is_told_to_everybody(tiny: Path, executor: str, victim: str) -> None:
    with serving(tiny, "--executor", *executor.split(), "--max-num-batched-tokens", "64") as server:
        streams = endless_streams(server)
        whole = WholeAnswer(server, max_tokens=ENDLESS)
        server.wait_inside(len(streams) + 1)
        (process,) = server.named(victim)
        killed_at = time.monotonic()
        process.kill()
        until(lambda: server.status("/ready") == 503, NOT_READY_S, "/ready is 503")
        for stream in streams:
            stream.join()
            assert stream.ends == ["error"]
            assert stream.ended_at - killed_at < STREAMS_END_S * PATIENCE
            assert stream.status == 503 or stream.lines[-1] == Stream.DONE
            # What a client reads is fixed text (class 25).
            assert LEAK.search(str(stream.lines[-2:])) is None
        assert [stream.status for stream in streams] == [200] * 6 + [503], "only the last one had no token yet"
        whole.join()
        assert (whole.status, whole.body["error"]["code"]) == (503, "engine_dead")
        assert whole.ended_at - killed_at < STREAMS_END_S * PATIENCE
        assert server.status("/live") == 503
        for streaming in (False, True):
            with server.sdk() as sdk, pytest.raises(openai.InternalServerError) as refused:
                sdk.completions.create(model="served", prompt="late", stream=streaming)
            assert (refused.value.status_code, refused.value.code) == (503, "engine_dead")
        until(lambda: len(server.survivors()) == 1, ORPHANS_END_S, "only the API process is left")
        assert server.process.poll() is None
        assert server.status("/metrics") == 200
        assert server.stop() == 0
        server.assert_gone()


@pytest.mark.slow
def test_the_sdk_raises_when_the_engine_dies(tiny: Path) -> None:
    with serving(tiny) as server, server.sdk() as sdk:
        stream = sdk.completions.create(model="served", prompt="hello", max_tokens=ENDLESS, stream=True)
        next(iter(stream))
        server.engine().kill()
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)


@pytest.mark.slow
def test_an_idle_engine_that_dies_is_noticed(tiny: Path) -> None:
    with serving(tiny, "--executor", "multiproc") as server:
        server.worker().kill()
        until(lambda: server.status("/ready") == 503, NOT_READY_S, "/ready is 503")
        assert server.stop() == 0
        server.assert_gone()


@pytest.mark.parametrize("executor", [pytest.param("uniproc", marks=pytest.mark.slow), "multiproc"])
def test_a_killed_server_leaves_no_process(tiny: Path, executor: str) -> None:
    """During load; its folder, which nobody could remove, goes when the next server starts."""
    with serving(tiny, "--executor", executor, "--max-num-batched-tokens", "64") as server:
        streams = endless_streams(server)
        server.process.kill()
        until(lambda: not server.survivors(), ORPHANS_END_S, "no process is left")
        for stream in streams:
            stream.join()
            assert isinstance(stream.broken, httpx.RemoteProtocolError | httpx.ReadError)
        assert_next_start_cleans(server)


def test_a_server_killed_while_it_loads_leaves_no_process(tiny: Path) -> None:
    with serving(tiny, "--executor", "multiproc", ready=False) as server:
        until(lambda: server.named("engine-"), 30, "the engine process starts")
        server.process.kill()
        until(lambda: not server.survivors(), ORPHANS_END_S, "no process is left")


def assert_next_start_cleans(server: ServerProcess) -> None:
    (left,) = server.leftovers()
    long_ago = time.time() - 3600
    os.utime(server.runtime / left, (long_ago, long_ago))
    code = "from hardpoint.ipc import create_runtime_dir; print(create_runtime_dir())"
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(server.runtime)}
    made = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert made.stdout.startswith(str(server.runtime))
    assert server.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize(("executor", "victim"), [("uniproc", "engine-"), ("multiproc", "worker-")])
def test_a_stopped_engine_is_not_ready_then_not_alive_and_comes_back(tiny: Path, executor: str, victim: str) -> None:
    with serving(tiny, "--executor", executor) as server:
        alone = server.complete(max_tokens=4000)["token_ids"]
        stream = Stream(server, max_tokens=4000)
        stream.wait_begun()
        (process,) = server.named(victim)
        process.suspend()
        until(lambda: server.status("/ready") == 503, 10.5, "/ready is 503")
        until(lambda: server.status("/live") == 503, 20.5, "/live is 503")
        process.resume()
        until(lambda: server.status("/ready") == 200, 5, "/ready is 200 again")
        assert server.status("/live") == 200
        stream.join()
        assert stream.ends == ["length"]
        assert stream.token_ids == alone
        assert server.stop() == 0
        server.assert_gone()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("engine-", marks=pytest.mark.slow), "worker-"])
def test_a_stopped_process_does_not_keep_the_server_from_ending(tiny: Path, victim: str) -> None:
    with serving(tiny, "--executor", "multiproc", "--drain-timeout-s", "1") as server:
        stream = Stream(server, max_tokens=ENDLESS)
        stream.wait_begun()
        server.named(victim)[0].suspend()
        server.terminate()
        stream.join()
        assert len(stream.ends) == 1
        assert server.wait(30) == 0
        server.assert_gone()
