"""Chat renderer ``jinja``: the model's own template, with user text that spells control tokens kept as text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.chat_renderer import ChatRenderer, ChatRendererContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint_model_io.chat.messages import normalize_messages
from hardpoint_model_io.chat.template import ChatTemplate

_RESERVED = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})
# Supplementary private use plane: characters no tokenizer or client has a meaning for.
_PRIVATE_FIRST, _PRIVATE_SIZE = 0xF0000, 0xFFF0


class JinjaRenderer(ChatRenderer):
    """Renders with the model's template, or the one given. Thread-safe; a rendering takes up to two seconds.

    ``max_chars`` bounds the rendered text before anything is encoded (None: no bound).
    Raises ``ModelFormatError`` for a template that cannot be compiled.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, max_chars: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_chars = max_chars
        source = template if template is not None else tokenizer.chat_template
        self._template = None if source is None else ChatTemplate(source)
        self._special = tokenizer.special_tokens
        literals = sorted(filter(None, tokenizer.control_tokens), key=len, reverse=True)
        self._first_characters = frozenset(literal[0] for literal in literals)
        self._literals = re.compile(f"({'|'.join(map(re.escape, literals))})") if literals else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt's text and ids. ``template_arguments`` are further template variables (``tools`` and the like).

        Raises ``InvalidRequestError`` for messages or arguments that cannot be rendered, or are too long.
        """
        if self._template is None:
            fault = "this model has no chat template: give one with --chat-template-file, or use plain completions"
            raise InvalidRequestError(fault, param="messages")
        given = dict(template_arguments or {})
        if clash := (_RESERVED | self._special.keys()) & given.keys():
            raise InvalidRequestError(f"the template argument {min(clash)!r} is reserved", param=min(clash))
        variables = {"tools": None, "documents": None, **given}
        structured = self._template.is_structured
        variables["messages"] = [_as_expected(message, structured) for message in normalize_messages(messages)]
        fixed = {**self._special, "add_generation_prompt": add_generation_prompt}
        text = self._template.render({**variables, **fixed})
        self._check_text(text)
        if (cleaned := self._without_injection(self._template, text, variables, fixed)) is not None:
            return cleaned
        return text, self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    def _check_text(self, text: str) -> None:
        if self._max_chars is not None and len(text) > self._max_chars:
            raise InvalidRequestError(
                f"the rendered messages have {len(text)} characters; "
                f"at most {self._max_chars} are allowed for this model's context length",
                param="messages",
                code="context_length_exceeded",
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the messages hold unpaired surrogates, which are not text", param="messages"
            ) from None

    def _without_injection(
        self, template: ChatTemplate, text: str, variables: Mapping[str, Any], fixed: Mapping[str, Any]
    ) -> tuple[str, list[int]] | None:
        """Text and ids with control tokens from the template only; None if there are no others.

        Every character in the caller's data that could begin a control token is exchanged for a private one. What
        still reads as a control token after rendering is the template's own; the rest is text, however it came about.
        """
        used: set[str] = set()

        def collect(value: str) -> str:
            used.update(value)
            return value

        _map_strings(variables, collect)
        openers = self._first_characters & used
        if self._literals is None or not openers:
            return None
        shield, restore = _private_characters(openers, used | set(text))
        shielded = _map_strings(variables, lambda value: value.translate(shield))
        rendered = template.render({**shielded, **fixed})
        if self._literals.findall(rendered) == self._literals.findall(text):
            return None
        ids: list[int] = []
        for index, piece in enumerate(self._literals.split(rendered)):
            # Splitting by a group puts what it matched at the odd places.
            is_control = index % 2 == 1
            if piece:
                piece = piece if is_control else piece.translate(restore)
                ids += self._tokenizer.encode(piece, add_special_tokens=False, parse_special=is_control)
        return rendered.translate(restore), ids


def _as_expected(message: dict[str, Any], structured: bool) -> dict[str, Any]:
    """The message with ``content`` in the form that the template reads: typed parts, or one text."""
    parts = message["content"]
    if structured and parts:
        return message
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every text, keys included, passed through ``change``."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _private_characters(characters: frozenset[str], used: set[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Translation tables to private characters that do not occur in ``used``, and back."""
    forward: dict[int, int] = {}
    for character in characters:
        candidate = _PRIVATE_FIRST + secrets.randbelow(_PRIVATE_SIZE)
        while chr(candidate) in used or candidate in forward.values():
            candidate = _PRIVATE_FIRST + (candidate - _PRIVATE_FIRST + 1) % _PRIVATE_SIZE
        forward[ord(character)] = candidate
    return forward, {private: original for original, private in forward.items()}


@plugin("chat_renderer", options=NoOptions)
def create(ctx: ChatRendererContext, options: NoOptions) -> ChatRenderer:
    return JinjaRenderer(ctx.tokenizer, ctx.template, max_chars=ctx.max_chars)
