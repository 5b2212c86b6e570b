"""Raw bytes against a live server: what no application code would see in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import time
from collections.abc import AsyncIterator

import pytest
import uvicorn

from hardpoint.server.protocol import MAX_BODY_PARTS, bounded_protocol
from hardpoint.server.run import HttpServer
from server_support import make_app

LIMIT = 65_536
GOOD = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app, _ = make_app()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=bounded_protocol(LIMIT), ws="none", lifespan="off", log_config=None)
    server = HttpServer(config)
    task = asyncio.create_task(server.serve([listener]))
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    await task


async def talk(port: int, *parts: bytes) -> bytes:
    """Send ``parts`` until the server hangs up, or all are sent; everything it answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
    answer = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(1.0):
            while data := await reader.read(65_536):
                answer += data
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def status_and_error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def alive(port: int) -> bool:
    return (await talk(port, GOOD[:-2] + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_headers_without_end_are_cut_off(port: int) -> None:
    """Class 41: one endless header value, never completed."""
    flood = (b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Big: ", *([b"x" * 16_384] * 64))
    assert status_and_error(await talk(port, *flood)) == (431, "headers_too_large")
    assert await alive(port)


async def test_many_headers_and_a_long_target_are_cut_off(port: int) -> None:
    many = (b"GET /live HTTP/1.1\r\n", *(b"X-%d: y\r\n" % number for number in range(20_000)))
    assert status_and_error(await talk(port, *many)) == (431, "headers_too_large")
    target = (b"GET /", *([b"x" * 16_384] * 8))
    assert status_and_error(await talk(port, *target)) == (431, "headers_too_large")
    assert await alive(port)


async def test_a_body_in_tiny_chunks_is_cut_off(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"1\r\nx\r\n" * 1024] * (MAX_BODY_PARTS // 1024 + 2)
    assert status_and_error(await talk(port, head, *chunks, b"0\r\n\r\n")) == (413, "body_too_large")
    assert await alive(port)


async def test_as_many_chunks_as_allowed_pass(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await talk(port, head, *([b"1\r\nx\r\n" * 100] * 10), b"0\r\n\r\n")
    assert answer.endswith(b'{"size":1000}')


async def test_a_large_body_before_a_second_request_is_no_header_flood(port: int) -> None:
    body = b"x" * 200_000
    head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await talk(port, head + body + GOOD[:20], GOOD[20:-2] + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
        b"NONSENSE\r\n\r\n",
        b"GET /live HTTP/9.9\r\n\r\n",
        b"GET /live HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET /live HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
async def test_what_is_no_http_gets_one_form_too(port: int, request_bytes: bytes) -> None:
    assert status_and_error(await talk(port, request_bytes)) == (400, "bad_request")
    assert await alive(port)


BAD_CHUNKS = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (GOOD + b"\0", [200]),
        (GOOD + GOOD + b"\0", [200, 200]),
        (GOOD + b"NONSENSE\r\n\r\n", [200]),
        (GOOD + BAD_CHUNKS % b"/echo", [200, 400]),
        (GOOD + GOOD + BAD_CHUNKS % b"/echo", [200, 200, 400]),
        # Answered by the application without reading the body.
        (BAD_CHUNKS % b"/live", [400]),
        (GOOD + BAD_CHUNKS % b"/live", [200, 400]),
    ],
)
async def test_whole_requests_are_answered_before_what_follows_is_refused(
    port: int, request_bytes: bytes, statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """In order, once each, and nothing is written behind the end of the connection."""
    begun = time.monotonic()
    answer = await talk(port, request_bytes)
    assert time.monotonic() - begun < 0.9, "the connection must end with the last answer"
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)] == statuses
    await asyncio.sleep(0.05)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert await alive(port)


async def test_upgrades_are_ignored(port: int) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    answer = await talk(port, GOOD[:-2] + upgrade + b"\r\n")
    assert b"101" not in answer.split(b"\r\n")[0]
    assert await alive(port)


async def test_mutated_requests_never_cause_a_server_error(port: int) -> None:
    generator = random.Random(0)
    seed = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n[[1]"
    for _ in range(60):
        data = bytearray(seed)
        for _ in range(generator.randint(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(bytes(data))
        writer.write_eof()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(0.1):
                answer = await reader.read(4096)
                assert not answer or not answer.split()[1].startswith(b"5"), (bytes(data), answer)
        writer.close()
    assert await alive(port)
