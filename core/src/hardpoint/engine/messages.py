"""What front end and engine process say to each other. Tagged structs, so one decoder serves each direction."""

from __future__ import annotations

from typing import Any

import msgspec

from hardpoint.interfaces.request import EngineOutputs, EngineRequest


class Add(msgspec.Struct, frozen=True, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: list[str]


class Utility(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    client_index: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """``drain``: live requests may finish within ``timeout_s``; otherwise they are aborted at once."""

    drain: bool
    timeout_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """``tasks`` are what the loaded model can do."""

    tasks: tuple[str, ...]


class StartupFailed(msgspec.Struct, frozen=True, tag=True):
    """``kind`` is the exception's class name; it is raised again in the front end if it is one of ours."""

    kind: str
    message: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    batch: EngineOutputs


class UtilityResult(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    result: Any = None
    error: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent by the step loop itself, so its age says how long the loop has not advanced."""

    num_steps: int


class Dead(msgspec.Struct, frozen=True, tag=True):
    reason: str


ToEngine = Add | Abort | Utility | Shutdown
FromEngine = Ready | StartupFailed | Outputs | UtilityResult | Heartbeat | Dead
