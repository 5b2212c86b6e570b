"""Encoders in GGUF files: names, sizes, pooling and the vocabulary, as the format's own converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hardpoint.errors import HardpointError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint_model_io.sources.package import PackageSource
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider
from hardpoint_model_io.tokenizers.hf import HuggingFaceTokenizerProvider
from hardpoint_model_io.weights.gguf import GgufWeightLoader
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

AsArtifact = Callable[[Path], ModelArtifact]
GgufWriter = Callable[..., Path]
METADATA: dict[str, Any] = {
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 12,
    "attention.head_count": 2,
    "context_length": 32,
    "attention.layer_norm_epsilon": 1e-12,
    "attention.causal": False,
    "pooling_type": 1,
}
TOKENS = [
    "[PAD]",
    "[unused0]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "\u2581wing",
    "\u2581a",
    "s",
    "\u2581.",
    "lift",
    "\u2581up",
]
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def vocabulary(tokens: list[str], **changes: Any) -> dict[str, Any]:
    types = [3 if token.startswith("[") and "unused" not in token else 1 for token in tokens]
    ids = {"bos": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    roles = {f"ggml.{role}_token_id": tokens.index(text) for role, text in ids.items() if text in tokens}
    return {"ggml.model": "bert", "ggml.tokens": tokens, "ggml.token_type": types, **roles, **changes}


def tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), 8),
        "position_embd.weight": (32, 8),
        "token_types.weight": (2, 8),
        "blk.0.ffn_up.weight": (12, 8),
        "blk.0.ffn_up.bias": (12,),
        "blk.0.ffn_down.weight": (8, 12),
        "blk.0.ffn_down.bias": (8,),
    }
    for norm in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        shapes |= {f"{norm}.weight": (8,), f"{norm}.bias": (8,)}
    for linear in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes |= {f"blk.0.{linear}.weight": (8, 8), f"blk.0.{linear}.bias": (8,)}
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(gguf_file: GgufWriter, metadata: Mapping[str, Any] = METADATA, **changes: Any) -> Path:
    fields: dict[str, Any] = {"tensors": tensors(), "vocabulary": vocabulary(TOKENS), **changes}
    return gguf_file(architecture="bert", metadata=metadata, **fields)


def test_the_description(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    info = GgufWeightLoader().describe(as_artifact(write(gguf_file)))
    assert (info.architecture, info.tasks, info.max_position) == ("BertModel", ("embed",), 32)
    expected = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "vocab_size": len(TOKENS),
        "hidden_act": "gelu",
    }
    assert {name: info.config[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("pooling", "method"), [(1, "mean"), (2, "cls"), (3, "last"), (4, "type 4"), ("mean", "'mean'"), (0, None)]
)
def test_the_pooling(gguf_file: GgufWriter, as_artifact: AsArtifact, pooling: Any, method: str | None) -> None:
    """A method that makes no vector here is passed on by name, for the model to refuse."""
    info = GgufWeightLoader().describe(as_artifact(write(gguf_file, {**METADATA, "pooling_type": pooling})))
    stated = info.config.get("sentence_embedding", {"pooling_method": None})
    assert stated["pooling_method"] == method
    assert stated.get("normalizes", True)


def test_names_and_values(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    loader = GgufWeightLoader()
    info = loader.describe(as_artifact(write(gguf_file)))
    found = {tensor.name: tensor.data for tensor in loader.tensors(info)}
    stored, back = tensors(), {theirs: ours for ours, theirs in NAMES.items()}
    assert len(found) == len(stored)
    for name, values in stored.items():
        *block, stem, kind = name.split(".")
        prefix = "encoder.layer.0." if block else ""
        np.testing.assert_array_equal(found[f"{prefix}{back[stem]}.{kind}"], values)


@pytest.mark.parametrize("missing", ["token_types.weight", "token_embd.weight"])
def test_tables_that_every_file_has(gguf_file: GgufWriter, as_artifact: AsArtifact, missing: str) -> None:
    rest = {name: values for name, values in tensors().items() if name != missing}
    with pytest.raises(HardpointError, match=f"the tensor '{missing}' is missing"):
        GgufWeightLoader().describe(as_artifact(write(gguf_file, tensors=rest)))


def test_the_vocabulary(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    tokenizer = GgufTokenizerProvider().load(as_artifact(write(gguf_file)))
    ids = tokenizer.encode("Wings uplift a wing.")
    assert [TOKENS[one] for one in ids] == [
        *("[CLS]", "\u2581wing", "s", "\u2581up", "lift", "\u2581a", "\u2581wing", "\u2581.", "[SEP]")
    ]
    assert tokenizer.decode(ids) == "wings uplift a wing."
    assert tokenizer.encode("lift", add_special_tokens=False) == [TOKENS.index("[UNK]")], "no word begins so"
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.control_tokens == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}


def test_capitals_count_where_the_vocabulary_has_some(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    tokens = [*TOKENS[:-1], "\u2581Wing"]
    tokenizer = GgufTokenizerProvider().load(as_artifact(write(gguf_file, vocabulary=vocabulary(tokens))))
    assert tokenizer.encode("Wing wing", add_special_tokens=False) == [len(tokens) - 1, tokens.index("\u2581wing")]


def test_a_vocabulary_without_the_frame_is_refused(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    tokens = [token for token in TOKENS if token != "[SEP]"]
    with pytest.raises(HardpointError, match=r"tiny.gguf holds no \[SEP\]"):
        GgufTokenizerProvider().load(as_artifact(write(gguf_file, vocabulary=vocabulary(tokens))))


@pytest.fixture
def minilm() -> tuple[ModelArtifact, ModelInfo]:
    source = PackageSource()
    artifact = source.resolve("minilm", None) if "minilm" in source.known_names() else None
    if artifact is None:
        pytest.skip("the package of minilm is not installed; run `make setup`")
    return artifact, SafetensorsWeightLoader().describe(artifact)


@pytest.mark.slow
def test_minilm_as_a_gguf_file_is_the_same_model(
    minilm: tuple[ModelArtifact, ModelInfo], gguf_file: GgufWriter, as_artifact: AsArtifact
) -> None:
    """Its own tensors and vocabulary in the other format: equal values under equal names, equal ids of any text."""
    artifact, theirs = minilm
    stored, wanted = {}, {}
    for tensor in SafetensorsWeightLoader().tensors(theirs):
        *parts, kind = tensor.name.removeprefix("encoder.").split(".")
        block, stem = (f"blk.{parts[1]}.", ".".join(parts[2:])) if parts[0] == "layer" else ("", ".".join(parts))
        if stem in NAMES:
            stored[f"{block}{NAMES[stem]}.{kind}"] = wanted[tensor.name] = np.array(tensor.data)
    lines = Path(artifact.root, "vocab.txt").read_text(encoding="utf-8").splitlines()
    bracketed = [line.startswith("[") and line.endswith("]") for line in lines]
    tokens = [
        line if is_special else line[2:] if line.startswith("##") else f"\u2581{line}"
        for line, is_special in zip(lines, bracketed, strict=True)
    ]
    config = theirs.config
    metadata = {
        **METADATA,
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "context_length": config["max_position_embeddings"],
    }
    path = write(gguf_file, metadata, tensors=stored, vocabulary=vocabulary(tokens))
    loader = GgufWeightLoader()
    info = loader.describe(as_artifact(path))
    for field in ("hidden_size", "num_attention_heads", "layer_norm_eps", "type_vocab_size", "sentence_embedding"):
        assert info.config[field] == config[field]
    found = {tensor.name: tensor.data for tensor in loader.tensors(info)}
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    ours, reference = GgufTokenizerProvider().load(as_artifact(path)), HuggingFaceTokenizerProvider().load(artifact)
    for text in [
        "Hello world",
        "  two  spaces\n\nx",
        "héllo 🤖 日本語",
        "def f(x):\n    return 1",
        "<b>x</b>",
        "[MASK] [CLS]",
    ]:
        assert ours.encode(text) == reference.encode(text), text


def test_packed_encoders_are_unpacked(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    """Rows of 32 values and more may be stored in blocks."""
    wide = {"blk.0.ffn_down.weight": np.ones((8, 32), np.float32)}
    metadata = {**METADATA, "feed_forward_length": 32}
    path = write(gguf_file, metadata, tensors={**tensors(), **wide},
                 types={"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0})  # fmt: skip
    loader = GgufWeightLoader()
    found = {tensor.name: tensor for tensor in loader.tensors(loader.describe(as_artifact(path)))}
    np.testing.assert_allclose(found["encoder.layer.0.output.dense.weight"].data, wide["blk.0.ffn_down.weight"], 1e-2)
