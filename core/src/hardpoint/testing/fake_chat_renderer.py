"""A chat renderer without a template: ``<role>text``, one line a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.interfaces.chat_renderer import ChatRenderer
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.testing.fake_tokenizer import FakeTokenizer

__all__ = ["FakeChatRenderer"]


class FakeChatRenderer(ChatRenderer):
    """Any role and every text will do; template arguments are written behind the messages as ``[key=value]``."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer or FakeTokenizer()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        texts = ["\n".join(part["text"] for part in message["content"]) for message in messages]
        lines = [f"<{message['role']}>{text}\n" for message, text in zip(messages, texts, strict=True)]
        lines += [f"[{key}={value}]" for key, value in (template_arguments or {}).items()]
        whole = "".join(lines) + ("<assistant>" if add_generation_prompt else "")
        return whole, self._tokenizer.encode(whole, add_special_tokens=False, parse_special=False)
