"""Vocabulary of a GGUF file: tokens, their types, and which of them end a turn."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from hardpoint.errors import ModelFormatError
from hardpoint_model_io.formats.gguf import GgufArray, GgufFile
from hardpoint_model_io.formats.gguf_config import TOKENS_KEY, token_id

TYPES_KEY = "tokenizer.ggml.token_type"
TEMPLATE_KEY = "tokenizer.chat_template"

# Besides the end-of-sequence token: tokens by which chat templates close a turn.
_END_KEYS = ("eos_token_id", "eot_token_id")
_TURN_ENDS = frozenset({b"<|im_end|>", b"<|eot_id|>", b"<end_of_turn>", b"<|end|>", b"<|return|>"})


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def token_types(file: GgufFile, num_tokens: int) -> np.ndarray:
    """int array ``[num_tokens]``; all normal where the file does not say."""
    if TYPES_KEY not in file.metadata:
        return np.full(num_tokens, TokenType.NORMAL, dtype=np.int32)
    types = file.numbers(TYPES_KEY)
    if types.size != num_tokens:
        raise ModelFormatError(f"{file.path}: {types.size} token types for {num_tokens} tokens; the file is corrupt")
    return types


def chat_template(file: GgufFile) -> str | None:
    """Jinja source in the file, or None."""
    return text_value(file, TEMPLATE_KEY)


def text_value(file: GgufFile, key: str) -> str | None:
    """A metadata string, or None where absent. Raises ``ModelFormatError`` for another type."""
    value: Any = file.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelFormatError(f"{file.path}: metadata {key!r} must be a string")
    return value


def end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Ids that end generation: the declared ones, and control tokens by which the chat template closes a turn."""
    found = [token for key in _END_KEYS if (token := token_id(file, key)) is not None]
    template = chat_template(file)
    tokens_array = file.metadata.get(TOKENS_KEY)
    if template and isinstance(tokens_array, GgufArray) and TYPES_KEY in file.metadata:
        wanted = {name for name in _TURN_ENDS if name.decode() in template}
        types = token_types(file, tokens_array.count)
        if wanted:
            tokens = file.strings(TOKENS_KEY)
            control = np.flatnonzero(types == TokenType.CONTROL).tolist()
            found += [index for index in control if tokens[index] in wanted]
    return tuple(dict.fromkeys(found))
