"""Unigram vocabularies in GGUF files, and frames around texts, beside the tokenizers of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.tokenizers.decoding import byte_alphabet
from hardpoint_model_io.tokenizers.fast import FastTokenizer
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider

AsArtifact = Callable[[Path], ModelArtifact]
GgufWriter = Callable[..., Path]
PIECES = [
    "\u2581",
    "\u2581hello",
    "\u2581he",
    "llo",
    "h",
    "e",
    "l",
    "o",
    "\u2581world",
    "w",
    "r",
    "d",
    "fi",
    "f",
    "i",
    "A",
]
SCORES = [-2.0, -5.5, -4.0, -4.5, -7.0, -6.0, -6.5, -6.0, -5.0, -8.0, -8.5, -8.0, -6.0, -7.5, -7.0, -9.0]
TEXTS = [
    "hello world",
    "  hello   world ",
    "hello\nworld\thello",
    "ofi \ufb01le \uff21",
    "w\u00f6rld \u2603 hello",
    "",
    "x",
]
T5_TOKENS = ["<pad>", "</s>", "<unk>", *PIECES, "<extra_id_0>"]
XLM_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *PIECES, "<mask>"]


def compiled(texts: Mapping[str, str]) -> bytes:
    """A table as sentencepiece compiles it, with a block of 256 units for the children of each inner node."""
    units, blob = [0] * 256, b""

    def place(index: int, endings: Mapping[bytes, int]) -> None:
        base = len(units)
        units.extend([0] * 256)
        has_leaf = b"" in endings
        units[index] |= (index ^ base) << 10 | has_leaf << 8
        if has_leaf:
            units[base] = endings[b""] | 1 << 31
        for first in sorted({ending[0] for ending in endings if ending}):
            units[base ^ first] |= first
            place(base ^ first, {one[1:]: at for one, at in endings.items() if one[:1] == bytes([first])})

    starts = {}
    for text, becomes in texts.items():
        starts[text.encode()] = len(blob)
        blob += becomes.encode() + b"\0"
    place(0, starts)
    table = np.array(units, "<u4").tobytes()
    return len(table).to_bytes(4, "little") + table + blob


CHARACTERS = compiled({"\ufb01": "fi", "\uff21": "A", "\t": " ", "\n": " ", "\u00f6": "o"})


def vocabulary(tokens: list[str], **changes: Any) -> dict[str, Any]:
    types = [2 if token == "<unk>" else 3 if token.startswith("<") else 1 for token in tokens]
    scores = [SCORES[PIECES.index(token)] if token in PIECES else 0.0 for token in tokens]
    roles = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>", "padding": "<pad>", "mask": "<mask>"}
    ids = {f"ggml.{role}_token_id": tokens.index(text) for role, text in roles.items() if text in tokens}
    table = {"ggml.precompiled_charsmap": CHARACTERS, "ggml.add_space_prefix": True,
             "ggml.remove_extra_whitespaces": True}  # fmt: skip
    return {"ggml.model": "t5", "ggml.pre": "default", "ggml.tokens": tokens, "ggml.token_type": types,
            "ggml.scores": scores, **ids, **table, **changes}  # fmt: skip


@pytest.fixture
def load(gguf_file: GgufWriter, as_artifact: AsArtifact) -> Callable[[dict[str, Any]], FastTokenizer]:
    def made(fields: dict[str, Any]) -> FastTokenizer:
        tensors = {"token_embd.weight": np.zeros((len(fields["ggml.tokens"]), 32), np.float32)}
        given = {name: value for name, value in fields.items() if value is not None}
        path = gguf_file(vocabulary=given, tensors=tensors, metadata={})
        tokenizer = GgufTokenizerProvider().load(as_artifact(path))
        assert isinstance(tokenizer, FastTokenizer)
        return tokenizer

    return made


def scored(tokens: list[str]) -> list[tuple[str, float]]:
    return list(zip(tokens, vocabulary(tokens)["ggml.scores"], strict=True))


@pytest.mark.parametrize("text", TEXTS)
def test_t5(load: Callable[..., FastTokenizer], text: str) -> None:
    ours = load(vocabulary(T5_TOKENS))
    theirs = transformers.T5Tokenizer(vocab=scored(T5_TOKENS), extra_ids=1, _spm_precompiled_charsmap=CHARACTERS)
    assert ours.encode(text) == theirs(text)["input_ids"]
    plain = ours.encode(text, add_special_tokens=False)
    assert [*plain, 1] == theirs(text)["input_ids"]
    assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True)
    stream = ours.decode_stream([])
    assert "".join(filter(None, map(stream.step, plain))) == ours.decode(plain)


@pytest.mark.parametrize("text", TEXTS)
def test_xlm_roberta(load: Callable[..., FastTokenizer], text: str) -> None:
    """Beginning, end and two separators between the texts of a pair, as files say."""
    flags = {"ggml.add_bos_token": True, "ggml.add_eos_token": True, "ggml.add_sep_token": True,
             "ggml.seperator_token_id": 2}  # fmt: skip
    ours = load(vocabulary(XLM_TOKENS, **flags))
    theirs = transformers.XLMRobertaTokenizer(vocab=scored(XLM_TOKENS), _spm_precompiled_charsmap=CHARACTERS)
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode_pair(text, "hello") == theirs(text, "hello")["input_ids"]


def test_spaces_that_stay_and_none_in_front(load: Callable[..., FastTokenizer]) -> None:
    ours = load(vocabulary(T5_TOKENS, **{"ggml.remove_extra_whitespaces": False, "ggml.add_space_prefix": False}))
    ids = ours.encode("llo  hello", add_special_tokens=False)
    assert [T5_TOKENS[one] for one in ids] == ["llo", "\u2581", "\u2581hello"]


def test_without_a_table_characters_stay(load: Callable[..., FastTokenizer]) -> None:
    ours = load(vocabulary(T5_TOKENS, **{"ggml.precompiled_charsmap": None, "ggml.unknown_token_id": None}))
    assert T5_TOKENS.index("<unk>") in ours.encode("\ufb01")


def damaged(place: int, value: int) -> bytes:
    units = np.frombuffer(CHARACTERS, np.uint8).copy()
    units[place : place + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
    return units.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.scores": None}, "scores' is missing"),
        ({"ggml.scores": [float("nan")] * len(T5_TOKENS)}, "no numbers"),
        ({"ggml.tokens": ["a"] * len(T5_TOKENS)}, "occur twice"),
        ({"ggml.unknown_token_id": None, "ggml.token_type": [1] * len(T5_TOKENS)}, "unknown_token_id' nor a type"),
        ({"ggml.precompiled_charsmap": [1.5, 2.5]}, "array of bytes"),
        ({"ggml.precompiled_charsmap": damaged(0, 1 << 30)}, "no table of characters"),
        ({"ggml.precompiled_charsmap": damaged(0, 6)}, "no table of characters"),
        ({"ggml.precompiled_charsmap": damaged(4, 0x7FFFFC00)}, "no table of characters"),
        ({"ggml.precompiled_charsmap": b"\x08\0\0"}, "no table of characters"),
        ({"ggml.add_sep_token": 1}, "add_sep_token' is 1"),
    ],
)
def test_damaged_files_are_named(load: Callable[..., FastTokenizer], change: dict[str, Any], message: str) -> None:
    """A table that led out of itself would end the process."""
    with pytest.raises(ModelFormatError, match=rf"tiny\.gguf.*{message}"):
        load(vocabulary(T5_TOKENS, **change))


def test_every_damage_of_a_table_is_refused_or_harmless(load: Callable[..., FastTokenizer]) -> None:
    generator = np.random.default_rng(0)
    for _ in range(40):
        table = np.frombuffer(CHARACTERS, np.uint8).copy()
        table[generator.integers(0, len(table), 3)] = generator.integers(0, 256, 3)
        try:
            tokenizer = load(vocabulary(T5_TOKENS, **{"ggml.precompiled_charsmap": table.tobytes()}))
        except HardpointError:
            continue
        for text in TEXTS:
            tokenizer.encode(text)


def byte_level(**changes: Any) -> dict[str, Any]:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(byte_alphabet().values()), "xy"]
    ids = {"bos": 0, "padding": 1, "eos": 2, "unknown": 3, "seperator": 2}
    types = [3] * 4 + [1] * (len(tokens) - 4)
    return {"ggml.model": "gpt2", "ggml.tokens": tokens, "ggml.token_type": types, "ggml.merges": ["x y"],
            "ggml.add_bos_token": True, "ggml.add_eos_token": True,
            **{f"ggml.{role}_token_id": token for role, token in ids.items()}, **changes}  # fmt: skip


@pytest.mark.parametrize(("pre", "changes", "gap"), [
    ("roberta-bpe", {}, [2, 2]),
    ("roberta-bpe", {"ggml.add_sep_token": False}, [2]),
    ("modern-bert", {}, [2]),
])  # fmt: skip
def test_frames_of_byte_level_encoders(
    load: Callable[..., FastTokenizer], pre: str, changes: dict[str, Any], gap: list[int]
) -> None:
    tokenizer = load(byte_level(**{"ggml.pre": pre, **changes}))
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("a b", "c"))
    assert tokenizer.encode("a b") == [0, *first, 2]
    assert tokenizer.encode_pair("a b", "c") == [0, *first, *gap, *second, 2]


def test_letters_and_accents_of_modernbert_are_one(load: Callable[..., FastTokenizer]) -> None:
    apart, together = "e\u0301", "\u00e9"
    modern = load(byte_level(**{"ggml.pre": "modern-bert"}))
    assert modern.encode(apart) == modern.encode(together)
    plain = load(byte_level(**{"ggml.pre": "roberta-bpe"}))
    assert plain.encode(apart) != plain.encode(together)


def test_texts_of_models_without_an_end_are_no_pair(load: Callable[..., FastTokenizer]) -> None:
    tokenizer = load(byte_level(**{"ggml.pre": "default", "ggml.add_eos_token": False}))
    with pytest.raises(ValueError, match="nothing between"):
        tokenizer.encode_pair("a", "b")
