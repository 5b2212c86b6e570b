"""What stands in the file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from json_lines_stats import JsonLines, Options, percentiles

from hardpoint.interfaces import FinishReason, RequestFinished, TokensEmitted


def finished(model: str) -> RequestFinished:
    return RequestFinished(
        request_id="a",
        model=model,
        reason=FinishReason.STOP,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_generated_tokens=2,
        e2e_s=0.5,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stats.jsonl"


@pytest.fixture
def logger(path: Path) -> JsonLines:
    return JsonLines(Options(path=path, max_samples=4), logging.getLogger("hardpoint.test"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_model_and_interval(logger: JsonLines, path: Path) -> None:
    for model in ("a", "b", "a"):
        logger.on_finished(finished(model))
    logger.flush()
    logger.on_finished(finished("a"))
    logger.flush()
    assert [(line["model"], line["requests"]) for line in lines(path)] == [("a", 2), ("b", 1), ("a", 1)]


def test_latencies_are_bounded(logger: JsonLines, path: Path) -> None:
    logger.on_tokens(TokensEmitted("a", ttft_s=(0.1,), inter_token_s=tuple(0.01 * i for i in range(50))))
    logger.flush()
    (line,) = lines(path)
    assert line["ttft_s"] is None
    assert line["inter_token_s"]["p99"] < 0.1


def test_an_idle_interval_writes_nothing(logger: JsonLines, path: Path) -> None:
    logger.flush()
    assert not path.exists()


def test_percentiles() -> None:
    assert percentiles([1.0]) is None
    found = percentiles([1.0, 2.0, 3.0])
    assert found is not None
    assert found["p50"] == 2.0
    assert found["p99"] >= 3.0
