"""``plugins doctor --server`` against a server of three processes: what it shows, to whom, and when things go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_process import PATIENCE, ServerProcess, serving

pytestmark = pytest.mark.timeout(300 * PATIENCE)

API_KEY, ADMIN_KEY = "api-key-of-a-user", "admin-key-of-ours"
FLAGS = ("--executor", "multiproc", "--endpoints", "openai,ops,admin", "--api-key", API_KEY)
FRAGILE = """
from hardpoint.interfaces.hooks import hookimpl
class Fragile:
    @hookimpl
    def request_added(self, request):
        raise ValueError("the disk is full")
def create(ctx, options):
    return Fragile()
"""


def doctor(
    server: ServerProcess, *words: str, key: str | None = ADMIN_KEY, path: Path | None = None
) -> tuple[int, str]:
    """Exit status and output of the command in an environment of its own, with ``path`` on its search path."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT_")}
    environ |= {"HARDPOINT_ADMIN_KEY": key} if key else {}
    environ |= {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, "-m", "hardpoint.cli", "plugins", "doctor", "--server", server.url, *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def examined(server: ServerProcess, path: Path) -> tuple[int, dict[str, Any]]:
    status, text = doctor(server, "--json", path=path)
    found: dict[str, Any] = json.loads(text)
    return status, found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merely installed hooks plugin that fails at the first request."""
    root = tmp_path_factory.mktemp("site")
    folder = root / "fragile-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[hardpoint.hooks.v1]\nfragile = fragile_hooks:create\n")
    (root / "fragile_hooks.py").write_text(FRAGILE)
    return root


@pytest.fixture(scope="module")
def server(tiny: Path, site: Path) -> Iterator[ServerProcess]:
    environ = {"HARDPOINT_ADMIN_KEY": ADMIN_KEY, "PYTHONPATH": str(site)}
    with serving(tiny, *FLAGS, environ=environ) as server:
        server.http.headers["authorization"] = f"Bearer {API_KEY}"
        yield server


def states(found: dict[str, Any], plugin: str) -> list[str]:
    """The plugin's state in each process."""
    rows = [row for process in found["processes"] for row in process["plugins"]]
    return [row["state"] for row in rows if f"{row['kind']}:{row['name']}" == plugin]


def test_every_process_tells_its_own_story(server: ServerProcess, site: Path) -> None:
    """L12.5, R12.16: API, engine and worker report with their own ids, and each has loaded its own kinds only."""
    status, found = examined(server, site)
    assert (status, found["problems"], found["differences"], found["unreachable"]) == (0, [], [], [])
    api, engine, worker = found["processes"]
    assert [process["pid"] for process in found["processes"]] == [server.pid, server.engine().pid, server.worker().pid]
    assert ("api" in api["roles"], "engine" in engine["roles"], worker["roles"]) == (True, True, ["worker"])
    assert worker["rank"] == 0
    assert states(found, "endpoint:admin") == ["created", "discovered", "discovered"]
    assert states(found, "scheduler:fcfs")[1] == "created"
    assert states(found, "hooks:fragile")[1:] == ["created", "created"]
    text = doctor(server, path=site)[1]
    assert "no problems found in 3 processes" in text
    assert " more not loaded here" in text


def test_only_an_admin_key_is_answered(server: ServerProcess, site: Path) -> None:
    for key, advice in ((API_KEY, "an API key is not enough"), ("an-unknown-key", "does not know this key")):
        status, text = doctor(server, key=key, path=site)
        assert status == 1
        assert advice in text
    status, text = doctor(server, key=None, path=site)
    assert (status, "give an admin key" in text) == (1, True)
    assert server.http.get("/admin/plugins").status_code == 403
    assert server.http.get("/v1/models", headers={"authorization": f"Bearer {ADMIN_KEY}"}).status_code == 200


def test_another_installation_here_is_told(server: ServerProcess) -> None:
    """Without the plugin's folder on its path, the command's own environment differs from the server's."""
    status, text = doctor(server)
    assert status == 0
    assert "difference: hooks:fragile (fragile): 1.0 in the server, not installed here" in text


def test_the_prefix_cache_is_reset_by_admins(server: ServerProcess) -> None:
    assert server.http.post("/admin/reset_prefix_cache").status_code == 403
    answer = server.http.post("/admin/reset_prefix_cache", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert (answer.status_code, answer.json()) == (200, {"reset": {"served": True}})


def test_a_plugin_that_fails_later_is_shown_with_its_reason(server: ServerProcess, site: Path) -> None:
    """P12.1: the server goes on without it, and says so. Runs after the tests that see it healthy."""
    server.complete(max_tokens=2)
    status, found = examined(server, site)
    assert status == 1
    assert states(found, "hooks:fragile")[1:] == ["failed", "created"]
    (problem,) = found["problems"]
    assert problem.startswith("hooks:fragile (fragile) failed in process")
    assert "ValueError: the disk is full" in problem


def test_an_engine_that_died_is_named(server: ServerProcess, site: Path) -> None:
    """Last of this module: nothing is left to ask after it."""
    server.engine().kill()
    while server.status("/live") == 200:
        pass
    status, found = examined(server, site)
    assert status == 1
    assert [process["pid"] for process in found["processes"]] == [server.pid]
    assert [row["model"] for row in found["unreachable"]] == ["served"]
    assert "the server's log says why" in found["problems"][0]


def test_a_server_without_admin_keys_opens_no_admin_routes(tiny: Path) -> None:
    server = ServerProcess(tiny, *FLAGS)
    try:
        assert server.wait(60 * PATIENCE) == 1
        assert "--admin-key-file, HARDPOINT_ADMIN_KEY or --admin-key" in server.log()
    finally:
        server.close()


def test_a_server_without_the_endpoint_says_how_to_open_it(tiny: Path) -> None:
    with serving(tiny, "--endpoints", "ops", ready=False) as server:
        status, text = doctor(server)
        assert (status, "--endpoints openai,ops,admin" in text) == (1, True)
