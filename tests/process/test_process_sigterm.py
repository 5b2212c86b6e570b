"""SIGTERM while a real engine generates: what runs ends properly, what is new is refused, and nothing is left."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest

from server_process import PATIENCE, ServerProcess, Stream, WholeAnswer, serving, until

pytestmark = pytest.mark.timeout(300 * PATIENCE)

AHEAD = pytest.param("multiproc --async-scheduling", marks=pytest.mark.slow)
"""Two steps are under way whenever something happens."""

LONG, ENDLESS = 800, 30_000
"""Tokens that take seconds, and minutes."""


def assert_refuses_new_requests(server: ServerProcess) -> None:
    until(lambda: server.status("/ready") == 503, 2, "/ready is 503")
    assert server.status("/live") == 200
    for streaming in (False, True):
        with server.sdk() as sdk, pytest.raises(openai.InternalServerError) as refused:
            sdk.completions.create(model="served", prompt="late", stream=streaming)
        assert (refused.value.status_code, refused.value.code) == (503, "not_ready")


@pytest.mark.parametrize(
    ("executor", "whole_group"),
    [
        ("uniproc", False),
        pytest.param("multiproc", False, marks=pytest.mark.slow),
        pytest.param("multiproc", True, marks=pytest.mark.slow),
        pytest.param("multiproc --async-scheduling", True, marks=pytest.mark.slow),
    ],
)
def test_running_requests_finish_and_new_ones_are_refused(tiny: Path, executor: str, whole_group: bool) -> None:
    """Terminals and some supervisors signal every process of the group, which must make no difference."""
    with serving(tiny, "--executor", *executor.split(), "--num-kv-blocks", "4096") as server:
        prompts = [f"request {index} of several" for index in range(5)]
        alone = server.complete(prompt=prompts[0], max_tokens=LONG)["token_ids"]
        streams = [Stream(server, prompt=prompt, max_tokens=LONG) for prompt in prompts]
        whole = WholeAnswer(server, prompt=prompts[0], max_tokens=LONG)
        for stream in streams:
            stream.wait_begun()
        server.wait_inside(len(streams) + 1)
        for process in server.survivors() if whole_group else [server.process]:
            process.terminate()
        assert_refuses_new_requests(server)
        assert not any(stream.ends for stream in streams), "the streams were too short for this test"
        for stream in streams:
            stream.join()
            assert stream.ends == ["length"]
            assert stream.lines[-1] == Stream.DONE
            assert len(stream.token_ids) == LONG
        whole.join()
        assert whole.status == 200
        assert streams[0].token_ids == whole.body["choices"][0]["token_ids"] == alone
        assert server.wait(10) == 0
        server.assert_gone()


@pytest.mark.parametrize("executor", ["uniproc", pytest.param("multiproc", marks=pytest.mark.slow), AHEAD])
def test_what_outlasts_the_drain_ends_with_one_terminal_event(tiny: Path, executor: str) -> None:
    flags = ("--executor", *executor.split(), "--drain-timeout-s", "0.5", "--num-kv-blocks", "16384")
    with serving(tiny, *flags) as server:
        streams = [Stream(server, prompt=f"prompt {index}", max_tokens=ENDLESS) for index in range(6)]
        whole = WholeAnswer(server, max_tokens=ENDLESS)
        for stream in streams:
            stream.wait_begun()
        server.wait_inside(len(streams) + 1)
        begun = time.monotonic()
        server.terminate()
        for stream in streams:
            stream.join()
            assert stream.ends == ["abort"], server.log()[-3000:]
            assert stream.lines[-1] == Stream.DONE
        whole.join()
        assert whole.status == 200
        assert whole.body["choices"][0]["finish_reason"] == "abort"
        assert server.wait(10) == 0
        assert time.monotonic() - begun < 10 * PATIENCE
        server.assert_gone()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny: Path) -> None:
    with serving(tiny) as server:
        stream = Stream(server, max_tokens=ENDLESS)
        stream.wait_begun()
        server.terminate()
        # Sooner it would count as an echo of the first.
        time.sleep(0.7)
        assert not stream.ends
        server.terminate()
        assert server.wait(5) == 0
        stream.join()
        assert len(stream.ends) <= 1
        server.assert_gone()


def test_a_signal_before_the_engine_is_loaded(tiny: Path) -> None:
    with serving(tiny, ready=False) as server:
        assert server.stop() == 0
        server.assert_gone()


@pytest.mark.slow
def test_an_idle_server_ends_within_seconds(tiny: Path) -> None:
    with serving(tiny, "--executor", "multiproc") as server:
        server.complete()
        server.terminate()
        assert server.wait(5) == 0
        server.assert_gone()
