"""The plugin alone: its routes over a model that always answers the same."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient
from hello_endpoint import HelloEndpoint, HelloOptions

from hardpoint.interfaces import EngineClient
from hardpoint.testing import FakeEngineClient


class OneModel:
    """A router with a single model in it."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def names(self) -> tuple[str, ...]:
        return (self._client.model_name,)

    def resolve(self, model: str | None) -> EngineClient:
        return self._client

    def clients(self) -> tuple[EngineClient, ...]:
        return (self._client,)


def browse(path: str, options: HelloOptions | None = None) -> dict[str, str]:
    router = OneModel(FakeEngineClient(reply="Good morning, Ada."))
    app = FastAPI()
    app.include_router(HelloEndpoint(router, options or HelloOptions()).routes())
    answer = TestClient(app).get(path)
    assert answer.status_code == 200
    body: dict[str, str] = answer.json()
    return body


def test_it_greets_for_the_model() -> None:
    assert browse("/hello") == {"message": "Hello from fake"}


def test_the_greeting_is_an_option() -> None:
    assert browse("/hello", HelloOptions(greeting="Ahoy")) == {"message": "Ahoy from fake"}


def test_the_model_greets() -> None:
    assert browse("/hello/Ada") == {"message": "Good morning, Ada."}


def test_the_length_is_an_option() -> None:
    assert browse("/hello/Ada", HelloOptions(max_tokens=4)) == {"message": "Good"}
