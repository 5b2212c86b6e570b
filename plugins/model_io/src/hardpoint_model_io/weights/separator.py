"""Which token divides the two texts of a pair, where a model's configuration leaves that to its tokenizer's files."""

from __future__ import annotations

from typing import Any

from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.files import MAX_TOKENIZER_BYTES, confined_path, read_bytes, read_json_object

__all__ = ["separator_id"]

VOCABULARY, WORD_PIECES = "tokenizer.json", "vocab.txt"
_TOLD_IN = ("tokenizer_config.json", "special_tokens_map.json")
USUAL = "[SEP]"


def separator_id(artifact: ModelArtifact) -> int | None:
    """None where no file tells. Raises ``ModelFormatError`` for damaged files."""
    text = _separator(artifact)
    if VOCABULARY in artifact.files:
        document = read_json_object(confined_path(artifact.root, VOCABULARY), MAX_TOKENIZER_BYTES)
        added: Any = document.get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
                return int(token["id"])
    elif WORD_PIECES in artifact.files:
        lines = read_bytes(confined_path(artifact.root, WORD_PIECES), MAX_TOKENIZER_BYTES).split(b"\n")
        wanted = text.encode()
        return next((index for index, line in enumerate(lines) if line.strip() == wanted), None)
    return None


def _separator(artifact: ModelArtifact) -> str:
    for name in _TOLD_IN:
        if name in artifact.files:
            token: Any = read_json_object(confined_path(artifact.root, name)).get("sep_token")
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                return text
    return USUAL
