"""Unigram vocabularies, which cut a text into the likeliest pieces: T5's, and those of XLM-RoBERTa."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hardpoint.errors import ModelFormatError
from hardpoint_model_io.formats.gguf_vocabulary import TokenType
from hardpoint_model_io.tokenizers.vocabularies import Vocabulary

__all__ = ["unigram_backend"]

_SPACE_MARK = "\u2581"
_LEAF = 1 << 31
"""From here on units are places of texts."""
_HEADER_BYTES = 4


def unigram_backend(vocabulary: Vocabulary) -> Backend:
    """Raises ``ModelFormatError`` naming the file where scores or the unknown token are missing, or the table of
    normalized characters leads nowhere."""
    vocabulary.ids(vocabulary.tokens)
    is_byte, unknown = vocabulary.types == TokenType.BYTE, _unknown_id(vocabulary)
    backend = Backend(
        models.Unigram(
            list(zip(vocabulary.tokens, _scores(vocabulary), strict=True)),
            unk_id=unknown,
            byte_fallback=bool(is_byte.any()),
        )
    )
    # Text never shows what nobody can read.
    backend.add_special_tokens([AddedToken(vocabulary.tokens[unknown], normalized=False, special=True)])
    if vocabulary.characters:
        _check_characters(vocabulary.characters, vocabulary.path)
        backend.normalizer = normalizers.Precompiled(vocabulary.characters)
    scheme: Any = "always" if vocabulary.adds_space_prefix else "never"
    marks = pre_tokenizers.Metaspace(replacement=_SPACE_MARK, prepend_scheme=scheme)
    steps: list[Any] = [pre_tokenizers.WhitespaceSplit(), marks] if vocabulary.joins_spaces else [marks]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.Metaspace(replacement=_SPACE_MARK, prepend_scheme=scheme)
    return backend


def _scores(vocabulary: Vocabulary) -> Sequence[float]:
    if vocabulary.scores is None:
        raise ModelFormatError(
            f"{vocabulary.path}: metadata 'tokenizer.ggml.scores' is missing; download the file again"
        )
    if not np.isfinite(vocabulary.scores).all():
        raise ModelFormatError(
            f"{vocabulary.path}: metadata 'tokenizer.ggml.scores' holds values that are no numbers; download it again"
        )
    found: list[float] = vocabulary.scores.astype(np.float64).tolist()
    return found


def _unknown_id(vocabulary: Vocabulary) -> int:
    if vocabulary.unknown is not None:
        return vocabulary.tokens.index(vocabulary.unknown)
    marked = np.flatnonzero(vocabulary.types == TokenType.UNKNOWN)
    if not marked.size:
        raise ModelFormatError(
            f"{vocabulary.path}: neither the metadata 'tokenizer.ggml.unknown_token_id' nor a type of token says which "
            "one stands for what has no piece; the file is incomplete"
        )
    return int(marked[0])


def _check_characters(table: bytes, path: str) -> None:
    """The library follows the table without looking whether it leads out of itself.

    It is a double array of 32-bit units, its size in bytes first, and behind it the texts that characters become. Of a
    unit, bits 10 to 30 say how far the block of its children is (times 256 with bit 9), and bit 8 that the first of
    these is no child, but the place of a text.
    """
    size = int.from_bytes(table[:_HEADER_BYTES], "little")
    if size % 4 or not 0 < size <= len(table) - _HEADER_BYTES:
        raise _bad_table(path)
    units = np.frombuffer(table, "<u4", count=size // 4, offset=_HEADER_BYTES).astype(np.int64)
    texts = np.frombuffer(table, np.uint8, offset=_HEADER_BYTES + size)
    inner = np.flatnonzero(units < _LEAF)
    children = inner ^ (units[inner] >> 10 << (units[inner] >> 9 & 1) * 8)
    if np.any((children | 0xFF) >= len(units)):
        raise _bad_table(path)
    places = units[children[units[inner] >> 8 & 1 == 1]] & (_LEAF - 1)
    if np.any(places >= len(texts)) or np.any(texts[places] & 0xC0 == 0x80):
        raise _bad_table(path)


def _bad_table(path: str) -> ModelFormatError:
    return ModelFormatError(
        f"{path}: metadata 'tokenizer.ggml.precompiled_charsmap' is no table of characters; download the file again"
    )
