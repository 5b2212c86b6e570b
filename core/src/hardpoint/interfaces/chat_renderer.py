"""Plugin kind ``chat_renderer``: turns a conversation into the prompt that its model was trained to read.

Every chat goes through the one that ``--chat-renderer`` names; it is created once, in the API process. The core bounds
and copies messages before, with the same rules for every renderer, so a renderer gets plain data of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRendererContext(PluginContext):
    """The model whose conversations are rendered.

    ``template`` is the operator's template (the text of ``--chat-template-file``), which goes before the tokenizer's
    own. A text of more than ``max_chars`` characters has no place in the model's context and is not worth encoding.
    A factory raises ``ModelFormatError`` for a template that it cannot use.
    """

    tokenizer: Tokenizer
    model: ModelInfo
    template: str | None
    max_chars: int


class ChatRenderer(ABC):
    """One instance serves all chats, on several threads at the same time. A rendering may take up to two seconds."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt's text and ids. Messages and arguments are JSON-like, nested at most 100 levels, and not changed.

        A message is what the client sent, in the form of the OpenAI API, null fields left out: ``role``, ``content``
        (absent, a text, or a list of texts and of parts such as ``{"type": "text", "text": ...}``), ``tool_calls``
        (``function.arguments`` is mostly JSON text) and the like. None of it has been judged, and there may be more.
        ``template_arguments`` are what a request sets beyond messages (``tools`` and the like). Text of the client that
        spells a control token stays text: encode it with ``parse_special=False``.

        Raises ``InvalidRequestError`` for what it cannot take, with the code ``context_length_exceeded`` for a prompt
        that is too long.
        """
