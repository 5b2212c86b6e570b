from __future__ import annotations

from typing import Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.endpoint import EndpointContext
from hardpoint.interfaces.plugin import NoOptions
from hardpoint.roles import ProcessRole
from hardpoint_serving.openai import OpenAIOptions
from hardpoint_serving.openai import create as create_openai
from hardpoint_serving.ops import create as create_ops


class Exporter:
    def __init__(self, text: bytes) -> None:
        self.text = text

    def exposition(self) -> tuple[str, bytes]:
        return "text/plain; version=1.0.0", self.text


async def test_health_names_each_models_state(in_process: Any) -> None:
    response = await in_process.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "models": {"fake": "ready"}})
    in_process.client.is_ready = False
    response = await in_process.http.get("/health")
    assert (response.status_code, response.json()["models"]) == (503, {"fake": "not ready"})
    in_process.client.die()
    assert (await in_process.http.get("/health")).json()["models"] == {"fake": "dead"}


async def test_version_and_load(in_process: Any) -> None:
    assert (await in_process.http.get("/version")).json() == {"version": "0.1"}
    load = (await in_process.http.get("/load")).json()
    assert load["server_load"] == 0
    figures = {"running": 0, "waiting": 0, "kv_cache_usage": 0.1, "free_kv_blocks": 90, "total_kv_blocks": 100}
    assert load["models"] == {"fake": figures}


async def test_load_before_the_first_step(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process.client, "stats", lambda: None)
    assert (await in_process.http.get("/load")).json()["server_load"] == 0


async def test_a_dead_engine_has_no_load(in_process: Any) -> None:
    in_process.client.num_running = 3
    assert (await in_process.http.get("/load")).json()["server_load"] == 3
    in_process.client.die()
    load = (await in_process.http.get("/load")).json()
    assert (load["server_load"], load["models"]["fake"]["running"]) == (0, 0)


async def test_metrics_are_those_of_all_exporters(make_in_process: Any) -> None:
    served = make_in_process(exporters=(Exporter(b"a 1\n"), Exporter(b"b 2\n")))
    response = await served.http.get("/metrics")
    assert response.content == b"a 1\nb 2\n"
    assert response.headers["content-type"] == "text/plain; version=1.0.0"


async def test_no_exporter_means_no_metrics(in_process: Any) -> None:
    response = await in_process.http.get("/metrics")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/load"])
async def test_only_get(in_process: Any, path: str) -> None:
    response = await in_process.http.post(path)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


def test_endpoints_need_a_server() -> None:
    context = EndpointContext("x", 1, frozenset({ProcessRole.API}))
    with pytest.raises(ConfigError):
        create_ops(context, NoOptions())
    with pytest.raises(ConfigError):
        create_openai(context, OpenAIOptions())
