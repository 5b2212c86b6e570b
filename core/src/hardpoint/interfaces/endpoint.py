"""Plugin kind ``endpoint``: HTTP routes on the API process. Denied unless allow-listed in ``server.endpoints``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from hardpoint.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError, OverloadedError
from hardpoint.interfaces.engine import EngineClient, ModelRouter
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.stat_logger import MetricsExporter
from hardpoint.plugins.report import LoadReport

if TYPE_CHECKING:
    from fastapi import APIRouter


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Fixed facts endpoints may report. ``created`` is the start time in Unix seconds.

    ``request_timeout_s`` is the operator's ceiling on the time of one request, None without one; ``kv_events`` tells
    whether every engine is going to tell of its KV cache, which takes the setting and a prefix cache.
    """

    version: str
    created: int
    max_body_bytes: int
    endpoints: tuple[str, ...] = ()
    request_timeout_s: float | None = None
    kv_events: bool = False


_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """What a client is told about a failed request. ``headers`` are added to the response."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The ``type`` of the OpenAI error form."""
        return _KINDS.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, object]:
        """The OpenAI error form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def describe_failure(error: Exception) -> RequestFailure:
    """The client's view of ``error``. Texts are fixed unless written for clients; anything unforeseen is a bare 500."""
    if isinstance(error, InvalidRequestError):
        return RequestFailure(error.status, str(error), error.param, error.code)
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        return RequestFailure(429, "too many requests are waiting; retry later", None, "overloaded", retry)
    if isinstance(error, EngineNotReadyError):
        return RequestFailure(503, "the model is not ready; retry later", None, "not_ready", {"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return RequestFailure(503, "the engine has stopped; the request was not completed", None, "engine_dead")
    return RequestFailure(500, "internal error", None, "internal_error")


@dataclass(frozen=True, slots=True)
class EndpointContext(PluginContext):
    """``exporters`` are the scrapeable stat loggers; ``is_draining`` tells whether shutdown has begun.

    ``load_report`` is the state of plugins in this process, now; None outside a server.
    """

    router: ModelRouter | None = None
    facts: ServerFacts | None = None
    exporters: Sequence[MetricsExporter] = ()
    is_draining: Callable[[], bool] = field(default=lambda: False)
    load_report: Callable[[], LoadReport] | None = None


class Endpoint(ABC):
    """Routes need the key unless listed in the shell's own two probe paths; an endpoint cannot open one.

    Handlers raise ``InvalidRequestError``, ``OverloadedError``, ``EngineDeadError``, ``EngineNotReadyError``; the shell
    turns them into the error form. A route that may collide with another endpoint's refuses the start, whatever its
    parameters are called or take; each route names its methods, and GET claims HEAD as well.

    ``access`` says which keys open the routes: ``"admin"`` ones take an admin key only, and a server without any admin
    key refuses to start with such an endpoint.
    """

    access: ClassVar[Literal["api", "admin"]] = "api"

    @abstractmethod
    def routes(self) -> APIRouter:
        """HTTP routes alone, each of named methods. Asked for once: routes added later are not served."""

    def error_body(self, failure: RequestFailure) -> Mapping[str, object]:
        """JSON body of an error on this endpoint's routes; the OpenAI form by default."""
        return failure.body

    async def start(self) -> None:
        """Application start."""

    def engine_started(self, client: EngineClient) -> None:
        """A model's engine is loaded and has served nobody yet: the next moment ``client`` is in the router."""

    async def stop(self) -> None:
        """Application end; open streams are already closed. Given up after a few seconds."""
