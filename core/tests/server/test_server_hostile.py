"""Plugins that hang, or call for the end of the process: the server lives, and ends when it is told to (class 28)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml

FAKES = Path(__file__).parents[1] / "_fake_dist"
ENDPOINT = """
import asyncio, os, sys, threading, time
from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from hardpoint.interfaces import Endpoint

class E(Endpoint):
    def routes(self):
        router = APIRouter()
        router.add_api_route("/leave", self.leave, methods=["GET"])
        router.add_api_route("/stream", self.stream, methods=["GET"])
        router.add_api_route("/block", self.block, methods=["GET"])
        router.add_api_route("/task", self.task, methods=["GET"])
        return router

    async def leave(self):
        sys.exit(7)

    async def stream(self):
        async def lines():
            yield "one"
            sys.exit(7)
        return StreamingResponse(lines())

    async def block(self):
        print("blocked", flush=True)
        time.sleep(1000)

    async def task(self):
        self.kept = asyncio.create_task(self.leave())
        return "started"
{body}

def create(ctx, options):
    return E()
"""
LOGGER = """
import time
from hardpoint.interfaces.stat_logger import StatLogger

class L(StatLogger):
    def flush(self):
        time.sleep(1000)

def create(ctx, options):
    return L()
"""


class Hostile:
    """A server over fakes with one more distribution, which is ``code``."""

    def __init__(self, folder: Path, kind: str, code: str) -> None:
        info = folder / "hostile-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hardpoint.{kind}.v1]\nhostile = hostile_plugin:create\n")
        (folder / "hostile_plugin.py").write_text(code)
        document = {
            "model": {"name": "fake", "loader": "fake", "chat_renderer": "fake"},
            "cache": {"kv_layout": "fake"},
            "scheduler": {"scheduler": "fake"},
            "execution": {"platform": "fake", "executor": "fake"},
            "server": {"endpoints": ["fake", *(["hostile"] if kind == "endpoint" else [])], "port": 0},
            "plugin_policy": {
                "allow": ["fake", "hostile"],
                "pins": ["hash:sha256=hardpoint-fakes", "kv_cache_spec:full_attention=hardpoint-fakes"],
            },
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(document))
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hardpoint.cli", "serve", "--config", str(folder / "config.yaml")],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKES), str(folder)])},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.http = httpx.Client(timeout=10)

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found is not None, self.errors.read_text()
        self.http.base_url = found[0]
        self.until(lambda: self.http.get("/ready").status_code == 200)

    def until(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < until, self.errors.read_text()
            time.sleep(0.05)

    def end(self, *, within_s: float, signals: int = 1) -> int:
        """The exit status after SIGTERM; nothing of the server is left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for number in range(signals):
            time.sleep(0.7 if number else 0.0)  # Sooner it would count as an echo.
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within_s)
        assert psutil.wait_procs(children, timeout=5)[1] == []
        return code

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str, str], Hostile]]:
    made: list[Hostile] = []

    def start(kind: str, code: str) -> Hostile:
        made.append(Hostile(tmp_path, kind, code))
        return made[-1]

    yield start
    for server in made:
        server.close()


def endpoint(body: str = "") -> str:
    return ENDPOINT.replace("{body}", body)


def works(server: Hostile) -> bool:
    return server.http.post("/generate/3").status_code == 200 and server.http.get("/live").status_code == 200


def test_no_call_for_the_end_of_the_process_ends_the_server(run: Callable[..., Hostile]) -> None:
    server = run("endpoint", endpoint())
    server.wait_ready()
    answer = server.http.get("/leave")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    with pytest.raises(httpx.TransportError):
        server.http.get("/stream")
    assert server.http.get("/task").status_code == 200
    assert works(server)
    assert server.end(within_s=10) == 0
    assert "which goes on" in server.errors.read_text()


HANGS: dict[str, tuple[str, str]] = {
    "stop": ("    async def stop(self):\n        await asyncio.sleep(1000)", "endpoint 'hostile' did not stop"),
    "blocking stop": ("    async def stop(self):\n        time.sleep(1000)", "in stop"),
    "thread": (
        "    async def start(self):\n        threading.Thread(target=time.sleep, args=(600,)).start()",
        "_shutdown",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGS)
def test_a_hanging_endpoint_does_not_keep_the_server(run: Callable[..., Hostile], name: str) -> None:
    """Every answer was delivered, so it is an orderly end; the log says what hung."""
    body, told = HANGS[name]
    server = run("endpoint", endpoint(body))
    server.wait_ready()
    assert works(server)
    assert server.end(within_s=25) == 0
    assert told in server.errors.read_text()


def test_a_hanging_start_is_given_up(run: Callable[..., Hostile]) -> None:
    server = run(
        "endpoint",
        endpoint("    async def start(self):\n        print('up', flush=True)\n        await asyncio.sleep(1000)"),
    )
    assert server.process.stdout is not None
    assert server.process.stdout.readline() == "up\n"
    assert server.end(within_s=10) == 0


@pytest.mark.slow
def test_a_stat_logger_that_blocks_the_loop_does_not_keep_the_server(run: Callable[..., Hostile]) -> None:
    server = run("stat_logger", LOGGER.replace("def flush", "interval_s = 3600.0\n\n    def flush"))
    server.wait_ready()
    assert works(server)
    assert server.end(within_s=25, signals=2) == 0
    assert "in flush" in server.errors.read_text()


@pytest.mark.slow
def test_an_answer_that_never_came_shows_in_the_exit_status(run: Callable[..., Hostile]) -> None:
    server = run("endpoint", endpoint())
    server.wait_ready()

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{server.http.base_url}/block", timeout=60)

    thread = threading.Thread(target=ask)
    thread.start()
    assert server.process.stdout is not None
    assert server.process.stdout.readline() == "blocked\n"
    assert server.end(within_s=25, signals=2) == 1
    thread.join(10)
    assert "in block" in server.errors.read_text()
