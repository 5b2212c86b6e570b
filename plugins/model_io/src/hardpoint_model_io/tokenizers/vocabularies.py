"""Tokenizer pipelines from a vocabulary: byte-level merges, sentencepiece vocabularies as merges, and word pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hardpoint.errors import ModelFormatError
from hardpoint_model_io.formats.gguf_vocabulary import TokenType
from hardpoint_model_io.tokenizers.decoding import byte_alphabet
from hardpoint_model_io.tokenizers.splits import COMPOSED, pre_tokenizer
from hardpoint_model_io.tokenizers.word_piece import PIECE_PREFIX, WordPieceSettings, word_piece_backend

_SPACE_MARK = "\u2581"
_MAX_TOKEN_CHARS = 1_024
"""Of what merges are derived for, which takes time by the square of a token's length; real ones have a tenth of it."""
_GEMMA = frozenset({"gemma", "gemma2", "gemma3"})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """As stored. ``types`` int ``[tokens]``; ``scores`` float32 ``[tokens]`` or None; ``merges`` "left right".

    ``characters``: a compiled table of what characters are normalized to, or nothing. ``joins_spaces``: several spaces
    count as one.
    """

    path: str
    architecture: str
    tokens: list[str]
    types: np.ndarray
    merges: list[str] | None
    scores: np.ndarray | None
    pre: str | None
    unknown: str | None
    adds_space_prefix: bool
    characters: bytes = b""
    joins_spaces: bool = True

    @property
    def is_gemma(self) -> bool:
        return self.architecture in _GEMMA

    def ids(self, tokens: Sequence[str]) -> dict[str, int]:
        """Text to id. Raises ``ModelFormatError`` when two ids share a text."""
        found = {token: index for index, token in enumerate(tokens)}
        if len(found) != len(tokens):
            raise ModelFormatError(f"{self.path}: {len(tokens) - len(found)} tokens occur twice; the file is corrupt")
        return found


def byte_level_backend(vocabulary: Vocabulary) -> Backend:
    """Merges over the printable spelling of bytes."""
    if vocabulary.merges is None:
        raise ModelFormatError(
            f"{vocabulary.path}: metadata 'tokenizer.ggml.merges' is missing; download the file again"
        )
    pairs = [_pair(entry, vocabulary.path) for entry in vocabulary.merges]
    backend = Backend(models.BPE(vocab=vocabulary.ids(_spelled(vocabulary)), merges=pairs))
    backend.pre_tokenizer = pre_tokenizer(vocabulary.pre, vocabulary.path)
    if vocabulary.pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def marked_word_piece_backend(vocabulary: Vocabulary) -> Backend:
    """Word pieces where the file marks the first piece of a word, and BERT's own lists the others."""
    plain = [
        token if _is_bracketed(token) else token[1:] if token.startswith(_SPACE_MARK) else PIECE_PREFIX + token
        for token in vocabulary.tokens
    ]
    # The file does not say whether capitals count; a vocabulary with some is of no use without them.
    lowercase = not any(token != token.lower() for token in plain if not _is_bracketed(token))
    return word_piece_backend(plain, WordPieceSettings(lowercase=lowercase), vocabulary.path)[0]


def _is_bracketed(token: str) -> bool:
    return token.startswith("[") and token.endswith("]")


def _pair(merge: str, path: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right) or " " in right:
        raise ModelFormatError(f"{path}: the merge {merge!r} is not a pair of tokens; the file is corrupt")
    return left, right


def _spelled(vocabulary: Vocabulary) -> list[str]:
    """Ordinary tokens in the byte alphabet. A few may be written as plain text; added tokens stay as they are."""
    alphabet = set(byte_alphabet().values())
    table = byte_alphabet()
    # Nearly every token is fine: one pass over the joined text of all finds out whether any is not.
    if alphabet.issuperset("".join(vocabulary.tokens)):
        return vocabulary.tokens
    kept = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [
        token if alphabet.issuperset(token) or token_type in kept else "".join(table[byte] for byte in token.encode())
        for token, token_type in zip(vocabulary.tokens, vocabulary.types.tolist(), strict=True)
    ]


def sentencepiece_backend(vocabulary: Vocabulary) -> Backend:
    """A sentencepiece vocabulary merges the best-scored pair first: the same as merges listed by score."""
    tokens = [_marked_spaces(token) for token in vocabulary.tokens] if vocabulary.is_gemma else vocabulary.tokens
    ids = vocabulary.ids(tokens)
    if vocabulary.merges is not None:
        merges = [_pair(entry, vocabulary.path) for entry in vocabulary.merges]
    else:
        _require_short(tokens, vocabulary.path)
        merges = _derived_merges(tokens, ids, _merge_ranks(vocabulary))
    model = models.BPE(
        vocab=ids,
        merges=merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.unknown if vocabulary.is_gemma else None,
    )
    backend = Backend(model)
    text_steps = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.is_gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE_MARK)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        scheme = "first" if vocabulary.adds_space_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE_MARK, prepend_scheme=scheme, split=False)
        if vocabulary.adds_space_prefix:
            text_steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(text_steps)
    return backend


def _marked_spaces(token: str) -> str:
    """Runs of spaces are stored as such, while the pipeline looks them up with the space mark."""
    return _SPACE_MARK * len(token) if token and not token.strip(" ") else token


def _merge_ranks(vocabulary: Vocabulary) -> Sequence[float]:
    """Lower comes first. Gemma's scores do not follow the order its merges were learned in; its ids do."""
    if vocabulary.is_gemma:
        return range(len(vocabulary.tokens))
    if vocabulary.scores is None:
        raise ModelFormatError(
            f"{vocabulary.path}: metadata 'tokenizer.ggml.scores' is missing; download the file again"
        )
    ranks: list[float] = (-vocabulary.scores.astype(np.float64)).tolist()
    return ranks


def _require_short(tokens: Sequence[str], path: str) -> None:
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TOKEN_CHARS:
        raise ModelFormatError(
            f"{path}: a token of the vocabulary has {longest} characters, more than the {_MAX_TOKEN_CHARS} allowed; "
            "the file is corrupt, download it again"
        )


def _derived_merges(tokens: Sequence[str], ids: Mapping[str, int], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best token first; for one token in the order of its parts' lengths."""
    found: list[tuple[float, int, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((ranks[index], -len(left), -len(right), index, left, right))
    found.sort(key=lambda entry: entry[:4])
    return [(entry[4], entry[5]) for entry in found]
