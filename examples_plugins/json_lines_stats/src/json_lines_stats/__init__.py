"""A stat logger that appends one JSON object per interval and model to a file.

Events only count; the file is touched once per interval, since the logger runs on the front end's event loop.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces import PluginContext, RequestFinished, StatLogger, StepObserved, TokensEmitted, plugin


class Options(BaseModel):
    """Options under ``plugins.stat_logger.json_lines``. Without a file nothing is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = Field(
        default=None, description="file that objects are appended to", json_schema_extra={"flag": "--stats-file"}
    )
    max_samples: int = Field(default=2_000, ge=1, description="latencies kept per interval and model")


@dataclass(slots=True)
class Window:
    """What happened since the last line. Latencies in seconds."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


class JsonLines(StatLogger):
    def __init__(self, options: Options, logger: logging.Logger) -> None:
        self._options = options
        self._logger = logger
        self._windows: dict[str, Window] = {}

    def on_step(self, event: StepObserved) -> None:
        window = self._window(event.model)
        window.num_prompt_tokens += event.num_prompt_tokens
        window.num_generated_tokens += event.num_generated_tokens
        window.num_running, window.num_waiting = event.stats.num_running, event.stats.num_waiting

    def on_tokens(self, event: TokensEmitted) -> None:
        window = self._window(event.model)
        for kept, new in ((window.ttft_s, event.ttft_s), (window.inter_token_s, event.inter_token_s)):
            kept.extend(new[: self._options.max_samples - len(kept)])

    def on_finished(self, event: RequestFinished) -> None:
        self._window(event.model).num_requests += 1

    def flush(self) -> None:
        windows, self._windows = self._windows, {}
        lines = [json.dumps(self._line(model, window)) for model, window in windows.items()]
        path = self._options.path
        if path is None or not lines:
            return
        try:
            with path.open("a", encoding="utf-8") as stream:
                stream.write("\n".join(lines) + "\n")
        except OSError as error:
            # A full disk costs statistics, never requests: the logger goes on and says so once per interval.
            self._logger.warning("%s: %d lines are lost: %s", path, len(lines), error.strerror)

    def _window(self, model: str) -> Window:
        return self._windows.setdefault(model, Window())

    def _line(self, model: str, window: Window) -> dict[str, object]:
        return {
            "time": round(time.time(), 3),
            "model": model,
            "requests": window.num_requests,
            "prompt_tokens": window.num_prompt_tokens,
            "generated_tokens": window.num_generated_tokens,
            "running": window.num_running,
            "waiting": window.num_waiting,
            "ttft_s": percentiles(window.ttft_s),
            "inter_token_s": percentiles(window.inter_token_s),
        }


def percentiles(samples: list[float]) -> dict[str, float] | None:
    """Median and 99th percentile, or ``None`` where there is too little to tell."""
    if len(samples) < 2:
        return None
    cuts = quantiles(samples, n=100)
    return {"p50": round(cuts[49], 6), "p99": round(cuts[98], 6)}


@plugin("stat_logger", options=Options)
def create(ctx: PluginContext, options: Options) -> StatLogger:
    return JsonLines(options, ctx.logger)
