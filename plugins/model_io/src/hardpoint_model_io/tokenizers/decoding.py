"""Bytes behind tokens, and incremental decoding of one sequence."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream as LibraryStream

# Prompt tokens that prime a stream: enough to complete any character and to know about a leading space.
_PRIMING_TOKENS = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class VocabularyKind(Enum):
    """How a vocabulary spells bytes: in a printable alphabet, as ``<0xNN>`` beside text, in ``##`` pieces, as text."""

    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte-fallback"
    WORD_PIECE = "word-piece"
    PLAIN = "plain"


@cache
def byte_alphabet() -> dict[int, str]:
    """Byte to printable character, as byte-level vocabularies spell them.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}


@cache
def _bytes_by_character() -> dict[str, int]:
    return {character: byte for byte, character in byte_alphabet().items()}


def spelled_bytes(token: str, kind: VocabularyKind) -> bytes:
    """Bytes an ordinary (not added) token stands for."""
    if kind is VocabularyKind.BYTE_LEVEL:
        table = _bytes_by_character()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return token.encode()
    if kind is VocabularyKind.BYTE_FALLBACK:
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()
    if kind is VocabularyKind.WORD_PIECE:
        return token.removeprefix("##").encode()
    return token.encode()


class Utf8Stream:
    """For byte-level vocabularies: text is the concatenation of the tokens' bytes, so a UTF-8 decoder is all it takes.

    Constant work per token whatever the model emits; invalid bytes become U+FFFD.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], prompt_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_ids[-_PRIMING_TOKENS:]:
            self._decoder.decode(token_bytes(token_id))

    def step(self, token_id: int) -> str | None:
        return self._decoder.decode(self._token_bytes(token_id)) or None


class RecoveringStream:
    """The library's stream, which an unexpected sequence of bytes can bring out of step.

    R6.71: an "invalid prefix" starts a new stream and retries the token once; ids the library cannot take (negative,
    beyond 32 bits) give no text; everything else propagates. Priming ids are checked against the vocabulary.
    """

    def __init__(
        self,
        backend: Backend,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        start: Callable[..., Any] = LibraryStream,
    ) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._start = start
        known = [token_id for token_id in prompt_ids[-_PRIMING_TOKENS:] if backend.id_to_token(token_id) is not None]
        self._stream = start(ids=known, skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str | None:
        try:
            return self._advance(token_id)
        except (OverflowError, TypeError):
            return None
        except Exception as error:  # the library raises the bare class
            if "nvalid prefix" not in str(error):
                raise
        self._stream = self._start(ids=[], skip_special_tokens=self._skip_special_tokens)
        return self._advance(token_id)

    def _advance(self, token_id: int) -> str | None:
        text: str | None = self._stream.step(self._backend, token_id)
        return text
