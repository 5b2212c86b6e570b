"""``plugins doctor --server``: the reports of a running server, and every way in which there are none."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.errors import ConfigError
from hardpoint.plugins.cli import run_plugins
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin
from hardpoint.plugins.report import LoadReport, PluginState, PluginStatus
from hardpoint.testing.doctor_text import painter
from hardpoint.testing.server_doctor import LiveReport, admin_key, examine_server, render_live

KEY = "admin-key-one"


def status(name: str, state: PluginState, version: str = "1.0", reason: str = "", kind: str = "hooks") -> PluginStatus:
    return PluginStatus(kind, name, f"dist-{name}", version, state, reason, 0.0125)


def report(process: str, *plugins: PluginStatus, core: str = "0.1") -> LoadReport:
    return LoadReport(process, 1, ("api",), None, core, plugins)


API = report(
    "process 1 (api)",
    status("audit", PluginState.CREATED),
    status("mine", PluginState.ALLOWED, kind="tokenizer"),
    status("no", PluginState.REFUSED, version="", reason="not on the list HARDPOINT_PLUGINS"),
)
ENGINE = report("process 2 (engine)", status("audit", PluginState.CREATED))


def here(*plugins: tuple[str, str, str]) -> Discovery:
    """What is installed locally, as ``(kind, name, version)``."""
    found = tuple(DiscoveredPlugin(k, n, 1, f"dist-{n}", v, "m:a", "/p") for k, n, v in plugins)
    return Discovery(found, (RefusedPlugin("hooks", "broken", "dist-broken", "too old"),))


SAME = here(("hooks", "audit", "1.0"), ("tokenizer", "mine", "1.0"), ("hooks", "no", "1.0"))


class Listener:
    """Answers every request with ``status`` and ``body``, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.asked: list[tuple[str, str | None]] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listener.asked.append((self.path, self.headers["Authorization"]))
                self.send_response(listener.status)
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(listener.body)

            def log_message(self, *words: Any) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, *reports: LoadReport, unreachable: tuple[dict[str, str], ...] = ()) -> None:
        self.body = msgspec.json.encode({"processes": reports, "unreachable": unreachable})


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    thread = threading.Thread(target=listener.server.serve_forever, args=(0.01,))
    thread.start()
    yield listener
    listener.server.shutdown()
    thread.join()
    listener.server.server_close()


def text(found: LiveReport, **options: Any) -> str:
    return "\n".join(render_live(found, painter(options.pop("color", False)), options.pop("verbose", False), **options))


def test_processes_are_shown_as_tables(listener: Listener) -> None:
    listener.answer(API, ENGINE)
    found = examine_server(listener.url, KEY, SAME)
    assert listener.asked == [("/admin/plugins", f"Bearer {KEY}")]
    assert (found.processes, found.problems, found.differences) == ((API, ENGINE), (), ())
    lines = text(found).splitlines()
    assert lines[0] == "process 1 (api), core 0.1"
    assert lines[1].split() == ["hooks:audit", "dist-audit", "1.0", "created", "12.5", "ms"]
    assert "refused" in lines[2]
    assert "HARDPOINT_PLUGINS" in lines[2]
    assert lines[3] == "  1 more not loaded here (-v shows them)"
    assert lines[-1] == f"no problems found in 2 processes of {listener.url}"
    assert "tokenizer:mine" in text(found, verbose=True)
    assert "hooks:audit" not in text(found, kind="tokenizer", verbose=True)
    assert "\x1b[32mcreated" in text(found, color=True)


def test_a_path_before_the_routes_is_kept(listener: Listener) -> None:
    """As behind a proxy that serves it below a prefix."""
    listener.answer(API)
    examine_server(listener.url + "/models/", KEY, SAME)
    assert listener.asked[0][0] == "/models/admin/plugins"


def test_failures_and_lost_engines_are_problems(listener: Listener) -> None:
    failed = status("audit", PluginState.FAILED, reason="ValueError: disk\nfull \x1b[31m")
    listener.answer(
        API, report("process 2 (engine)", failed), unreachable=({"model": "m", "reason": "it is starting"},)
    )
    found = examine_server(listener.url, KEY, SAME)
    assert found.problems[0].startswith("hooks:audit (dist-audit) failed in process 2 (engine): ValueError: disk")
    assert found.problems[1] == "engine 'm' cannot be asked: it is starting"
    assert "\x1b" not in text(found)
    assert "problem: engine 'm' cannot be asked" in text(found)


def test_differences_between_processes_are_found(listener: Listener) -> None:
    other = report("process 3 (worker, rank 0)", status("audit", PluginState.CREATED, "2.0"), core="0.2")
    listener.answer(API, ENGINE, other)
    found = examine_server(listener.url, KEY, SAME)
    process_lines = [line for line in found.differences if "process" in line]
    assert process_lines == [
        "the core: 0.1 in process 1 (api) and process 2 (engine), 0.2 in process 3 (worker, rank 0)",
        "hooks:audit (dist-audit): 1.0 in process 1 (api) and process 2 (engine), 2.0 in process 3 (worker, rank 0)",
    ]
    assert "\x1b[33mdist-audit 1.0" in text(found, color=True), "rows that differ stand out"


def test_differences_from_this_installation_are_found_and_no_problem(listener: Listener) -> None:
    """A newer version was installed here, say, and the server not restarted."""
    listener.answer(API)
    found = examine_server(listener.url, KEY, here(("hooks", "audit", "1.1"), ("hash", "new", "3.0")))
    assert set(found.differences) == {
        "hooks:audit (dist-audit): 1.0 in the server, 1.1 is installed here",
        "hash:new (dist-new): unknown in the server, 3.0 is installed here",
        "hooks:no (dist-no): known in the server, not installed here",
        "tokenizer:mine (dist-mine): 1.0 in the server, not installed here",
    }
    assert found.problems == ()


@pytest.mark.parametrize(
    ("code", "body", "advice"),
    [
        (401, b"{}", "does not know this key; give an admin key"),
        (403, b'{"error": {"code": "admin_key_required"}}', "an API key is not enough; give an admin key"),
        (403, b'{"error": {"code": "host_refused"}}', "server.allowed_hosts"),
        (404, b"", "--endpoints openai,ops,admin"),
        (500, b"", "its log says why"),
        (301, b"", "answered 301"),
        (200, b"<html>", "check that this is a Hardpoint server"),
        (200, b"[" * 1_000_000, "check that this is a Hardpoint server"),
        (200, b'{"processes": [], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "check that this is a Hardpoint server"),
        (200, b'{"processes": []}', "without the report of a single process; check that this is a Hardpoint server"),
        (200, b'{"processes": [{"process": 1}]}', "check that this is a Hardpoint server"),
    ],
)
def test_every_refusal_says_what_to_do(listener: Listener, code: int, body: bytes, advice: str) -> None:
    """Redirects are not followed: the key would go along."""
    listener.status, listener.body = code, body
    found = examine_server(listener.url, KEY, SAME)
    assert len(found.problems) == 1
    assert advice in found.problems[0]
    assert KEY not in found.to_json()
    assert len(listener.asked) == 1


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://", "//host", "unix:/x", "http://["])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    assert "is not of the form http://HOST:PORT" in examine_server(url, KEY, SAME).problems[0]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://no.invalid"]
)
def test_a_server_that_is_not_there(url: str) -> None:
    assert "cannot be reached" in examine_server(url, KEY, SAME).problems[0]


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"])
def test_an_answer_that_drips_is_given_up(beginning: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its headers or in its body: each byte comes well before the limit of a read."""
    monkeypatch.setattr("hardpoint.testing.server_doctor._TIMEOUT_S", 1.0)
    finished = threading.Event()

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as client, contextlib.suppress(OSError):
            client.sendall(beginning)
            while not finished.wait(0.05):
                client.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        started = time.monotonic()
        found = examine_server(f"http://127.0.0.1:{server.getsockname()[1]}", KEY, SAME)
        finished.set()
        thread.join()
    assert "did not answer wholly within 1 s" in found.problems[0]
    assert time.monotonic() - started < 10


def test_no_proxy_gets_the_key(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    listener.answer(API)
    assert examine_server(listener.url, KEY, SAME).problems == ()


def test_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HARDPOINT_ADMIN_KEY", "HARDPOINT_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="--admin-key-file FILE or HARDPOINT_ADMIN_KEY"):
        admin_key(None)
    path = tmp_path / "keys"
    path.write_text("# ours\nfrom-the-file\nsecond-key\n")
    monkeypatch.setenv("HARDPOINT_ADMIN_KEY_FILE", str(path))
    assert admin_key(None) == "from-the-file"
    monkeypatch.setenv("HARDPOINT_ADMIN_KEY", "from-the-environment,second-key")
    assert admin_key(None) == "from-the-environment"
    assert admin_key(str(path)) == "from-the-file"
    with pytest.raises(ConfigError, match="--admin-key-file"):
        admin_key(str(tmp_path / "absent"))


@pytest.fixture
def doctor(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("HARDPOINT_ADMIN_KEY", KEY)
    monkeypatch.delenv("HARDPOINT_ADMIN_KEY_FILE", raising=False)
    return lambda *words: run_plugins(["doctor", "--server", listener.url, *words])


def test_the_command_judges_by_exit_status(
    listener: Listener, doctor: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    listener.answer(API)
    assert doctor() == 0
    assert "no problems found" in capsys.readouterr().out
    assert doctor("--json") == 0
    first = capsys.readouterr().out
    assert doctor("--json") == 0
    assert capsys.readouterr().out == first, "the same answer gives the same text"
    decoded = json.loads(first)
    assert list(decoded) == ["processes", "unreachable", "server", "differences", "problems"]
    assert decoded["processes"][0]["plugins"][0]["state"] == "created"
    listener.status = 403
    assert doctor() == 1
    assert doctor("--json") == 1
    assert "an API key is not enough" in json.loads(capsys.readouterr().out.splitlines()[-1])["problems"][0]


@pytest.mark.parametrize("words", [["--probe"], ["--config", "x.yaml"], ["--plugins", ""], ["--pin", "a:b=c"]])
def test_flags_without_effect_are_refused(doctor: Callable[..., int], listener: Listener, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"leave out {words[0]}"):
        doctor(*words)
    assert listener.asked == []
    with pytest.raises(ConfigError, match="name the server"):
        run_plugins(["doctor", "--admin-key-file", "keys"])
