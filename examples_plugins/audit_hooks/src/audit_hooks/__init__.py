"""An audit trail: one line of JSON for every request that comes and goes, and for every process that starts and stops.

Prompts and answers are not written, only their lengths: an audit file must not become a second place to protect.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineOutput, EngineRequest, PluginContext, ProcessRole, plugin
from hardpoint.interfaces.hooks import hookimpl


class Options(BaseModel):
    """Options under ``plugins.hooks.audit``. Without a file nothing is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path | None = Field(
        default=None, description="file that lines are appended to", json_schema_extra={"flag": "--audit-file"}
    )


class Audit:
    """Every process has its own instance; all of them append to one file, each line with a single write."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._roles: list[str] = []
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"the audit file {str(path)!r} cannot be written: its folder does not exist")

    @hookimpl
    def process_started(self, roles: Set[ProcessRole], rank: int | None) -> None:
        self._roles = sorted(roles)
        self._write("process_started", rank=rank)

    @hookimpl
    def process_stopping(self) -> None:
        self._write("process_stopping")

    @hookimpl
    def request_added(self, request: EngineRequest) -> None:
        self._write(
            "request_added",
            request_id=request.request_id,
            tenant=request.tenant,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    # Last of all observers: what it writes is what the others have let pass.
    @hookimpl(trylast=True)
    def request_finished(self, output: EngineOutput) -> None:
        self._write("request_finished", request_id=output.request_id, reason=str(output.finish_reason))

    def _write(self, event: str, **fields: Any) -> None:
        if self._path is None:
            return
        line = {"time": round(time.time(), 3), "event": event, "pid": os.getpid(), "roles": self._roles, **fields}
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)


@plugin("hooks", options=Options)
def create(ctx: PluginContext, options: Options) -> Audit:
    return Audit(options.path)
