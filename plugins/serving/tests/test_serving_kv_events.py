"""What routers read from ``/kv_events``: everything in order, replay of what they missed, and an explicit gap."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, KVEventBatch
from hardpoint.interfaces.endpoint import EndpointContext, ServerFacts
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app
from hardpoint.server.run import HttpServer
from hardpoint.testing import FakeEngineClient
from hardpoint_serving.kv_events import KVEventsEndpoint, KVEventsOptions, create
from hardpoint_serving.kv_feed import Cursor, EventFeed

ADMIN = "admin-key-one"
HEADERS = {"authorization": f"Bearer {ADMIN}"}


def batch(sequence: int, num_tokens: int = 4) -> KVEventBatch:
    stored = BlocksStored(
        block_hashes=[BlockHash(bytes([sequence % 256]) * 4)],
        parent_hash=None,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        block_size=num_tokens,
    )
    return KVEventBatch(sequence, 1.5, [stored])


@dataclass
class Site:
    """``endpoint`` serves ``client`` over the real guards at a loopback port."""

    client: FakeEngineClient
    endpoint: KVEventsEndpoint
    engines: Engines
    http: httpx.AsyncClient

    async def read(self, query: str = "follow=false", **headers: str) -> list[dict[str, Any]]:
        answer = await self.http.get(f"/kv_events?{query}", headers=headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return parse(answer.text)


def parse(text: str) -> list[dict[str, Any]]:
    """Frames as their JSON, with ``event`` and ``id`` where the frame has them."""
    frames = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        if fields.get("data", "[DONE]") == "[DONE]":
            continue
        frames.append({**json.loads(fields.pop("data")), **fields})
    return frames


@pytest.fixture
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    client = FakeEngineClient()
    engines = Engines(["fake", "late"])
    options = KVEventsOptions(**getattr(request, "param", {}))
    roles = frozenset({ProcessRole.API})
    facts = ServerFacts("0.1", 0, 1 << 20, kv_events=True)
    context = EndpointContext("kv_events", 1, roles, router=engines, facts=facts, is_draining=lambda: engines.draining)
    endpoint = create(context, options)
    endpoint.engine_started(client)
    engines.add("fake", client)
    app = create_app(ServerConfig(), engines, {"kv_events": endpoint}, ("user-key",), (ADMIN,))
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    task = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=10, headers=HEADERS) as http:
        yield Site(client, endpoint, engines, http)
    server.should_exit = server.force_exit = True
    await task


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("the condition did not come true within 5 s")


async def test_every_event_comes_in_order_with_its_fields(site: Site) -> None:
    stored = BlocksStored(
        block_hashes=[BlockHash(b"\x01\x02"), BlockHash(b"\x03\x04")],
        parent_hash=BlockHash(b"\xff"),
        token_ids=np.asarray([7, 8, 9, 10], dtype=np.int32),
        block_size=2,
        group=1,
        adapter="style",
        has_extra_keys=True,
    )
    removed = BlocksRemoved(block_hashes=[BlockHash(b"\x03\x04")], group=1)
    site.client.emit(KVEventBatch(1, 12.5, [stored, removed]))
    site.client.emit(KVEventBatch(2, 13.5, [AllBlocksCleared()]))
    start, first, second = await site.read()
    assert (start["event"], start["model"], start["last"]) == ("start", "fake", 2)
    assert first == {
        "id": f"{start['instance']}-1",
        "sequence": 1,
        "timestamp": 12.5,
        "events": [
            {
                "type": "stored",
                "block_hashes": ["0102", "0304"],
                "group": 1,
                "medium": "device",
                "parent_hash": "ff",
                "token_ids": [7, 8, 9, 10],
                "block_size": 2,
                "adapter": "style",
                "has_extra_keys": True,
            },
            {"type": "removed", "block_hashes": ["0304"], "group": 1, "medium": "device"},
        ],
    }
    assert (second["sequence"], second["events"]) == (2, [{"type": "cleared"}])


async def test_a_reader_comes_back_where_it_was(site: Site) -> None:
    for number in range(1, 101):
        site.client.emit(batch(number))
    frames = await site.read("follow=false&after=97")
    assert [frame.get("sequence") for frame in frames] == [None, 98, 99, 100]
    whole = await site.read()
    assert [frame["sequence"] for frame in whole[1:]] == list(range(1, 101))
    again = await site.read("follow=false", **{"last-event-id": whole[-2]["id"]})
    assert [frame.get("sequence") for frame in again] == [None, 100]
    assert len(await site.read("follow=false&after=100")) == 1


@pytest.mark.parametrize("site", [{"replay_bytes": 4096}], indirect=True)
async def test_what_is_no_longer_kept_is_a_gap(site: Site) -> None:
    for number in range(1, 101):
        site.client.emit(batch(number))
    start, gap, *rest = await site.read("follow=false&after=5")
    assert start["event"] == "start"
    assert (gap["event"], gap["first"], gap["last"]) == ("gap", 6, rest[0]["sequence"] - 1)
    assert [frame["sequence"] for frame in rest] == list(range(gap["last"] + 1, 101))
    assert 1 < len(rest) < 50


async def test_a_cursor_of_an_earlier_server_is_a_gap(site: Site) -> None:
    site.client.emit(batch(1))
    for cursor in ("abcd1234-1", "7"):
        _, gap, first = await site.read(f"follow=false&after={cursor}")
        assert (gap["event"], gap["reason"]) == ("gap", "the cursor is of another instance")
        assert first["sequence"] == 1


async def test_events_come_as_they_happen_until_the_reader_leaves(site: Site) -> None:
    received: list[str] = []

    async def read() -> None:
        async with site.http.stream("GET", "/kv_events") as answer:
            async for text in answer.aiter_text():
                received.append(text)

    reader = asyncio.create_task(read())
    await until(lambda: bool(received))
    for number in range(1, 4):
        site.client.emit(batch(number))
        await until(lambda number=number: f'"sequence":{number}' in "".join(received))  # type: ignore[misc]
    assert site.endpoint._num_readers == 1
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await until(lambda: site.endpoint._num_readers == 0)
    assert not site.endpoint._feeds["fake"]._waiting


@pytest.mark.parametrize("site", [{"replay_bytes": 2**20}], indirect=True)
async def test_a_reader_that_does_not_read_holds_nothing_up(site: Site) -> None:
    """What it misses is a gap; what is kept for it does not grow."""
    feed = site.endpoint._feeds["fake"]
    reader, writer = await asyncio.open_connection("127.0.0.1", site.http.base_url.port)
    writer.write(f"GET /kv_events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode())
    await writer.drain()
    await until(lambda: site.endpoint._num_readers == 1)
    for number in range(1, 301):
        site.client.emit(batch(number, num_tokens=20_000))
        await asyncio.sleep(0)
    assert feed._num_bytes <= 2**20
    received = b""
    async with asyncio.timeout(20):
        while b'"sequence":300' not in received[-400_000:]:
            received += await reader.read(2**20)
    assert b"event: gap" in received
    writer.close()
    await until(lambda: site.endpoint._num_readers == 0)


@pytest.mark.parametrize("site", [{"max_readers": 1}], indirect=True)
async def test_readers_are_limited(site: Site) -> None:
    async with site.http.stream("GET", "/kv_events"):
        answer = await site.http.get("/kv_events")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert "1 readers follow the events" in answer.json()["error"]["message"]
        assert "plugins.endpoint.kv_events.max_readers" in answer.json()["error"]["message"]
    await until(lambda: site.endpoint._num_readers == 0)
    await site.read()


@pytest.mark.parametrize("site", [{"keepalive_s": 0.05}], indirect=True)
async def test_a_silent_stream_is_kept_open(site: Site) -> None:
    async with site.http.stream("GET", "/kv_events") as answer:
        async for text in answer.aiter_text():
            if ": keep-alive" in text:
                return


async def test_the_stream_ends_with_the_server_and_with_the_engine(site: Site) -> None:
    ending = asyncio.create_task(site.read("follow=true"))
    await until(lambda: site.endpoint._num_readers == 1)
    site.client.die("it broke")
    frames = await ending
    assert frames[-1]["error"]["code"] == "engine_dead"
    assert (await site.http.get("/kv_events")).status_code == 503
    site.client.dead_reason = None
    ending = asyncio.create_task(site.read("follow=true"))
    await until(lambda: site.endpoint._num_readers == 1)
    site.engines.draining = True
    assert [frame["event"] for frame in await ending] == ["start"]


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "after=%C2%B2", "after=99999999999999999999", "follow=maybe", "folow=0"]
)
async def test_what_means_nothing_is_refused(site: Site, query: str) -> None:
    answer = await site.http.get(f"/kv_events?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_only_admins_read_the_prompts_of_all(site: Site) -> None:
    for key, status in (("user-key", 403), ("wrong", 401)):
        answer = await site.http.get("/kv_events", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert (await site.http.get("/kv_events?model=late")).status_code == 503
    assert (await site.http.get("/kv_events?model=unknown")).status_code == 404


def test_a_hole_in_the_engines_numbers_is_a_gap() -> None:
    feed = EventFeed(2**20)
    for number in (1, 2, 5, 6):
        feed.add(batch(number))
    found = feed.after(2)
    assert found.lost == (3, 4)
    assert (len(found.frames), found.sequence) == (2, 6)
    assert feed.after(6) == type(found)((), 6)


def test_one_batch_is_always_kept() -> None:
    feed = EventFeed(4096)
    feed.add(batch(1, num_tokens=10_000))
    assert len(feed.after(0).frames) == 1


def test_portions_are_bounded() -> None:
    feed = EventFeed(2**20)
    for number in range(1, 201):
        feed.add(batch(number))
    sequence, sizes = 0, []
    while (found := feed.after(sequence)).frames:
        sizes.append(len(found.frames))
        sequence = found.sequence
    assert (sizes, sequence) == ([64, 64, 64, 8], 200)


def test_cursors() -> None:
    assert Cursor.parse("17") == Cursor(17)
    assert Cursor.parse("3f2a-17") == Cursor(17, "3f2a")
    with pytest.raises(InvalidRequestError, match="give the id of the last event"):
        Cursor.parse("3f2a-")


def test_it_needs_a_server_and_an_engine_that_tells() -> None:
    with pytest.raises(ConfigError, match="router"):
        create(EndpointContext("x", 1, frozenset({ProcessRole.API})), KVEventsOptions())
    facts = ServerFacts("0.1", 0, 1 << 20)
    context = EndpointContext("x", 1, frozenset({ProcessRole.API}), router=Engines(["fake"]), facts=facts)
    with pytest.raises(ConfigError, match="set --kv-events"):
        create(context, KVEventsOptions())
    told = EndpointContext(
        "x", 1, frozenset({ProcessRole.API}), router=Engines(["fake"]), facts=replace(facts, kv_events=True)
    )
    assert create(told, KVEventsOptions()).access == "admin"
