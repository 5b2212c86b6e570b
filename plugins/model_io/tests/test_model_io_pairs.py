"""Texts given together: how a tokenizer joins them, which token divides them, and models saved to embed or to judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_model_io.sources.layout import folder_artifact
from hardpoint_model_io.tokenizers.fast import FastTokenizer
from hardpoint_model_io.tokenizers.hf import HuggingFaceTokenizerProvider
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

WORDS = {word: index for index, word in enumerate(["[PAD]", "[CLS]", "[DIV]", "[UNK]", "a", "b", "c", "[", "]", "DIV"])}
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 4,
    "vocab_size": 10,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
}
POOLED = [{"type": "st.Transformer", "path": ""}, {"type": "st.Pooling", "path": "1_Pooling"}]


def write(root: Path, config: dict[str, Any], *, pair: str | None = "[CLS] $A [DIV] $B [DIV]", names: Any = ()) -> None:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[PAD]", "[CLS]", "[DIV]"])
    if pair is not None:
        known = [("[CLS]", 1), ("[DIV]", 2)]
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A [DIV]", pair=pair, special_tokens=known)
    made.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"sep_token": {"content": "[DIV]"}}))
    (root / "config.json").write_text(json.dumps(config))
    save_file({name: np.zeros((2, 2), dtype=np.float32) for name in names or ("x",)}, root / "model.safetensors")


def describe(root: Path) -> ModelInfo:
    return SafetensorsWeightLoader().describe(folder_artifact("model", str(root), "test"))


def tokenizer(root: Path) -> FastTokenizer:
    made = HuggingFaceTokenizerProvider().load(folder_artifact("model", str(root), "test"))
    assert isinstance(made, FastTokenizer)
    return made


@pytest.mark.parametrize("pair", ["[CLS] $A [DIV] $B [DIV]", "[CLS] $A [DIV] [DIV] $B [DIV]", "$A [DIV] $B"])
def test_pairs_are_those_of_the_library(pair: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIG, pair=pair)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for first, second in (("a b", "c"), ("a", "b b b"), ("c c", "a b")):
        assert tokenizer(tmp_path).encode_pair(first, second) == library.encode(first, second).ids


def test_texts_cannot_spell_what_divides_them(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    bracketed = [WORDS[word] for word in ("[", "DIV", "]")]
    assert tokenizer(tmp_path).encode_pair("a [DIV]", "b") == [1, WORDS["a"], *bracketed, 2, WORDS["b"], 2]


@pytest.mark.parametrize("pair", [None, "[CLS] $A $B [DIV]"])
def test_a_tokenizer_that_divides_nothing_says_so(pair: str | None, tmp_path: Path) -> None:
    write(tmp_path, CONFIG, pair=pair)
    with pytest.raises(ValueError, match="puts nothing between two texts"):
        tokenizer(tmp_path).encode_pair("a", "b")


def test_a_tokenizer_knows_what_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    assert tokenizer(tmp_path).model_config == CONFIG
    (tmp_path / "config.json").unlink()
    assert tokenizer(tmp_path).model_config == {}


def test_the_separator_is_the_tokenizers_to_tell(tmp_path: Path) -> None:
    """Where types of tokens depend on it, and the configuration does not say."""
    write(tmp_path, CONFIG)
    info = describe(tmp_path)
    assert (info.tasks, info.config["sep_token_id"]) == (("embed", "classify"), 2)
    for changes, expected in (({"sep_token_id": 5}, 5), ({"type_vocab_size": 1}, None)):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        assert describe(tmp_path).config.get("sep_token_id") == expected
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert describe(tmp_path).config["sep_token_id"] is None, "no [SEP] there"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n")
    assert describe(tmp_path).config["sep_token_id"] == 3
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelFormatError, match="tokenizer_config.json"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [({"pad_token_id": 1}, 14), ({}, 14), ({"pad_token_id": 3}, 12), ({"model_type": "bert"}, 16)],
)
def test_positions_behind_the_padding_are_fewer(changes: dict[str, Any], longest: int, tmp_path: Path) -> None:
    roberta = {**CONFIG, "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}
    write(tmp_path, roberta | changes)
    assert describe(tmp_path).max_position == longest


def test_padding_at_the_end_of_all_positions(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "model_type": "roberta", "pad_token_id": 15})
    with pytest.raises(ModelFormatError, match="'pad_token_id' leaves no positions for tokens"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("names", "tied", "architecture", "tasks"),
    [
        (("embed_tokens.weight",), False, "Qwen3Model", ("embed",)),
        (("embed_tokens.weight",), True, "Qwen3ForCausalLM", ("generate", "embed")),
        (("embed_tokens.weight", "lm_head.weight"), False, "Qwen3ForCausalLM", ("generate", "embed")),
    ],
)
def test_decoders_saved_to_embed(
    names: tuple[str, ...], tied: bool, architecture: str, tasks: tuple[str, ...], tmp_path: Path
) -> None:
    """What the files beside them ask for is computed, by any single state; a head may be missing."""
    decoder = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": tied}
    write(tmp_path, CONFIG | decoder, names=names)
    (tmp_path / "modules.json").write_text(json.dumps(POOLED))
    (tmp_path / "1_Pooling").mkdir()
    for method in ("mean_tokens", "lasttoken", "cls_token"):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{method}": True}))
        info = describe(tmp_path)
        assert (info.architecture, info.tasks) == (architecture, tasks)
    (tmp_path / "modules.json").write_text(json.dumps([*POOLED, {"type": "st.Dense", "path": "2_Dense"}]))
    assert describe(tmp_path).tasks in (("generate",), ("embed",))


def test_rerankers_say_which_tokens_judge(tmp_path: Path) -> None:
    decoder = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    write(tmp_path, CONFIG | decoder)
    (tmp_path / "modules.json").write_text(json.dumps([POOLED[0], {"type": "st.LogitScore", "path": "1_LogitScore"}]))
    (tmp_path / "1_LogitScore").mkdir()
    stated = tmp_path / "1_LogitScore" / "config.json"
    stated.write_text(json.dumps({"true_token_id": 5, "false_token_id": 4}))
    info = describe(tmp_path)
    assert info.tasks == ("generate", "embed")
    assert info.config["sentence_embedding"] == {
        "pooling_method": "last",
        "normalizes": False,
        "other_modules": [],
        "label_token_ids": [4, 5],
    }
    stated.write_text(json.dumps({"true_token_id": 5}))
    assert describe(tmp_path).tasks == ("generate",), "a single token makes no share"
    stated.write_text(json.dumps({"true_token_id": "yes", "false_token_id": 4}))
    with pytest.raises(ModelFormatError, match="the tokens of its score are .4, 'yes'., but must be ids of two tokens"):
        describe(tmp_path)


def test_cross_encoders_say_what_scores_go_through(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    settings = tmp_path / "config_sentence_transformers.json"
    settings.write_text(json.dumps({"activation_fn": "torch.nn.modules.linear.Identity"}))
    stated = describe(tmp_path).config["sentence_transformers"]
    assert stated == {"activation_fn": "torch.nn.modules.linear.Identity"}
    settings.write_text(json.dumps({"activation_fn": 5}))
    with pytest.raises(ModelFormatError, match="'activation_fn' is 5, but must be the name of a class"):
        describe(tmp_path)
