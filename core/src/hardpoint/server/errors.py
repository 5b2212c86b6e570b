"""Every error as one JSON form with a fixed, client-safe text. Tracebacks and paths stay in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hardpoint.errors import HardpointError
from hardpoint.interfaces.endpoint import Endpoint, RequestFailure, describe_failure

_logger = logging.getLogger("hardpoint.server")
_HTTP_TEXTS: Mapping[int, tuple[str, str]] = {
    400: ("the request cannot be understood", "bad_request"),
    404: ("there is no such route", "not_found"),
    405: ("this route does not take that method", "method_not_allowed"),
}


def describe(error: Exception) -> RequestFailure:
    """What to tell a client about ``error``, the web framework's own errors included."""
    if isinstance(error, RequestValidationError):
        return _validation(error)
    if isinstance(error, HTTPException):
        text, code = _HTTP_TEXTS.get(error.status_code, ("the request was refused", "refused"))
        return RequestFailure(error.status_code, text, None, code, dict(error.headers or {}))
    return describe_failure(error)


def install_handlers(app: FastAPI, owners: Mapping[Callable[..., Any], Endpoint]) -> None:
    """Answer every exception in the form of the endpoint that owns the route."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        failure = describe(error)
        if failure.code == "internal_error":
            _logger.error("request failed", exc_info=error)
        owner = owners.get(request.scope.get("endpoint"))  # type: ignore[arg-type]
        body = failure.body if owner is None else owner.error_body(failure)
        return JSONResponse(body, failure.status, dict(failure.headers))

    for kind in (HardpointError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _validation(error: RequestValidationError) -> RequestFailure:
    """The first fault, named by its field; values are not echoed."""
    faults = error.errors()
    if not faults:
        return RequestFailure(400, "the request is invalid", None, "invalid_value")
    first = faults[0]
    if first["type"] in ("json_invalid", "model_attributes_type", "dict_type"):
        return RequestFailure(400, "the request body is not a JSON object", None, "invalid_json")
    field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    message = f"{field}: {first['msg']}" if field else str(first["msg"])
    return RequestFailure(400, message, field or None, "invalid_value")
