"""From request bodies to the engine's records. Absent means default; what values may be is the engine's to say."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import EngineClient, Prompt, RequestOptions
from hardpoint.interfaces.request import OutputKind, SamplingParams
from hardpoint_serving.openai.protocol import OFF_VALUES, ChatRequest, CompletionRequest, GenerationRequest, Message
from hardpoint_serving.prompts import read_prompts

__all__ = [
    "Identity",
    "chat_messages",
    "chat_sampling",
    "completion_prompts",
    "completion_sampling",
    "in_request_terms",
    "refuse_unsupported",
    "request_options",
    "template_arguments",
]

_COMPLETION_MAX_TOKENS = 16
_NULL = msgspec.Raw(b"null")
_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What every chunk of one answer repeats. ``id`` is ours: a client's own id never gets here."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str) -> Identity:
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model, fingerprint)


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raise ``InvalidRequestError`` naming the first field that asks for something this endpoint does not do."""
    if isinstance(request, ChatRequest) and _plain(request, "chat_template") is not None:
        # A template is a program: only the operator chooses one.
        raise InvalidRequestError("chat_template cannot be set by a request", param="chat_template", code="not_allowed")
    if isinstance(request, ChatRequest) and request.add_special_tokens:
        fault = "add_special_tokens is not supported for chats: the template decides about special tokens"
        raise InvalidRequestError(fault, param="add_special_tokens", code="unsupported")
    for name, allowed in OFF_VALUES.items():
        if _plain(request, name) not in allowed:
            raise InvalidRequestError(f"{name} is not supported yet", param=name, code="unsupported")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")


def _plain(request: GenerationRequest, name: str) -> Any:
    """The value of a field kept as JSON text, which nothing has looked into before."""
    text = bytes(getattr(request, name, _NULL))
    # Values that could be "off" are short; anything long asks for something.
    if len(text) >= 64:
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError):
        raise InvalidRequestError(f"{name} is not a valid JSON value", param=name, code="invalid_value") from None


def _sampling(request: GenerationRequest, **more: Any) -> SamplingParams:
    given = {name: getattr(request, name) for name in _FIELDS if getattr(request, name) is not None}
    stop = request.stop
    return SamplingParams(
        n=1 if request.n is None else request.n,
        top_k=0 if request.top_k in (None, -1) else request.top_k,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        output_kind=OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY,
        **given,
        **more,
    )


def chat_sampling(request: ChatRequest) -> SamplingParams:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ; set one of them", param="max_tokens", code="invalid_value"
        )
    return _sampling(
        request, max_tokens=next(iter(limits), None), logprobs=(request.top_logprobs or 0) if request.logprobs else None
    )


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    n = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != n:
        raise InvalidRequestError("best_of must equal n", param="best_of", code="unsupported")
    return _sampling(
        request,
        max_tokens=_COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


def in_request_terms(error: InvalidRequestError, request: GenerationRequest) -> InvalidRequestError:
    """The engine's refusal with the names of the fields the client sent."""
    names = {"timeout_s": "timeout"}
    if isinstance(request, ChatRequest):
        names["prompt"] = "messages"
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    theirs = names.get(error.param or "")
    if theirs is None or error.param is None:
        return error
    message = str(error) if theirs == "messages" else str(error).replace(error.param, theirs)
    return InvalidRequestError(message, param=theirs, code=error.code, status=error.status)


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain dictionaries for the renderer. Raises ``InvalidRequestError`` for no messages and for other than text."""
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages", code="empty_prompt")
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.type not in ("text", "input_text", "output_text", "refusal"):
                raise InvalidRequestError(
                    f"content of type {part.type[:40]!r} is not supported yet", param="messages", code="unsupported"
                )
            if part.text is None:
                raise InvalidRequestError("a text part has no text", param="messages", code="invalid_value")
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"content": None, **msgspec.to_builtins(message)}
    if isinstance(message.content, list):
        plain["content"] = [{"type": "text", "text": part.text} for part in message.content]
    return plain


def template_arguments(request: ChatRequest, allowed: Iterable[str]) -> dict[str, Any] | None:
    """The request's template arguments. Only listed keys with plain values pass: templates are programs (class 39)."""
    for key, value in (request.chat_template_kwargs or {}).items():
        if key not in allowed:
            raise InvalidRequestError(
                f"chat_template_kwargs may only hold {', '.join(sorted(allowed)) or 'nothing'} here",
                param="chat_template_kwargs",
                code="not_allowed",
            )
        if not isinstance(value, str | int | float | bool | None) or (isinstance(value, str) and len(value) > 256):
            raise InvalidRequestError(
                f"chat_template_kwargs.{key} must be a short plain value", param="chat_template_kwargs"
            )
    return request.chat_template_kwargs


def completion_prompts(request: CompletionRequest, client: EngineClient) -> list[Prompt]:
    """One prompt per text or list of ids."""
    return read_prompts(
        request.prompt,
        client,
        param="prompt",
        n=1 if request.n is None else request.n,
        add_special_tokens=request.add_special_tokens is not False,
        cache_salt=request.cache_salt,
    )


def request_options(
    request: GenerationRequest, *, max_priority: int, ceiling_s: float | None, external_id: str | None, tenant: str = ""
) -> RequestOptions:
    """``priority`` is bounded by the operator, ``timeout`` by the server's own; the engine checks ``tenant``."""
    priority = request.priority or 0
    if abs(priority) > max_priority:
        raise InvalidRequestError(
            f"priority is {priority}; it must be from {-max_priority} to {max_priority}",
            param="priority",
            code="invalid_value",
        )
    timeout = request.timeout
    if ceiling_s is not None and (timeout is None or timeout > ceiling_s):
        timeout = ceiling_s
    return RequestOptions(priority=priority, timeout_s=timeout, external_id=external_id, tenant=tenant)
