"""``hardpoint serve`` as a process on a free loopback port: watched from outside, and gone without a trace afterwards.

Every server gets a runtime folder of its own. All processes of a server inherit its name in their environment, so
orphans are found whoever their parent is by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil  # type: ignore[import-untyped]

__all__ = ["PATIENCE", "ServerProcess", "Stream", "WholeAnswer", "open_request", "serving", "until"]

PATIENCE = float(os.environ.get("HARDPOINT_TEST_PATIENCE", "1"))
"""Factor on every bound that tests put on time, for machines that are busy with other things."""

NAME = "served"
START_S = 120.0
STOP_S = 45.0
_POLL_S = 0.01


def until(condition: Callable[[], object], within_s: float, what: str) -> float:
    """Poll until ``condition`` holds; seconds that took. ``AssertionError`` if it does not within ``within_s``.

    The last look starts at or after the deadline, so a test that was not scheduled for a while blames nobody.
    """
    begun = time.monotonic()
    while True:
        looked = time.monotonic()
        if condition():
            return looked - begun
        if looked - begun > within_s * PATIENCE:
            raise AssertionError(f"not within {within_s:g} s (patience {PATIENCE:g}): {what}")
        time.sleep(_POLL_S)


class ServerProcess:
    """One server for ``model``, served as ``served``. Flags are given as on the command line."""

    def __init__(self, model: str | Path, *flags: str, environ: Mapping[str, str] | None = None) -> None:
        # A short path: sockets have little room for their names.
        self.folder = Path(tempfile.mkdtemp(prefix="hp-test-"))
        self.runtime = self.folder / "run"
        self.runtime.mkdir(mode=0o700)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HARDPOINT_")}
        command = [sys.executable, "-m", "hardpoint.cli", "serve", str(model), "--served-name", NAME, "--port", "0"]
        with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *flags],
                env={**kept, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self.runtime), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.url = ""
        self.http = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None), trust_env=False)

    def _file(self, name: str) -> Path:
        return self.folder / name

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self._file("out").read_text(encoding="utf-8", errors="replace")

    def log(self) -> str:
        return self._file("err").read_text(encoding="utf-8", errors="replace")

    # Starting and stopping.

    def wait_listening(self) -> None:
        """Until the line with the address was printed. ``AssertionError`` with the log if the server ends first."""
        until(lambda: self._find_url() or self.process.poll() is not None, START_S, "the server prints its address")
        assert self.url, self.log()

    def wait_ready(self) -> None:
        self.wait_listening()
        until(lambda: self.status("/ready") == 200 or self.process.poll() is not None, START_S, "the server is ready")
        assert self.process.poll() is None, self.log()

    def _find_url(self) -> bool:
        found = re.search(r"http://\S+", self.output())
        if found:
            self.url = found[0]
            self.http.base_url = httpx.URL(self.url)
        return bool(found)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, within_s: float = STOP_S) -> int:
        """The exit code. ``AssertionError`` if the server still runs after ``within_s``."""
        until(lambda: self.process.poll() is not None, within_s, "the server ends")
        return int(self.process.returncode)

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        self.terminate()
        return self.wait()

    def close(self) -> None:
        """End whatever is left, by force, and remove the folder. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for left in self.survivors():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        self.http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Looking at it from outside.

    def survivors(self) -> list[psutil.Process]:
        """Every living process of this server, the API process included, whoever its parent is."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            is_dead = process.status() == psutil.STATUS_ZOMBIE
            return not is_dead and process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime)
        except psutil.Error:
            return False

    def named(self, prefix: str) -> list[psutil.Process]:
        """Living child processes whose name, such as ``engine-served`` or ``worker-0``, starts with ``prefix``."""
        found = []
        for process in self.survivors():
            with contextlib.suppress(psutil.Error, ValueError, IndexError):
                command = process.cmdline()
                if command[command.index("hardpoint.process") + 1].startswith(prefix):
                    found.append(process)
        return found

    def engine(self) -> psutil.Process:
        (engine,) = self.named("engine-")
        return engine

    def worker(self) -> psutil.Process:
        (worker,) = self.named("worker-")
        return worker

    def leftovers(self) -> list[str]:
        """What lies in the runtime folder."""
        return sorted(path.name for path in self.runtime.iterdir())

    def assert_gone(self, within_s: float = 10.0) -> None:
        """No process is left within ``within_s``, and no runtime folder either."""
        until(lambda: not self.survivors(), within_s, "no process is left")
        assert self.leftovers() == []

    # Talking to it.

    def status(self, path: str) -> int:
        """Status code of GET ``path``; 0 while nothing answers."""
        try:
            return self.http.get(path).status_code
        except httpx.HTTPError:
            return 0

    def load(self) -> dict[str, Any]:
        """The ``/load`` entry of the model."""
        models: dict[str, dict[str, Any]] = self.http.get("/load").json()["models"]
        return models[NAME]

    def is_idle(self) -> bool:
        """Nothing runs or waits, and every block is free; blocks that hold a cached prefix are free blocks too."""
        load = self.load()
        nothing_runs = load["running"] == load["waiting"] == 0
        return bool(nothing_runs and load["free_kv_blocks"] == load["total_kv_blocks"] > 0)

    def wait_inside(self, requests: int) -> None:
        """Until the engine has that many requests: one that a thread is still about to send would not be there yet."""

        def inside() -> bool:
            load = self.load()
            return int(load["running"] + load["waiting"]) >= requests

        until(inside, 60, f"{requests} requests are in the engine")

    def ended(self, reason: str) -> int:
        """How many requests have ended for ``reason``, from ``/metrics``."""
        text = self.http.get("/metrics").text
        found = re.search(rf'^hardpoint_request_success_total{{.*reason="{reason}".*}} (\S+)$', text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The first choice of a greedy completion, with its token ids. ``AssertionError`` for another status."""
        body = {"prompt": "hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
        answer = self.http.post("/v1/completions", json={"return_token_ids": True, **body})
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def sdk(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._sdk_settings(settings))

    def async_sdk(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._sdk_settings(settings))

    def _sdk_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 300.0, **given}


@contextlib.contextmanager
def serving(
    model: str | Path, *flags: str, ready: bool = True, environ: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready (or at least listening), and none afterwards."""
    server = ServerProcess(model, *flags, environ=environ)
    try:
        if ready:
            server.wait_ready()
        else:
            server.wait_listening()
        yield server
    finally:
        server.close()


class Stream:
    """One streamed completion, read on a thread. ``lines`` are its events; the last one of a whole stream is DONE.

    An answer with another ``status`` than 200 is no stream: its body is then the only line.
    """

    DONE = "[DONE]"

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.lines: list[Any] = []
        self.status = 0
        self.ended_at = 0.0
        self.broken: Exception | None = None
        self._begun = threading.Event()
        body = {"prompt": "hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        self._thread = threading.Thread(target=self._read, args=(server, {**body, "stream": True, **fields}))
        self._thread.daemon = True
        self._thread.start()

    def _read(self, server: ServerProcess, body: dict[str, Any]) -> None:
        try:
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if self.status != 200:
                        self.lines.append(json.loads(line))
                    elif line.startswith("data: "):
                        text = line.removeprefix("data: ")
                        self.lines.append(text if text == self.DONE else json.loads(text))
                        self._begun.set()
        except httpx.HTTPError as error:
            self.broken = error
        self.ended_at = time.monotonic()
        self._begun.set()

    def wait_begun(self) -> None:
        """Until the first event is here."""
        assert self._begun.wait(60 * PATIENCE)
        assert self.lines, self.broken

    def join(self) -> None:
        self._thread.join(120 * PATIENCE)
        assert not self._thread.is_alive(), "a stream hangs"

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for line in self.lines if isinstance(line, dict) for choice in line.get("choices", ())]

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice["token_ids"]]

    @property
    def ends(self) -> list[str]:
        """The terminal events: finish reasons, and ``error``. A proper stream has exactly one."""
        reasons = [choice["finish_reason"] for choice in self.choices if choice["finish_reason"]]
        return reasons + ["error" for line in self.lines if isinstance(line, dict) and "error" in line]


class WholeAnswer:
    """A request without streaming, on a thread. ``status`` and ``body`` are its answer."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        self.status = 0
        self.body: dict[str, Any] = {}
        self.ended_at = 0.0
        body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        self._thread = threading.Thread(target=self._read, args=(server, body), daemon=True)
        self._thread.start()

    def _read(self, server: ServerProcess, body: dict[str, Any]) -> None:
        answer = server.http.post("/v1/completions", json=body)
        self.status, self.body = answer.status_code, answer.json()
        self.ended_at = time.monotonic()

    def join(self) -> None:
        self._thread.join(120 * PATIENCE)
        assert not self._thread.is_alive(), "a request hangs"


def open_request(server: ServerProcess, path: str, body: Mapping[str, Any]) -> socket.socket:
    """A connection on which one request was sent and nothing was read. Closing it is a client that leaves."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection
