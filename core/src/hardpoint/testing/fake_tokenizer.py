"""A byte-level tokenizer: id = byte + 3; 0 is padding, 1 begins, 2 ends."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hardpoint.interfaces.tokenizer import DecodeStream, Tokenizer

_OFFSET = 3
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class _Utf8Stream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str | None:
        if not _OFFSET <= token_id < _OFFSET + 256:
            return None
        return self._decoder.decode(bytes([token_id - _OFFSET])) or None


class FakeTokenizer(Tokenizer):
    """Every text round-trips; characters beyond ASCII span several tokens."""

    @property
    def vocab_size(self) -> int:
        return 256 + _OFFSET

    @property
    def bos_token_id(self) -> int | None:
        return 1

    @property
    def eos_token_id(self) -> int | None:
        return 2

    @property
    def chat_template(self) -> str | None:
        return _TEMPLATE

    @property
    def special_tokens(self) -> dict[str, str]:
        return {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        ids = [byte + _OFFSET for byte in text.encode()]
        return [1, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in token_ids).decode("utf-8", "replace")

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        return _Utf8Stream()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - _OFFSET]) if _OFFSET <= token_id < _OFFSET + 256 else b""
