"""The plugin in the README is found, planned, created and asked, exactly as printed there."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from doc_blocks import blocks_of
from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError
from hardpoint.interfaces import EndpointContext
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app
from hardpoint.testing import FakeEngineClient
from scratch_install import write_metadata
from workspace import ROOT

REPLY = "Iron holds its breath"


def printed(name: str) -> str:
    return next(block.text for block in blocks_of(ROOT / "README.md") if block.file == name)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an installer would leave behind, from the printed project file."""
    project: dict[str, Any] = tomllib.loads(printed("haiku/pyproject.toml"))["project"]
    (tmp_path / "haiku.py").write_text(printed("haiku/haiku.py"))
    write_metadata(project, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("haiku", None)


def start(engine: FakeEngineClient, options: dict[str, Any] | None = None) -> Any:
    """The guarded application with the one endpoint, through discovery and plan."""
    given = {"endpoint": {"haiku": options}} if options else {}
    plan = build_plan(discover(), PluginSelection(endpoints=("haiku",), options=given))
    runtime = PluginRuntime(plan, {ProcessRole.API})
    engines = Engines([engine.model_name])
    engines.add(engine.model_name, engine)

    endpoints = runtime.create_all("endpoint", EndpointContext, router=engines)
    return create_app(ServerConfig(), engines, endpoints, ())


async def ask(app: Any, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.get(path)


@pytest.mark.usefixtures("installed")
async def test_it_answers() -> None:
    engine = FakeEngineClient(reply=REPLY)
    answer = await ask(start(engine), "/haiku/rivets")
    assert (answer.status_code, answer.json()) == (200, {"haiku": REPLY})
    prompt, params, _ = engine.seen[0]
    assert prompt.text is not None
    assert "Write a haiku about rivets." in prompt.text
    assert params.max_tokens == 40


@pytest.mark.usefixtures("installed")
async def test_its_option_counts() -> None:
    answer = await ask(start(FakeEngineClient(reply=REPLY), {"max_tokens": 4}), "/haiku/rivets")
    assert answer.json() == {"haiku": REPLY[:4]}


@pytest.mark.usefixtures("installed")
async def test_engine_errors_reach_the_client_in_the_error_form() -> None:
    engine = FakeEngineClient()
    app = start(engine)
    engine.die()
    answer = await ask(app, "/haiku/rivets")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.usefixtures("installed")
def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown option plugins.endpoint.haiku.max_token, did you mean|max_token"):
        start(FakeEngineClient(), {"max_token": 4})


@pytest.mark.usefixtures("installed")
def test_it_opens_no_route_unless_listed() -> None:
    """R12.48, R12.50: installed is not enough."""
    plan = build_plan(discover(), PluginSelection())
    assert plan.of("endpoint") == ()
    assert "haiku" in {entry.name for entry in plan.refused}


def test_it_is_about_thirty_lines() -> None:
    lines = [line for line in printed("haiku/haiku.py").splitlines() if line.strip()]
    assert 20 <= len(lines) <= 32
