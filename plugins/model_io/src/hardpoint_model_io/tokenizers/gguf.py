"""Tokenizer provider ``gguf``: the vocabulary inside a GGUF file, without any other file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.plugin import NoOptions, PluginContext, plugin
from hardpoint.interfaces.tokenizer import Tokenizer, TokenizerProvider
from hardpoint_model_io.files import confined_path, starts_with
from hardpoint_model_io.formats.gguf import MAGIC, GgufFile, read_gguf
from hardpoint_model_io.formats.gguf_config import TOKENS_KEY, token_id
from hardpoint_model_io.formats.gguf_vocabulary import TokenType, chat_template, text_value, token_types
from hardpoint_model_io.tokenizers.decoding import VocabularyKind
from hardpoint_model_io.tokenizers.fast import FastTokenizer, TokenizerFacts
from hardpoint_model_io.tokenizers.splits import DOUBLE_SEPARATOR
from hardpoint_model_io.tokenizers.unigram import unigram_backend
from hardpoint_model_io.tokenizers.vocabularies import (
    Vocabulary,
    byte_level_backend,
    marked_word_piece_backend,
    sentencepiece_backend,
)

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """One value of ``tokenizer.ggml.model``: how to build it, and whether BOS and EOS are added where the file is
    silent; None for a family that always puts the same around a text."""

    build: Callable[[Vocabulary], Backend]
    kind: VocabularyKind
    adds_bos: bool | None
    adds_eos: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family(byte_level_backend, VocabularyKind.BYTE_LEVEL, adds_bos=False),
    "llama": _Family(sentencepiece_backend, VocabularyKind.BYTE_FALLBACK, adds_bos=True),
    "bert": _Family(marked_word_piece_backend, VocabularyKind.WORD_PIECE, adds_bos=None),
    "t5": _Family(unigram_backend, VocabularyKind.BYTE_FALLBACK, adds_bos=False, adds_eos=True),
}


class GgufTokenizerProvider(TokenizerProvider):
    def accepts(self, artifact: ModelArtifact) -> bool:
        """A single GGUF file; whether it has a vocabulary shows on loading."""
        return len(artifact.files) == 1 and starts_with(confined_path(artifact.root, artifact.files[0]), MAGIC)

    def load(self, artifact: ModelArtifact) -> Tokenizer:
        file = read_gguf(confined_path(artifact.root, artifact.files[0]))
        name = text_value(file, "tokenizer.ggml.model")
        family = _FAMILIES.get(name or "")
        if family is None:
            raise UnsupportedModelError(
                f"{file.path}: the vocabulary type {name!r} (metadata 'tokenizer.ggml.model') is not supported; "
                f"supported are {', '.join(_FAMILIES)}"
            )
        vocabulary = _read_vocabulary(file)
        try:
            backend = family.build(vocabulary)
        except HardpointError:
            raise
        except Exception as error:  # the library raises the bare class for merges without tokens
            raise ModelFormatError(f"{file.path}: the vocabulary is inconsistent: {error}") from None
        _add_special_tokens(backend, vocabulary)
        roles = {role: vocabulary.tokens[i] for role, key in _ROLES.items() if (i := token_id(file, key)) is not None}
        if family.adds_bos is not None:
            _set_frame(backend, file, roles, family)
        return FastTokenizer(backend, TokenizerFacts(family.kind, roles, chat_template(file)))


def _read_vocabulary(file: GgufFile) -> Vocabulary:
    stored = file.strings(TOKENS_KEY)
    try:
        tokens = [entry.decode() for entry in stored]
        merges = None
        if "tokenizer.ggml.merges" in file.metadata:
            merges = [entry.decode() for entry in file.strings("tokenizer.ggml.merges")]
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{file.path}: the vocabulary is not valid UTF-8: {error}") from None
    scores = file.numbers("tokenizer.ggml.scores") if "tokenizer.ggml.scores" in file.metadata else None
    if scores is not None and scores.size != len(tokens):
        raise ModelFormatError(f"{file.path}: {scores.size} scores for {len(tokens)} tokens; the file is corrupt")
    unknown = token_id(file, "unknown_token_id")
    return Vocabulary(
        path=file.path,
        architecture=str(file.metadata.get("general.architecture", "")),
        tokens=tokens,
        types=token_types(file, len(tokens)),
        merges=merges,
        scores=scores,
        pre=text_value(file, "tokenizer.ggml.pre"),
        unknown=None if unknown is None else tokens[unknown],
        adds_space_prefix=_flag(file, "add_space_prefix", True),
        characters=_characters(file),
        joins_spaces=_flag(file, "remove_extra_whitespaces", True),
    )


def _characters(file: GgufFile) -> bytes:
    if (key := "tokenizer.ggml.precompiled_charsmap") not in file.metadata:
        return b""
    table = file.numbers(key)
    if table.dtype.itemsize != 1:
        raise ModelFormatError(f"{file.path}: metadata {key!r} must be an array of bytes")
    return table.tobytes()


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"{file.path}: metadata 'tokenizer.ggml.{name}' is {value!r}, not a truth value")
    return value


def _add_special_tokens(backend: Backend, vocabulary: Vocabulary) -> None:
    """Control tokens become special ones; user-defined tokens are kept whole, but are text.

    A token the pipeline spells differently (Gemma's runs of spaces) is found by merging instead: added under the
    stored spelling it would get an id beyond the vocabulary.
    """
    for token_type, is_special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        indices = np.flatnonzero(vocabulary.types == token_type).tolist()
        texts = [vocabulary.tokens[i] for i in indices if backend.token_to_id(vocabulary.tokens[i]) == i]
        added = [AddedToken(text, normalized=False, special=is_special) for text in texts]
        if is_special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _set_frame(backend: Backend, file: GgufFile, roles: Mapping[str, str], family: _Family) -> None:
    """What stands around a text, and around and between two: the first one ends as a text does, and there may be a
    separator more."""
    has_double = text_value(file, "tokenizer.ggml.pre") in DOUBLE_SEPARATOR
    first = _framing(file, roles, "bos_token", bool(family.adds_bos))
    last = _framing(file, roles, "eos_token", family.adds_eos)
    between = [*last, *_framing(file, roles, "sep_token", has_double)]
    if used := dict.fromkeys([*first, *between]):
        ids = [(text, backend.token_to_id(text)) for text in used]
        single, pair = [*first, "$A", *last], [*first, "$A", *between, "$B:1", *last]
        # Without anything between them two texts are none: callers ask for that.
        both = {"pair": pair} if between else {}
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids, **both)


def _framing(file: GgufFile, roles: Mapping[str, str], role: str, default: bool) -> list[str]:
    """The token of ``role`` where the file, or else ``default``, says that texts have it."""
    return [roles[role]] if _flag(file, f"add_{role}", default) and role in roles else []


@plugin("tokenizer", options=NoOptions)
def create(ctx: PluginContext, options: NoOptions) -> TokenizerProvider:
    return GgufTokenizerProvider()
