"""R12.3: no kind of plugin is loaded in a process outside its policy.

Every installed plugin is watched, and one made up for each kind that nobody implements: through a server with an engine
and a worker process of their own, and through the commands of the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cli_support import run_process
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS
from hardpoint.roles import ProcessRole
from import_spy import ImportSpy, install_import_spy
from server_process import PATIENCE, serving

pytestmark = pytest.mark.timeout(300 * PATIENCE)

ROLES: Mapping[str, frozenset[ProcessRole]] = {
    "launcher": frozenset({ProcessRole.LAUNCHER, ProcessRole.API}),
    "engine": frozenset({ProcessRole.ENGINE}),
    "worker": frozenset({ProcessRole.WORKER}),
}
"""What the processes of a server are when its worker has one of its own."""

EXPECTED: Mapping[str, set[str]] = {
    "launcher": {"platform", "hooks", "model_source", "weight_loader", "tokenizer", "stat_logger", "endpoint"},
    "engine": {"platform", "hooks", "executor", "scheduler", "kv_layout", "kv_cache_spec", "hash"},
    "worker": {"platform", "hooks", "worker", "attention_backend", "model", "weight_loader"},
}
"""The least that each must load to serve a Llama from a folder: the spy sees what is there to be seen."""


def assert_within_policy(spy: ImportSpy, roles: Mapping[str, frozenset[ProcessRole]]) -> None:
    alien = {
        (entry.where, entry.kind, entry.name)
        for entry in spy.imports()
        if entry.kind and not KINDS[entry.kind].roles & roles[entry.where]
    }
    assert alien == set()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> ImportSpy:
    """What a server in three processes imported until its orderly end."""
    spy = install_import_spy(tmp_path_factory.mktemp("spied"))
    with serving(tiny, "--executor", "multiproc", "--num-kv-blocks", "4096", environ=spy.environ) as server:
        server.complete(max_tokens=2)
        with server.sdk() as sdk:
            sdk.chat.completions.create(model="served", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        assert server.status("/metrics") == 200
        assert server.stop() == 0
    return spy


def test_the_spy_watches_a_plugin_of_every_kind(served: ImportSpy) -> None:
    """R12.5."""
    assert {plugin.kind for plugin in discover([str(served.site)]).plugins} == set(KINDS)


def test_a_server_s_processes_load_only_what_is_theirs(served: ImportSpy) -> None:
    """R12.3."""
    assert_within_policy(served, ROLES)
    for where, kinds in EXPECTED.items():
        assert kinds - served.kinds(where) == set(), where
    assert len({entry.pid for entry in served.imports()}) == 3


def test_nothing_comes_in_by_another_way(served: ImportSpy) -> None:
    """What plugins import of themselves is watched by its packages: the API process holds no framework."""
    at_the_end = {where: served.modules_at_the_end(where) for where in ROLES}
    assert "torch" in at_the_end["worker"]
    for where in ("launcher", "engine"):
        assert {"torch", "hardpoint_torch_runtime", "hardpoint_attention", "hardpoint_models"} & at_the_end[
            where
        ] == set()
    assert "hardpoint_scheduling" not in at_the_end["launcher"]
    assert "hardpoint_serving" not in at_the_end["engine"] | at_the_end["worker"]


def test_each_module_is_imported_once_in_a_process(served: ImportSpy) -> None:
    """R12.12, P12.4."""
    seen = [(entry.pid, entry.kind, entry.name) for entry in served.imports() if entry.kind]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    "command", [("--version",), ("--help",), ("plugins", "list"), ("plugins", "list", "--json"), ("serve", "--help")]
)
def test_commands_that_read_metadata_import_no_plugin(tmp_path: Path, command: tuple[str, ...]) -> None:
    """L12.9."""
    spy = install_import_spy(tmp_path)
    assert run_process(*command, environ=spy.environ).status == 0
    assert spy.imports() == []


def test_commands_of_the_launcher_load_the_launcher_s_kinds(tmp_path: Path) -> None:
    spy = install_import_spy(tmp_path)
    run_process("plugins", "doctor", "--json", environ=spy.environ)
    assert run_process("generate", "--help", environ=spy.environ).status == 0
    assert {"platform", "cli_command"} <= spy.kinds("launcher")
    assert_within_policy(spy, {"launcher": frozenset({ProcessRole.LAUNCHER})})


@pytest.mark.slow
def test_one_process_that_does_everything_loads_no_route(tmp_path: Path, tiny: Path) -> None:
    """R12.2: statistics and routes are for asynchronous serving, though the process has the role ``api``."""
    spy = install_import_spy(tmp_path)
    command = ("generate", tiny, "--prompt", "Hi", "--max-tokens", "2", "--num-kv-blocks", "4096")
    assert run_process(*command, environ=spy.environ).status == 0
    loaded = spy.kinds("launcher")
    assert set().union(*EXPECTED.values()) - {"stat_logger", "endpoint"} - loaded == set()
    assert {"stat_logger", "endpoint"} & loaded == set()


@pytest.mark.slow
def test_with_an_empty_list_no_endpoint_is_imported_and_only_the_probes_answer(tmp_path: Path, tiny: Path) -> None:
    """I12.2, R12.51: the explicit none, on a server that is otherwise whole."""
    spy = install_import_spy(tmp_path)
    with serving(tiny, "--endpoints", "", "--num-kv-blocks", "4096", environ=spy.environ) as server:
        assert {server.status(path) for path in ("/live", "/ready")} == {200}
        paths = ("/v1/models", "/v1/completions", "/health", "/load", "/metrics", "/openapi.json", "/docs", "/")
        assert {path: server.status(path) for path in paths} == dict.fromkeys(paths, 404)
        assert server.stop() == 0
    assert "stat_logger" in spy.kinds("launcher")
    assert "endpoint" not in spy.kinds("launcher") | spy.kinds("engine")
