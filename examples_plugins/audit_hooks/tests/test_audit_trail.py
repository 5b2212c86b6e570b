"""The trail of a real run: who asked, what became of it, and nothing of what was said."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_hooks import Audit, Options, create

from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineOutput, EngineRequest, FinishReason, PluginContext, ProcessRole, SamplingParams

ENGINE = frozenset({ProcessRole.ENGINE})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def run_through(path: Path | None) -> None:
    audit = create(PluginContext("audit", 1, ENGINE), Options(path=path))
    request = EngineRequest(
        request_id="r-1",
        prompt_token_ids=np.arange(5, dtype=np.int32),
        sampling=SamplingParams(),
        tenant="acme",
        arrival_time=0.0,
    )
    audit.process_started(roles=ENGINE, rank=None)
    audit.request_added(request=request)
    audit.request_finished(output=EngineOutput("r-1", [7], FinishReason.STOP))
    audit.process_stopping()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_whole_story(path: Path) -> None:
    run_through(path)
    events = lines(path)
    assert [line["event"] for line in events] == [
        "process_started",
        "request_added",
        "request_finished",
        "process_stopping",
    ]
    assert all(line["pid"] == os.getpid() and line["roles"] == ["engine"] for line in events)
    assert events[1]["tenant"] == "acme"
    assert events[1]["num_prompt_tokens"] == 5
    assert events[2]["reason"] == "stop"


def test_the_file_is_the_operators_alone(path: Path) -> None:
    run_through(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_through(None)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder does not exist"):
        Audit(tmp_path / "none/audit.jsonl")
