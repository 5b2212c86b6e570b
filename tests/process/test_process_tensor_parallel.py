"""Ranks that share every layer wait for one another all the time: when one dies or hangs, the others must not stay."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import EngineDeadError
from server_process import PATIENCE, ServerProcess, Stream, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 * PATIENCE)]

ENDLESS = 30_000
TOLD_S = 5.0
GONE_S = 10.0
RANKS = ("--tensor-parallel-size", "2", "--max-num-batched-tokens", "64")


def streaming(server: ServerProcess) -> list[Stream]:
    streams = [Stream(server, prompt=f"prompt {index}", max_tokens=ENDLESS) for index in range(3)]
    for stream in streams:
        stream.wait_begun()
    return streams


@pytest.mark.parametrize(
    ("victim", "flags"), [("worker-0", ()), ("worker-1", ("--async-scheduling",))], ids=["output-rank", "other-rank"]
)
def test_one_killed_rank_ends_every_request_and_all_ranks(tiny: Path, victim: str, flags: tuple[str, ...]) -> None:
    """R4.12: while its peer is inside a collective, as it is most of the time."""
    with serving(tiny, *RANKS, *flags) as server:
        streams = streaming(server)
        (process,) = server.named(victim)
        killed_at = time.monotonic()
        process.kill()
        for stream in streams:
            stream.join()
            assert stream.ends == ["error"]
            assert stream.ended_at - killed_at < TOLD_S * PATIENCE
        until(lambda: len(server.survivors()) == 1, GONE_S, "only the API process is left")
        assert server.stop() == 0
        server.assert_gone()


def test_a_rank_that_hangs_keeps_nobody_from_ending(tiny: Path) -> None:
    """One rank is stopped, the other waits for it inside a collective, and the server is told to end at once."""
    with serving(tiny, *RANKS, "--drain-timeout-s", "0") as server:
        streaming(server)
        (stopped,) = server.named("worker-1")
        stopped.send_signal(signal.SIGSTOP)
        server.stop()
        server.assert_gone()


def test_ranks_that_wait_for_one_another_go_with_a_killed_server(tiny: Path) -> None:
    with serving(tiny, *RANKS) as server:
        streaming(server)
        (stopped,) = server.named("worker-1")
        stopped.send_signal(signal.SIGSTOP)
        server.process.kill()
        until(lambda: not server.survivors(), GONE_S, "no process is left")


@pytest.mark.parametrize("rank", [0, 1])
def test_offline_calls_raise_when_a_rank_dies(tiny: Path, rank: int) -> None:
    with LLM(str(tiny), tensor_parallel_size=2, max_model_len=2048, num_kv_blocks=300) as llm:
        pids: tuple[int, ...] = llm.core.executor.pids  # type: ignore[attr-defined]
        stream = llm.stream([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=2000, ignore_eos=True))
        next(stream)
        killed_at = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        # Its peer notices as well, and on a busy machine it may be the first to say so.
        told = rf"worker rank {rank} \(pid {pids[rank]}\) ended with signal SIGKILL|a rank ended"
        with pytest.raises(EngineDeadError, match=told):
            for _ in stream:
                pass
        assert time.monotonic() - killed_at < TOLD_S * PATIENCE
    until(lambda: not any(map(psutil.pid_exists, pids)), GONE_S, "no worker is left")
