"""Plugin kind ``endpoint``: HTTP routes on the API process. Denied unless allow-listed in ``server.endpoints``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hardpoint.interfaces.engine import ModelRouter
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.stat_logger import MetricsExporter

if TYPE_CHECKING:
    from fastapi import APIRouter


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Fixed facts endpoints may report. ``created`` is the start time in Unix seconds."""

    version: str
    created: int
    max_body_bytes: int
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EndpointContext(PluginContext):
    """``exporters`` are the scrapeable stat loggers; ``is_draining`` tells whether shutdown has begun."""

    router: ModelRouter | None = None
    facts: ServerFacts | None = None
    exporters: Sequence[MetricsExporter] = ()
    is_draining: Callable[[], bool] = field(default=lambda: False)


class Endpoint(ABC):
    """Routes need the key unless listed in the shell's own two probe paths; an endpoint cannot open one.

    Handlers raise ``InvalidRequestError``, ``OverloadedError``, ``EngineDeadError``, ``EngineNotReadyError``; the shell
    turns them into the error form. A route that collides with another endpoint's refuses the start.
    """

    @abstractmethod
    def routes(self) -> APIRouter: ...

    def error_body(
        self, message: str, kind: str, param: str | None, code: str | None, status: int
    ) -> dict[str, object]:
        """JSON body of an error on this endpoint's routes; the OpenAI form by default."""
        return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}

    async def start(self) -> None:
        """Application start."""

    async def stop(self) -> None:
        """Application end; open streams are already closed."""
