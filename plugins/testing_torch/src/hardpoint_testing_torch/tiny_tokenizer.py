"""A tokenizer for models without one: each id is a word of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["write_tiny_tokenizer"]


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """``tokenizer.json`` with the words ``t0`` to ``t<vocab_size - 1>``, separated by spaces, none of them special."""
    words = {f"t{number}": number for number in range(vocab_size)}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
