"""A chat renderer without a template: ``<role>text``, one line a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import InvalidRequestError
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
        lines = [f"<{message['role']}>{_text(message.get('content'))}\n" for message in messages]
        lines += [f"[{key}={value}]" for key, value in (template_arguments or {}).items()]
        whole = "".join(lines) + ("<assistant>" if add_generation_prompt else "")
        return whole, self._tokenizer.encode(whole, add_special_tokens=False, parse_special=False)


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [content or ""]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("the fake renderer takes text only", param="messages")
    return "\n".join(texts)
