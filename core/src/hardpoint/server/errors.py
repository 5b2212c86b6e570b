"""Every error as one JSON form with a fixed, client-safe text. Tracebacks and paths stay in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hardpoint.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError, OverloadedError
from hardpoint.interfaces.endpoint import Endpoint

__all__ = ["Failure", "default_body", "describe", "install_handlers"]

_logger = logging.getLogger("hardpoint.server")
_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told. ``headers`` are added to the response."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def kind(self) -> str:
        if self.status in _KINDS:
            return _KINDS[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"


def default_body(failure: Failure) -> dict[str, Any]:
    """The OpenAI form, used wherever no endpoint is responsible."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code or failure.status,
        }
    }


def describe(error: Exception) -> Failure:
    """What to tell a client about ``error``. Anything not raised on purpose is a plain 500."""
    if isinstance(error, InvalidRequestError):
        return Failure(error.status, str(error), error.param, error.code)
    if isinstance(error, OverloadedError):
        retry = {"Retry-After": str(max(1, round(error.retry_after_s)))}
        return Failure(429, str(error), code="overloaded", headers=retry)
    if isinstance(error, EngineNotReadyError):
        return Failure(503, "the model is not ready; retry later", code="not_ready", headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return Failure(503, "the engine has stopped; the request was not completed", code="engine_dead")
    if isinstance(error, RequestValidationError):
        return _validation(error)
    if isinstance(error, HTTPException):
        text = {404: "no such route", 405: "this route does not take that method"}.get(error.status_code)
        return Failure(error.status_code, text or str(error.detail))
    return Failure(500, "internal error", code="internal_error")


def install_handlers(app: FastAPI, owners: Mapping[Callable[..., Any], Endpoint]) -> None:
    """Answer every exception in the form of the endpoint that owns the route."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        failure = describe(error)
        if failure.status == 500:
            _logger.error("request failed", exc_info=error)
        owner = owners.get(request.scope.get("endpoint"))  # type: ignore[arg-type]
        if owner is None:
            body: dict[str, Any] = default_body(failure)
        else:
            body = owner.error_body(failure.message, failure.kind, failure.param, failure.code, failure.status)
        return JSONResponse(body, failure.status, dict(failure.headers or {}))

    for kind in (InvalidRequestError, OverloadedError, EngineNotReadyError, EngineDeadError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RequestValidationError, handle)
    app.add_exception_handler(HTTPException, handle)
    app.add_exception_handler(Exception, handle)


def _validation(error: RequestValidationError) -> Failure:
    """The first fault, named by its field; values are not echoed."""
    faults = error.errors()
    if not faults:
        return Failure(400, "the request body is invalid")
    first = faults[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] in ("json_invalid", "model_attributes_type", "dict_type"):
        return Failure(400, "the request body is not a JSON object", code="invalid_json")
    field = ".".join(path)
    return Failure(400, f"{field}: {first['msg']}" if field else str(first["msg"]), field or None, "invalid_value")
