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
    """One value of ``tokenizer.ggml.model``: how to build it, and whether BOS is added where the file is silent; None
    for a family that always puts the same around a text."""

    build: Callable[[Vocabulary], Backend]
    kind: VocabularyKind
    adds_bos: bool | None


_FAMILIES: Mapping[str, _Family] = {
    "gpt2": _Family(byte_level_backend, VocabularyKind.BYTE_LEVEL, adds_bos=False),
    "llama": _Family(sentencepiece_backend, VocabularyKind.BYTE_FALLBACK, adds_bos=True),
    "bert": _Family(marked_word_piece_backend, VocabularyKind.WORD_PIECE, adds_bos=None),
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
            _set_frame(backend, file, roles, family.adds_bos)
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
    )


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


def _set_frame(backend: Backend, file: GgufFile, roles: Mapping[str, str], adds_bos: bool) -> None:
    frame = ["$A"]
    special = []
    if _flag(file, "add_bos_token", adds_bos) and "bos_token" in roles:
        frame.insert(0, roles["bos_token"])
        special.append(roles["bos_token"])
    if _flag(file, "add_eos_token", False) and "eos_token" in roles:
        frame.append(roles["eos_token"])
        special.append(roles["eos_token"])
    if special:
        ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys(special)]
        backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ids)


@plugin("tokenizer", options=NoOptions)
def create(ctx: PluginContext, options: NoOptions) -> TokenizerProvider:
    return GgufTokenizerProvider()
