"""BERT's vocabulary as a bare list of tokens, against the reference on the same list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint_model_io.sources.layout import folder_artifact
from hardpoint_model_io.sources.package import PackageSource
from hardpoint_model_io.tokenizers.hf import HuggingFaceTokenizerProvider

PIECES = [
    *"abcdefghijklmnopqrstuvwxyzé.,!?",
    "中",
    "wing",
    "flap",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyzé"),
    "##s",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "",
    "wings, flaps!",
    "The  WING\tflaps",
    "Café",
    "a中b",
    "xyz" * 40,
    "[MASK] wing [SEP]",
    "\x00\ufffdwing",
    "ß🤖",
]


def write(folder: Path, tokens: list[str], **config: Any) -> ModelArtifact:
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text("{}")
    return folder_artifact("model", str(folder), "test")


def load(artifact: ModelArtifact) -> Tokenizer:
    return HuggingFaceTokenizerProvider().load(artifact)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
    ],
    ids=str,
)
def test_it_equals_the_reference(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    artifact = write(tmp_path, [*SPECIAL, *PIECES], tokenizer_class="BertTokenizer", **config)
    reference = transformers.BertTokenizer.from_pretrained(str(tmp_path))
    tokenizer = load(artifact)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text).input_ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.vocab_size == len(reference)


def test_the_frame_and_its_roles(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, [*SPECIAL, *PIECES]))
    ids = tokenizer.encode("wings")
    assert [tokenizer.token_text(one) for one in ids] == ["[CLS]", "wing", "s", "[SEP]"]
    assert tokenizer.decode(ids) == "wings"
    assert tokenizer.special_tokens["cls_token"] == "[CLS]"
    assert tokenizer.control_tokens == set(SPECIAL)


def test_text_of_users_makes_no_control_tokens(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, [*SPECIAL, *PIECES]))
    plain = tokenizer.encode("wing [SEP] flap", parse_special=False)
    assert plain.count(3) == 1
    assert tokenizer.encode("wing [SEP] flap").count(3) == 2


def test_other_texts_may_play_the_roles(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *PIECES]
    tokenizer = load(write(tmp_path, tokens, cls_token="<s>", sep_token={"content": "</s>"}, unk_token="<unk>"))
    assert tokenizer.encode("wing %") == [1, tokens.index("wing"), 0, 2]


def test_the_whole_pipeline_goes_before_the_list(tmp_path: Path) -> None:
    artifact = write(tmp_path, [*SPECIAL, *PIECES])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer.json is not a valid tokenizer"):
        load(folder_artifact("model", artifact.root, "test"))


@pytest.mark.parametrize(
    ("tokens", "config", "message"),
    [
        (PIECES, {}, r"vocab.txt holds no \[UNK\], \[CLS\], \[SEP\], so it is not the vocabulary of a BERT tokenizer"),
        (
            [*SPECIAL, *PIECES],
            {"tokenizer_class": "EsmTokenizer"},
            "vocab.txt is read for BertTokenizer, .* 'EsmTokeni",
        ),
        ([*SPECIAL, *PIECES], {"do_lower_case": "yes"}, "the setting for lowercase is 'yes'; true or false is needed"),
        ([*SPECIAL, *PIECES], {"cls_token": "<s>"}, "vocab.txt holds no <s>"),
    ],
)
def test_what_is_no_such_vocabulary(tmp_path: Path, tokens: list[str], config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(write(tmp_path, tokens, **config))


def test_damaged_lists_are_named(tmp_path: Path) -> None:
    artifact = write(tmp_path, [*SPECIAL, *PIECES])
    for content, message in (
        (b"[PAD]\n[PAD]\n", r"vocab.txt: the token '\[PAD\]' occurs twice"),
        (b"\xff\xfe", "vocab.txt is not valid UTF-8"),
    ):
        (tmp_path / "vocab.txt").write_bytes(content)
        with pytest.raises(ModelFormatError, match=message):
            load(artifact)


@pytest.mark.slow
def test_the_list_of_minilm_gives_the_ids_of_its_pipeline(tmp_path: Path) -> None:
    source = PackageSource()
    artifact = source.resolve("minilm", None) if "minilm" in source.known_names() else None
    if artifact is None:
        pytest.skip("the package of minilm is not installed; run `make setup`")
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        shutil.copy(Path(artifact.root, name), tmp_path / name)
    ours, theirs = load(folder_artifact("model", str(tmp_path), "test")), load(artifact)
    for text in [*TEXTS, "Hello world", "héllo 🤖 日本語", "def f(x):\n    return 1", "long text " * 400]:
        assert ours.encode(text) == theirs.encode(text), text
