"""Request bodies of the OpenAI routes. Types only: what values may be is decided by the engine's one validator.

A field that is not listed here is refused by name. Fields of :data:`Raw` are those that are accepted and have no effect
here, or that are refused unless they say "off" (see :data:`OFF_VALUES`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Raw

__all__ = ["OFF_VALUES", "ChatRequest", "CompletionRequest", "GenerationRequest", "Message", "StreamOptions"]

_NULL = Raw(b"null")
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "kv_transfer_params": (None,),
    "use_beam_search": (None, False),
    "continue_final_message": (None, False),
    "suffix": (None, ""),
}
"""Values of fields not supported yet that ask for nothing; any other value is a 400 that names the field."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """``include_usage``: one last chunk with the usage; ``continuous_usage_stats``: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message. Only text is read; the type of any other is named when it is refused."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. Roles are a closed list, since templates write them between control tokens."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both generating routes take."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    # Refused unless off.
    response_format: Raw = _NULL
    structured_outputs: Raw = _NULL
    bad_words: Raw = _NULL
    prompt_logprobs: Raw = _NULL
    kv_transfer_params: Raw = _NULL
    use_beam_search: Raw = _NULL

    # Without effect: they are about accounts, storage or speed elsewhere, never about the tokens.
    user: Raw = _NULL
    metadata: Raw = _NULL
    store: Raw = _NULL
    service_tier: Raw = _NULL
    safety_identifier: Raw = _NULL
    prompt_cache_key: Raw = _NULL
    prompt_cache_retention: Raw = _NULL


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Raw = _NULL
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    functions: Raw = _NULL
    function_call: Raw = _NULL
    modalities: Raw = _NULL
    audio: Raw = _NULL
    web_search_options: Raw = _NULL
    reasoning_effort: Raw = _NULL
    continue_final_message: Raw = _NULL

    parallel_tool_calls: Raw = _NULL
    prediction: Raw = _NULL
    verbosity: Raw = _NULL


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``. ``prompt`` is a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Raw = _NULL
