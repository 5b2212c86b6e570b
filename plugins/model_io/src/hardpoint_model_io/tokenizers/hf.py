"""Tokenizer provider ``hf``: ``tokenizer.json`` or BERT's ``vocab.txt``, with its configuration and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.plugin import NoOptions, PluginContext, plugin
from hardpoint.interfaces.tokenizer import Tokenizer, TokenizerProvider
from hardpoint_model_io.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, confined_path, read_bytes, read_json_object
from hardpoint_model_io.tokenizers.decoding import VocabularyKind
from hardpoint_model_io.tokenizers.fast import FastTokenizer, TokenizerFacts
from hardpoint_model_io.tokenizers.word_piece import WordPieceSettings, word_piece_backend, word_piece_tokens

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MODEL_CONFIG = "config.json"
SPECIAL_MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
WORD_PIECES = "vocab.txt"
_OLD_VOCABULARIES = ("tokenizer.model", "vocab.json")


class _Pipeline(msgspec.Struct):
    """The parts of ``tokenizer.json`` that tell how tokens spell bytes."""

    decoder: Any = None


class HuggingFaceTokenizerProvider(TokenizerProvider):
    """What is added around a text is what ``tokenizer.json`` says; ``add_bos_token`` beside it has no effect, as with
    the library these files come from."""

    def accepts(self, artifact: ModelArtifact) -> bool:
        """A folder with ``tokenizer.json``; or any model folder, so that a missing one is reported by name."""
        return TOKENIZER in artifact.files or "config.json" in artifact.files

    def load(self, artifact: ModelArtifact) -> Tokenizer:
        if TOKENIZER not in artifact.files and WORD_PIECES in artifact.files:
            return _from_word_pieces(artifact)
        if TOKENIZER not in artifact.files:
            raise ModelFormatError(
                f"{artifact.root}/{TOKENIZER} is missing; download it, or write it with "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) (older vocabularies such as "
                f"{', '.join(_OLD_VOCABULARIES)} are not read)"
            )
        path = confined_path(artifact.root, TOKENIZER)
        data = read_bytes(path, MAX_TOKENIZER_BYTES)
        try:
            pipeline = msgspec.json.decode(data, type=_Pipeline)
            backend = Backend.from_str(data.decode())
        except Exception as error:  # the library raises the bare class for every kind of damage
            raise ModelFormatError(
                f"{path} is not a valid tokenizer: {_first_line(error)}; download it again"
            ) from None
        backend.no_padding()
        backend.no_truncation()
        config = _optional_object(artifact, CONFIG)
        roles = _roles(config, _optional_object(artifact, SPECIAL_MAP), artifact)
        model = _optional_object(artifact, MODEL_CONFIG)
        facts = TokenizerFacts(_kind(pipeline.decoder), roles, _chat_template(artifact, config), model)
        return FastTokenizer(backend, facts)


def _from_word_pieces(artifact: ModelArtifact) -> Tokenizer:
    path = confined_path(artifact.root, WORD_PIECES)
    config = _optional_object(artifact, CONFIG)
    roles = _roles(config, _optional_object(artifact, SPECIAL_MAP), artifact)
    settings = WordPieceSettings.of(config, roles, f"{artifact.root}/{CONFIG}")
    tokens = word_piece_tokens(read_bytes(path, MAX_TOKENIZER_BYTES), str(path))
    backend, known = word_piece_backend(tokens, settings, str(path))
    model = _optional_object(artifact, MODEL_CONFIG)
    facts = TokenizerFacts(VocabularyKind.WORD_PIECE, known, _chat_template(artifact, config), model)
    return FastTokenizer(backend, facts)


def _optional_object(artifact: ModelArtifact, name: str) -> dict[str, Any]:
    return read_json_object(confined_path(artifact.root, name)) if name in artifact.files else {}


def _roles(config: Mapping[str, Any], legacy: Mapping[str, Any], artifact: ModelArtifact) -> dict[str, str]:
    """Role to text. A token is written as text or as an object with ``content``."""
    roles = {}
    for role in _ROLES:
        value = config.get(role, legacy.get(role))
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise ModelFormatError(f"{artifact.root}/{CONFIG}: {role!r} must be a text, not {type(value).__name__}")
        if value is not None:
            roles[role] = value
    return roles


def _chat_template(artifact: ModelArtifact, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the configuration; of several named templates the one called ``default``."""
    if TEMPLATE in artifact.files:
        path = confined_path(artifact.root, TEMPLATE)
        try:
            return read_bytes(path, MAX_JSON_BYTES).decode()
        except UnicodeDecodeError:
            raise ModelFormatError(f"{path} is not valid UTF-8; download it again") from None
    template = _optional_object(artifact, TEMPLATE_JSON).get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFormatError(f"{artifact.root}/{CONFIG}: 'chat_template' must be a text or a list of named ones")
    return template


def _kind(decoder: Any) -> VocabularyKind:
    """From the decoder's steps, which are nested objects with a ``type``."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    types = {step.get("type") for step in steps if isinstance(step, dict)}
    if "ByteFallback" in types or "Metaspace" in types:
        return VocabularyKind.BYTE_FALLBACK
    if types == {"ByteLevel"}:
        return VocabularyKind.BYTE_LEVEL
    return VocabularyKind.WORD_PIECE if "WordPiece" in types else VocabularyKind.PLAIN


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@plugin("tokenizer", options=NoOptions)
def create(ctx: PluginContext, options: NoOptions) -> TokenizerProvider:
    return HuggingFaceTokenizerProvider()
