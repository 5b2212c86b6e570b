"""``hardpoint serve`` as a process with a real engine process behind it, over fakes: start, stop, and sudden deaths."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from hardpoint.cli import main
from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError
from hardpoint.server.run import bind

FAKES = Path(__file__).parents[1] / "_fake_dist"
START_S = 30.0


def settings(script: dict[str, Any], **server: Any) -> dict[str, Any]:
    return {
        "model": {"name": "fake", "loader": "fake", "chat_renderer": "fake"},
        "cache": {"kv_layout": "fake"},
        "scheduler": {"scheduler": "fake"},
        "execution": {"platform": "fake", "executor": "fake"},
        "server": {"endpoints": ["fake"], "port": 0, **server},
        "plugin_policy": {
            "allow": ["fake"],
            "pins": ["hash:sha256=hardpoint-fakes", "kv_cache_spec:full_attention=hardpoint-fakes"],
        },
        "plugins": {"weight_loader": {"fake": {"script": script}}},
    }


class Running:
    """One server process. ``url`` comes from the line it prints."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(document))
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hardpoint.cli", "serve", "--config", str(config)],
                env={**os.environ, "PYTHONPATH": str(FAKES)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.headline = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.headline)
        self.url = found[0] if found else ""
        self.http = httpx.Client(base_url=self.url or "http://none", timeout=10)

    def wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while self.status("/ready") != 200:
            assert time.monotonic() < until, self.errors.read_text()
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)

    def status(self, path: str) -> int:
        return self.http.get(path).status_code

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        children = self.children() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()
        self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(script: dict[str, Any] | None = None, *, ready: bool = True, **server: Any) -> Running:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        running = Running(folder, settings(script or {}, **server))
        started.append(running)
        if ready:
            running.wait_ready()
        return running

    yield start
    for running in started:
        running.stop()


class Stream:
    """Reads one generation on a thread; ``join`` gives its lines and the time it ended."""

    def __init__(self, running: Running, num_tokens: int) -> None:
        self.lines: list[dict[str, Any]] = []
        self.ended = 0.0
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(running.url, num_tokens), daemon=True)
        self._thread.start()
        assert self.begun.wait(10)

    def _read(self, url: str, num_tokens: int) -> None:
        with httpx.Client(timeout=30) as client, client.stream("POST", f"{url}/generate/{num_tokens}") as response:
            for line in response.iter_lines():
                self.lines.append(json.loads(line))
                self.begun.set()
        self.ended = time.monotonic()

    def join(self) -> list[dict[str, Any]]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.lines


@pytest.mark.slow
def test_it_announces_itself_and_listens_nowhere_else(run: Callable[..., Running]) -> None:
    """Class 3: of all processes only the API port listens."""
    running = run()
    assert re.fullmatch(r"Hardpoint serves fake at http://127\.0\.0\.1:\d+ \(endpoints: fake\)\n", running.headline)
    answer = running.http.post("/generate/3").text.splitlines()
    assert [json.loads(line)["reason"] for line in answer][-1] == "length"
    processes = [psutil.Process(running.process.pid), *running.children()]
    assert len(processes) == 2
    listening = [
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == [int(running.url.rpartition(":")[2])]


@pytest.mark.slow
def test_it_is_alive_but_not_ready_while_it_loads(run: Callable[..., Running]) -> None:
    running = run({"load_delay_s": 1.5}, ready=False)
    assert (running.status("/live"), running.status("/ready")) == (200, 503)
    refused = running.http.post("/generate/3")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    running.wait_ready()


def test_sigterm_lets_running_requests_finish(run: Callable[..., Running]) -> None:
    running = run({"step_delay_s": 0.1})
    children = running.children()
    stream = Stream(running, 15)
    running.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert running.status("/ready") == 503
    assert running.http.post("/generate/3").status_code == 503
    lines = stream.join()
    assert sum(len(line["text"]) for line in lines) == 15
    assert lines[-1]["reason"] == "length"
    assert running.process.wait(10) == 0
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_an_echo_of_the_signal_is_not_a_second_one(run: Callable[..., Running]) -> None:
    running = run({"step_delay_s": 0.1})
    stream = Stream(running, 12)
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGTERM)
    assert stream.join()[-1]["reason"] == "length"
    assert running.process.wait(10) == 0


@pytest.mark.slow
def test_what_outlasts_the_drain_ends_with_one_event(run: Callable[..., Running]) -> None:
    running = run({"step_delay_s": 0.1}, drain_timeout_s=0.5)
    children = running.children()
    stream = Stream(running, 200)
    running.process.send_signal(signal.SIGTERM)
    lines = stream.join()
    assert [line for line in lines if line.get("reason") or "error" in line] == lines[-1:]
    assert lines[-1].get("reason") == "abort"
    assert running.process.wait(10) == 0
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(run: Callable[..., Running]) -> None:
    running = run({"step_delay_s": 0.1})
    stream = Stream(running, 200)
    running.process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    begun = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(10) == 0
    assert time.monotonic() - begun < 5
    stream.join()


@pytest.mark.slow
def test_sigterm_while_loading(run: Callable[..., Running]) -> None:
    running = run({"load_delay_s": 60}, ready=False)
    until = time.monotonic() + START_S
    while not running.children() and time.monotonic() < until:
        time.sleep(0.02)
    children = running.children()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(10) == 0
    assert not any(child.is_running() for child in children)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"load_error": "weights.gguf: truncated"}, "ModelFormatError: weights.gguf: truncated"),
        ({"load_kill": True}, "SIGKILL"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_server(
    run: Callable[..., Running], script: dict[str, Any], message: str
) -> None:
    running = run(script, ready=False)
    assert running.process.wait(10) == 1
    lines = running.errors.read_text().splitlines()
    assert lines[-1].startswith("hardpoint: ")
    assert message in lines[-1]
    assert not any("Traceback" in line for line in lines if "api[" in line)


def test_a_killed_engine_is_told_to_every_stream_and_probe(run: Callable[..., Running]) -> None:
    running = run({"step_delay_s": 0.05})
    streams = [Stream(running, 200) for _ in range(4)]
    begun = time.monotonic()
    running.children()[0].kill()
    for stream in streams:
        assert stream.join()[-1] == {"error": "EngineDeadError"}
        assert stream.ended - begun < 5
    assert (running.status("/ready"), running.status("/live")) == (503, 503)
    refused = running.http.post("/generate/3")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(10) == 0


def test_a_killed_server_leaves_no_engine(run: Callable[..., Running]) -> None:
    running = run()
    children = running.children()
    running.process.kill()
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command in this process, where it must end with status 1; its last line."""
    monkeypatch.syspath_prepend(str(FAKES))

    def command(**server: Any) -> str:
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(settings({}, **server)))
        assert main(["serve", "--config", str(config)]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()[-1]

    return command


def test_a_taken_port_is_one_message(refuse: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refuse(port=port)
    assert f"cannot listen on 127.0.0.1 port {port}" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"host": "0.0.0.0"}, "--allow-anonymous"),
        ({"host": "no.such.host.invalid"}, "--api-key"),
        ({"api_key": ["short"]}, "API key"),
        ({"api_key_file": "/nonexistent"}, "api-key-file"),
        ({"endpoints": ["absent"]}, "absent"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(
    refuse: Callable[..., str], server: dict[str, Any], message: str
) -> None:
    assert message in refuse(**server)


def test_with_a_key_only_the_probes_answer_without(run: Callable[..., Running]) -> None:
    running = run(api_key=["correct-key"])
    assert running.http.post("/generate/1").status_code == 401
    assert running.http.post("/generate/1", headers={"x-api-key": "correct-key"}).status_code == 200


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", None)])
def test_bind_gives_a_listening_socket(host: str, family: int | None) -> None:
    with bind(ServerConfig(host=host, port=0)) as listener:
        assert listener.getsockname()[1] > 0
        assert family is None or listener.family == family
        with pytest.raises(ConfigError, match="cannot listen"):
            bind(ServerConfig(host=host, port=listener.getsockname()[1]))


def test_an_unknown_host_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match="cannot be bound"):
        bind(ServerConfig(host="no.such.host.invalid"))


def test_a_name_that_is_none_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match="--host 'xxx.*cannot be bound"):
        bind(ServerConfig(host="x" * 64 + ".example"))
