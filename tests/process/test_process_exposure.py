"""What a running server shows to the outside: one port, sockets in a private folder, and nothing without a key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil  # type: ignore[import-untyped]
import pytest

from server_process import PATIENCE, ServerProcess, Stream, serving

pytestmark = pytest.mark.timeout(300 * PATIENCE)

KEY, FILE_KEY, ENVIRON_KEY = "key-from-the-flag", "key-from-the-file", "key-from-the-environment"
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/served"),
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/load"),
]
NO_ROUTES = [
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "//live"),
    ("GET", "/live/"),
    ("GET", "/live/../v1/models"),
    ("GET", "/ready/%2e%2e/load"),
    ("GET", "/%6cive/x"),
    ("POST", "/live"),
    ("OPTIONS", "/v1/models"),
    ("DELETE", "/v1/models/served"),
]


def inet_sockets(server: ServerProcess) -> list[tuple[str, str, int]]:
    """(status, address, port) of every TCP and UDP socket of the server's processes."""
    return [
        (one.status, one.laddr.ip, one.laddr.port)
        for process in server.survivors()
        for one in process.net_connections("inet")
    ]


@pytest.mark.parametrize("executor", [pytest.param("uniproc", marks=pytest.mark.slow), "multiproc"])
def test_only_the_api_port_listens_and_all_else_is_private(tiny: Path, executor: str) -> None:
    """Class 3."""
    with serving(tiny, "--executor", executor) as server:
        stream = Stream(server, max_tokens=2000)
        stream.wait_begun()
        assert len(server.survivors()) == (2 if executor == "uniproc" else 3)
        port = int(server.url.rpartition(":")[2])
        sockets = inet_sockets(server)
        assert [one for one in sockets if one[0] == psutil.CONN_LISTEN] == [(psutil.CONN_LISTEN, "127.0.0.1", port)]
        # What is left are the API port's own connections: no process talks to another over the network.
        assert {(ip, local) for _, ip, local in sockets} == {("127.0.0.1", port)}
        named = {
            one.laddr
            for process in server.survivors()
            for one in process.net_connections("unix")
            if isinstance(one.laddr, str) and one.laddr
        }
        (folder,) = server.runtime.iterdir()
        assert named
        assert {Path(name).parent for name in named} == {folder}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.geteuid()
        # Beside the sockets only the mark by which a later start knows the folder for one of ours.
        marks = {path.name for path in folder.iterdir()} - {Path(name).name for name in named}
        assert marks == {".hardpoint-sockets"}


@pytest.mark.slow
def test_a_key_from_the_environment_works_and_shows_nowhere(tiny: Path) -> None:
    """Neither on a command line, which every user of the machine can read, nor in the log."""
    with serving(tiny, environ={"HARDPOINT_API_KEY": ENVIRON_KEY}) as server:
        assert server.status("/load") == 401
        assert raw(server, "GET", "/load", authorization=f"Bearer {ENVIRON_KEY}").status_code == 200
        assert ENVIRON_KEY not in str([process.cmdline() for process in server.survivors()])
        assert ENVIRON_KEY not in server.log() + server.output()


@pytest.fixture(scope="module")
def keyed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# one per line\n{FILE_KEY}\n")
    with serving(tiny, "--api-key", KEY, "--api-key-file", str(keys)) as server:
        yield server


def raw(server: ServerProcess, method: str, path: str, **headers: str) -> httpx.Response:
    """The path goes out as it is written here."""
    url = httpx.URL(server.url).copy_with(raw_path=path.encode())
    return server.http.request(method, url, headers=headers)


@pytest.mark.parametrize(("method", "path"), ROUTES + NO_ROUTES, ids=lambda part: str(part))
def test_without_a_key_nothing_answers(keyed: ServerProcess, method: str, path: str) -> None:
    """Classes 12 and 13: also where there is no route, so that nobody learns which there are."""
    for headers in (
        {},
        {"authorization": "Bearer wrong-key-here"},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": ""},
    ):
        answer = raw(keyed, method, path, **headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("path", ["/live", "/ready"])
def test_only_the_probes_answer_without(keyed: ServerProcess, path: str) -> None:
    """L12.25."""
    assert raw(keyed, "GET", path).status_code == 200
    assert raw(keyed, "HEAD", path).status_code in (200, 405)


@pytest.mark.parametrize("key", [KEY, FILE_KEY])
def test_each_key_opens_every_route(keyed: ServerProcess, key: str) -> None:
    """L12.25."""
    for method, path in ROUTES:
        assert raw(keyed, method, path, authorization=f"Bearer {key}").status_code in (200, 415), path
    with keyed.sdk(api_key=key) as sdk:
        assert [model.id for model in sdk.models.list()] == ["served"]


def test_the_sdk_calls_a_wrong_key_by_its_name(keyed: ServerProcess) -> None:
    with keyed.sdk(api_key="wrong-key-here") as sdk:
        for call in (sdk.models.list, lambda: sdk.completions.create(model="served", prompt="x")):
            with pytest.raises(openai.AuthenticationError) as refused:
                call()
            assert refused.value.code == "invalid_api_key"


def test_foreign_hosts_and_origins_are_refused(keyed: ServerProcess) -> None:
    """Class 14: a web page must not reach a loopback server through its visitor's browser."""
    bearer = f"Bearer {KEY}"
    assert raw(keyed, "GET", "/load", authorization=bearer, host="evil.example").status_code == 403
    assert raw(keyed, "GET", "/load", authorization=bearer, origin="http://evil.example").status_code == 403
    assert raw(keyed, "GET", "/load", authorization=bearer, origin="http://localhost:3000").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "some-name"])
def test_beyond_loopback_a_key_is_needed(tiny: Path, host: str) -> None:
    """Refused before anything is bound: the message is the whole output."""
    server = ServerProcess(tiny, "--host", host)
    try:
        assert server.wait(30) == 1
        assert server.output() == ""
        (line,) = server.log().splitlines()
        assert line.startswith("hardpoint: ")
        assert f"binding {host} without a key" in line
        assert "--api-key" in line
        assert "--allow-anonymous" in line
        server.assert_gone()
    finally:
        server.close()
