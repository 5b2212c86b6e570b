"""BERT's tokenizer from a bare list of tokens: text is normalized, split into words, and those cut into pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from hardpoint.errors import ModelFormatError

__all__ = ["WordPieceSettings", "word_piece_backend", "word_piece_tokens"]

PIECE_PREFIX = "##"
CLASSES = ("BertTokenizer", "BertTokenizerFast", "DistilBertTokenizer", "DistilBertTokenizerFast")
"""Values of ``tokenizer_class`` that mean this pipeline."""
MAX_WORD_CHARS = 100
"""Longer words are unknown as a whole."""
_DEFAULT_ROLES: Mapping[str, str] = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True, slots=True)
class WordPieceSettings:
    """``strip_accents`` None: with lower case only. ``roles`` maps roles (``cls_token``) to texts; the usual ones where
    it does not say."""

    lowercase: bool = True
    strip_accents: bool | None = None
    splits_chinese: bool = True
    roles: Mapping[str, str] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], roles: Mapping[str, str], origin: str) -> WordPieceSettings:
        """From ``tokenizer_config.json``. Raises ``ModelFormatError`` naming ``origin`` and the field, or the tokenizer
        that the list is meant for instead."""
        named = config.get("tokenizer_class")
        if named is not None and named not in CLASSES:
            raise ModelFormatError(
                f"{origin}: vocab.txt is read for {', '.join(CLASSES)}, not for {named!r}; supply tokenizer.json, "
                "which AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes"
            )
        flags = {
            "lowercase": config.get("do_lower_case", True),
            "splits_chinese": config.get("tokenize_chinese_chars", True),
            "strip_accents": config.get("strip_accents"),
        }
        for name, value in flags.items():
            if not isinstance(value, bool) and not (name == "strip_accents" and value is None):
                raise ModelFormatError(f"{origin}: the setting for {name} is {value!r}; true or false is needed")
        return cls(roles=roles, **flags)


def word_piece_tokens(data: bytes, origin: str) -> list[str]:
    """The lines of ``vocab.txt``, whose numbers are the ids. Raises ``ModelFormatError`` naming ``origin``."""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{origin} is not valid UTF-8: {error}; download it again") from None
    if lines and not lines[-1]:
        lines.pop()
    return [line.rstrip("\r") for line in lines]


def word_piece_backend(
    tokens: Sequence[str], settings: WordPieceSettings, origin: str
) -> tuple[Backend, dict[str, str]]:
    """The pipeline, and the roles whose tokens it knows.

    Raises ``ModelFormatError`` naming ``origin`` where a token occurs twice, or one that every text needs is absent.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise ModelFormatError(f"{origin}: the token {twice!r} occurs twice; download it again")
    roles = {**_DEFAULT_ROLES, **(settings.roles or {})}
    missing = [roles[role] for role in ("unk_token", "cls_token", "sep_token") if roles[role] not in ids]
    if missing:
        raise ModelFormatError(
            f"{origin} holds no {', '.join(missing)}, so it is not the vocabulary of a BERT tokenizer; "
            "supply tokenizer.json"
        )
    backend = Backend(
        models.WordPiece(
            ids,
            unk_token=roles["unk_token"],
            max_input_chars_per_word=MAX_WORD_CHARS,
            continuing_subword_prefix=PIECE_PREFIX,
        )
    )
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.splits_chinese,
        strip_accents=settings.strip_accents,
        lowercase=settings.lowercase,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=PIECE_PREFIX)
    first, last = roles["cls_token"], roles["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(token, ids[token]) for token in (first, last)],
    )
    known = {role: token for role, token in roles.items() if token in ids}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known.values()])
    return backend, known
