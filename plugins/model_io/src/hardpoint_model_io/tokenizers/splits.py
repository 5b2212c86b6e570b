"""How byte-level vocabularies cut text before merging, by the name a GGUF file gives (``tokenizer.ggml.pre``).

Each name stands for the pre-tokenizer the model was trained with. Written as data: steps of the ``tokenizers`` library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers

from hardpoint.errors import UnsupportedModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    """Letters with one leading other character, ``numbers``, punctuation with the line breaks behind it, spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased(suffix: str, numbers: str) -> str:
    """Like :func:`_words`, cutting where a lower-case run meets upper case; ``suffix`` follows each word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


_GPT2 = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),)


def _split(pattern: str) -> tuple[Any, ...]:
    return (
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


_DIGITS_GPT2 = (pre_tokenizers.Digits(individual_digits=True), *_GPT2)
_LLAMA3 = _split(_words(r"\p{N}{1,3}"))
_QWEN2 = _split(_words(r"\p{N}"))
_TEKKEN = _split(_cased("", r"\p{N}"))
_GPT4O = _split(_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))

PRE_TOKENIZERS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "gigachat"), _GPT2),
    **dict.fromkeys(("roberta-bpe", "modern-bert"), _GPT2),
    **dict.fromkeys(("smollm", "refact", "command-r", "codeshell", "starcoder"), _DIGITS_GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


COMPOSED = frozenset({"modern-bert"})
"""Names of those that see letters and their accents as one character each."""
DOUBLE_SEPARATOR = frozenset({"roberta-bpe"})
"""Names of those whose texts of a pair have two tokens between them, where a file does not say how many."""


def pre_tokenizer(name: str | None, path: str) -> Any:
    """The pre-tokenizer called ``name``; files without a name predate the others and mean GPT-2's.

    Raises ``UnsupportedModelError`` naming the file and the known names: a wrong cut silently degrades a model.
    """
    steps = _GPT2 if name is None else PRE_TOKENIZERS.get(name)
    if steps is None:
        raise UnsupportedModelError(
            f"{path}: the pre-tokenizer {name!r} (metadata 'tokenizer.ggml.pre') is not known; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Load the model's Hugging Face folder instead"
        )
    return pre_tokenizers.Sequence(list(steps))
