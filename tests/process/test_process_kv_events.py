"""KV cache events of a real server: what a router rebuilds from the stream is what the engine says it has cached."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from server_process import PATIENCE, ServerProcess, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 * PATIENCE)]

ADMIN_KEY = "admin-key-of-ours"
HEADERS = {"authorization": f"Bearer {ADMIN_KEY}"}
ENDPOINTS = ("--endpoints", "openai,ops,admin,kv_events", "--admin-key", ADMIN_KEY)
FEW_BLOCKS = ("--num-kv-blocks", "24", "--block-size", "16", "--max-model-len", "128")


def batches(server: ServerProcess, after: str = "0") -> list[dict[str, Any]]:
    """Every frame kept, the start frame left out."""
    answer = server.http.get(f"/kv_events?follow=false&after={after}", headers=HEADERS)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in data[1:]]


def rebuilt(frames: list[dict[str, Any]]) -> set[str]:
    cached: set[str] = set()
    for frame in frames:
        for event in frame["events"]:
            if event["type"] == "cleared":
                cached.clear()
            elif event["type"] == "removed":
                assert set(event["block_hashes"]) <= cached
                cached -= set(event["block_hashes"])
            else:
                assert not set(event["block_hashes"]) & cached
                assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
                cached |= set(event["block_hashes"])
    return cached


def metric(server: ServerProcess, name: str) -> float:
    text = server.http.get("/metrics", headers=HEADERS).text
    found = re.search(rf"^hardpoint_{name}{{.*}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_the_stream_of_a_busy_server_rebuilds_its_index(tiny: Path) -> None:
    """I3.3 across processes: evictions, a reset, and a weak hash with its one warning (R11.10)."""
    flags = ("--kv-events", "--hash-algorithm", "xxhash", *FEW_BLOCKS, *ENDPOINTS)
    with serving(tiny, *flags) as server:
        for number in range(12):
            server.complete(prompt=[1 + (number * 7 + i) % 90 for i in range(70)], max_tokens=20)
        until(server.is_idle, 10, "the server is idle")
        frames = batches(server)
        assert [frame["sequence"] for frame in frames] == list(range(1, len(frames) + 1))
        cached = rebuilt(frames)
        until(lambda: metric(server, "kv_cache_num_prefixes") == len(cached), 5, "metrics tell the prefixes")
        removed = sum(len(e["block_hashes"]) for f in frames for e in f["events"] if e["type"] == "removed")
        assert metric(server, "kv_cache_evictions_total") >= removed > 0
        assert {len(block_hash) for block_hash in cached} == {32}, "128 bits, in hex"
        answer = server.http.post("/admin/reset_prefix_cache", headers=HEADERS)
        assert answer.json() == {"reset": {"served": True}}
        until(lambda: rebuilt(batches(server)) == set(), 5, "the reset is told")
        assert batches(server, str(frames[-1]["sequence"]))[0]["events"] == [{"type": "cleared"}]
        assert server.log().count("is not cryptographic") == 1


def test_equal_servers_tell_equal_hashes(tiny: Path) -> None:
    """R11.8, I11.5: with the default algorithm a router may compare the hashes of several servers."""
    found = []
    for _ in range(2):
        with serving(tiny, "--kv-events", *FEW_BLOCKS, *ENDPOINTS) as server:
            server.complete(prompt=list(range(1, 40)), max_tokens=2)
            until(lambda server=server: rebuilt(batches(server)), 5, "blocks are told")  # type: ignore[misc]
            found.append(rebuilt(batches(server)))
    assert found[0] == found[1]


def test_the_endpoint_needs_an_engine_that_collects_events(tiny: Path) -> None:
    server = ServerProcess(tiny, *FEW_BLOCKS, *ENDPOINTS)
    try:
        assert server.wait(120) != 0
        assert "set --kv-events" in server.log() + server.output()
    finally:
        server.close()
