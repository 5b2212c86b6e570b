"""What operators learn from ``/admin/plugins``, also while engines start, hang or have died."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError
from hardpoint.interfaces.endpoint import EndpointContext
from hardpoint.process import LoadReport
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app
from hardpoint.testing import FakeEngineClient
from hardpoint_serving.admin import AdminOptions, create

ADMIN = "admin-key-one"
OWN = LoadReport("process 1 (api)", 1, ("launcher", "api"), None, "0.1", ())
WORKER = LoadReport("process 3 (worker, rank 0)", 3, ("worker",), 0, "0.1", ())


def admin(*clients: FakeEngineClient, names: Sequence[str] = (), timeout_s: float = 10.0) -> httpx.AsyncClient:
    engines = Engines([*(client.model_name for client in clients), *names])
    for client in clients:
        engines.add(client.model_name, client)
    context = EndpointContext("admin", 1, frozenset({ProcessRole.API}), router=engines, load_report=lambda: OWN)
    endpoint = create(context, AdminOptions(answer_timeout_s=timeout_s))
    app = create_app(ServerConfig(), engines, {"admin": endpoint}, (), (ADMIN,))
    headers = {"authorization": f"Bearer {ADMIN}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers)


async def status(http: httpx.AsyncClient) -> tuple[list[str], list[dict[str, str]]]:
    async with http:
        answer = await http.get("/admin/plugins")
    assert answer.status_code == 200
    return [process["process"] for process in answer.json()["processes"]], answer.json()["unreachable"]


async def test_all_processes_report_in_order() -> None:
    one, two = FakeEngineClient(model_name="one"), FakeEngineClient(model_name="two")
    one.reports = (*one.reports, WORKER)
    processes, unreachable = await status(admin(one, two))
    assert processes == [OWN.process, "process 1 (engine)", WORKER.process, "process 1 (engine)"]
    assert unreachable == []


async def test_a_report_has_every_field_of_a_load_report() -> None:
    async with admin(FakeEngineClient()) as http:
        first = (await http.get("/admin/plugins")).json()["processes"][0]
    expected = {"process": OWN.process, "pid": 1, "roles": ["launcher", "api"], "rank": None, "core_version": "0.1"}
    assert first == {**expected, "plugins": []}


async def test_engines_that_cannot_tell_are_named_and_the_others_told() -> None:
    dead, fine = FakeEngineClient(model_name="dead"), FakeEngineClient(model_name="fine")
    dead.die("Traceback in /secret/worker.py")
    processes, unreachable = await status(admin(dead, fine, names=["late"]))
    assert processes == [OWN.process, "process 1 (engine)"]
    assert [(row["model"], row["reason"]) for row in unreachable] == [
        ("dead", "it has stopped; the server's log says why"),
        ("late", "it is still starting"),
    ]


class Silent(FakeEngineClient):
    async def load_reports(self) -> Sequence[LoadReport]:
        await asyncio.Event().wait()
        return ()


class Dying(FakeEngineClient):
    async def load_reports(self) -> Sequence[LoadReport]:
        self.die()
        return await super().load_reports()


@pytest.mark.parametrize(
    ("client", "reason"),
    [(Silent(), "it did not answer within 0.05 s"), (Dying(), "it failed to answer: the engine process was killed")],
    ids=["silent", "dying"],
)
async def test_an_engine_in_trouble_holds_nobody_up(client: FakeEngineClient, reason: str) -> None:
    processes, unreachable = await status(admin(client, timeout_s=0.05))
    assert (processes, unreachable) == ([OWN.process], [{"model": "fake", "reason": reason}])


async def test_the_prefix_cache_is_reset_by_model() -> None:
    idle, busy = FakeEngineClient(model_name="idle"), FakeEngineClient(model_name="busy")
    busy.num_running = 1
    async with admin(idle, busy) as http:
        answer = await http.post("/admin/reset_prefix_cache")
        assert (answer.status_code, answer.json()) == (200, {"reset": {"idle": True, "busy": False}})
        assert (await http.get("/admin/reset_prefix_cache")).status_code == 405


async def test_no_reset_without_every_engine() -> None:
    async with admin(FakeEngineClient(), names=["late"]) as http:
        answer = await http.post("/admin/reset_prefix_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    dead = FakeEngineClient()
    dead.die()
    async with admin(dead) as http:
        answer = await http.post("/admin/reset_prefix_cache")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def test_it_needs_a_server() -> None:
    roles: Any = frozenset({ProcessRole.API})
    for context in (EndpointContext("x", 1, roles), EndpointContext("x", 1, roles, router=Engines(["fake"]))):
        with pytest.raises(ConfigError, match="router and load report"):
            create(context, AdminOptions())
