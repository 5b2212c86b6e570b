"""GGUF files of encoders and of models with one: which architecture they are, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_writing import LLAMA_METADATA, add_value
from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.weights.gguf import GgufWeightLoader

AsArtifact = Callable[[Path], ModelArtifact]
GgufWriter = Callable[..., Path]
BERT: dict[str, Any] = {
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 12,
    "attention.head_count": 2,
    "context_length": 30,
    "attention.layer_norm_epsilon": 1e-5,
    "pooling_type": 4,
}
MODERN: dict[str, Any] = {**BERT, "attention.sliding_window": 128, "rope.freq_base": 160000.0}
T5: dict[str, Any] = {
    "embedding_length": 8,
    "block_count": 2,
    "feed_forward_length": 12,
    "attention.head_count": 2,
    "attention.key_length": 6,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.relative_buckets_count": 32,
    "decoder_start_token_id": 3,
}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "bert": {"token_embd.weight": (10, 8), "token_types.weight": (2, 8), "position_embd.weight": (30, 8)},
    "modern-bert": {"token_embd.weight": (10, 8)},
    "t5": {
        "token_embd.weight": (10, 8),
        "enc.blk.0.attn_q.weight": (12, 8),
        "enc.blk.0.attn_rel_b.weight": (32, 2),
        "dec.blk.1.cross_attn_o.weight": (8, 12),
        "dec.output_norm.weight": (8,),
    },
}
METADATA = {"bert": BERT, "modern-bert": MODERN, "t5": T5}
LABELS = {"cls.weight": (8, 8), "cls.bias": (8,), "cls.output.weight": (3, 8), "cls.output.bias": (3,)}


@pytest.fixture
def written(gguf_file: GgufWriter, as_artifact: AsArtifact) -> Callable[..., ModelArtifact]:
    """A file of ``architecture``: a few of its tensors, ``shapes`` of others, and changes to the metadata."""

    def write(
        architecture: str, vocabulary: str = "gpt2", shapes: dict[str, tuple[int, ...]] | None = None, **changes: Any
    ) -> ModelArtifact:
        generator = np.random.default_rng(0)
        all_shapes = {**SHAPES[architecture], **(shapes or {})}
        tensors = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in all_shapes.items()}
        metadata = {name: value for name, value in {**METADATA[architecture], **changes}.items() if value is not None}
        fields = {"ggml.model": vocabulary, "ggml.padding_token_id": 2}
        path = gguf_file(architecture=architecture, metadata=metadata, tensors=tensors, vocabulary=fields)
        return as_artifact(path)

    return write


@pytest.mark.parametrize(
    ("architecture", "vocabulary", "labels", "expected"),
    [
        ("bert", "bert", False, "BertModel"),
        ("bert", "gpt2", False, "RobertaModel"),
        ("bert", "gpt2", True, "RobertaForSequenceClassification"),
        ("bert", "t5", False, "XLMRobertaModel"),
        ("bert", "t5", True, "XLMRobertaForSequenceClassification"),
        ("modern-bert", "gpt2", False, "ModernBertModel"),
        ("modern-bert", "gpt2", True, "ModernBertForSequenceClassification"),
        ("t5", "t5", False, "T5ForConditionalGeneration"),
    ],
)
def test_vocabulary_and_labels_tell_which_one_it_is(
    written: Callable[..., ModelArtifact], architecture: str, vocabulary: str, labels: bool, expected: str
) -> None:
    info = GgufWeightLoader().describe(written(architecture, vocabulary, LABELS if labels else {}))
    assert info.architecture == expected
    assert ("id2label" in info.config) == labels
    assert info.tasks == (("generate",) if architecture == "t5" else ("embed", "classify") if labels else ("embed",))


def test_positions_that_were_cut_off_are_there_again(written: Callable[..., ModelArtifact]) -> None:
    loader = GgufWeightLoader()
    info = loader.describe(written("bert"))
    assert (info.max_position, info.config["max_position_embeddings"], info.config["pad_token_id"]) == (30, 33, 2)
    found = {tensor.name: tensor for tensor in loader.tensors(info)}["embeddings.position_embeddings.weight"]
    assert found.shape == (33, 8)
    assert not found.data[:3].any()
    assert found.data[3:].all()


def test_stacks_have_names_of_their_own(written: Callable[..., ModelArtifact]) -> None:
    loader = GgufWeightLoader()
    info = loader.describe(written("t5"))
    assert {tensor.name for tensor in loader.tensors(info)} == {
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "decoder.block.1.layer.1.EncDecAttention.o.weight",
        "decoder.final_layer_norm.weight",
    }
    assert info.generation == {"decoder_prompt_token_ids": [3]}
    expected = {"d_kv": 6, "num_decoder_layers": 2, "feed_forward_proj": "relu", "tie_word_embeddings": True}
    assert {name: info.config[name] for name in expected} == expected
    unsaid = loader.describe(written("t5", decoder_start_token_id=None, decoder_block_count=1))
    assert unsaid.generation == {"decoder_prompt_token_ids": [2]}, "answers begin with padding"
    assert unsaid.config["num_decoder_layers"] == 1


def test_a_head_that_is_the_embedding_once_more(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    words = np.random.default_rng(0).standard_normal((10, 8), dtype=np.float32)
    other = words.copy()
    other[9, 7] += 1
    for head, is_tied in ((words, True), (other, False)):
        path = gguf_file(architecture="t5", metadata=T5, vocabulary={"ggml.model": "t5"},
                         tensors={"token_embd.weight": words, "output.weight": head})  # fmt: skip
        assert GgufWeightLoader().describe(as_artifact(path)).config["tie_word_embeddings"] is is_tied


@pytest.mark.parametrize(
    ("architecture", "shapes", "changes", "error", "message"),
    [
        ("bert", LABELS, {"vocabulary": "bert"}, UnsupportedModelError, "lacks its pooler"),
        ("bert", {"cls.weight": (8, 8)}, {}, UnsupportedModelError, "'cls.weight' is not part"),
        ("bert", {"dec.blk.0.attn_q.weight": (8, 8)}, {}, UnsupportedModelError, "'dec.blk.0.attn_q.weight'"),
        ("bert", LABELS, {"classifier.output_labels": ["a"]}, ModelFormatError, "names 1 labels, but .* has 3 rows"),
        ("modern-bert", {}, {"rope.freq_base": None}, ModelFormatError, "modern-bert.rope.freq_base"),
        ("modern-bert", {}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, UnsupportedModelError,
         "stretches positions"),
        ("modern-bert", {}, {"attention.sliding_window_pattern": [True, False]}, ModelFormatError, "a count for each"),
        ("modern-bert", {}, {"attention.sliding_window_pattern": 0}, ModelFormatError, "sliding_window_pattern"),
        ("modern-bert", {}, {"hidden_activation": 3}, ModelFormatError, "hidden_activation"),
        ("t5", {"dec.blk.1.attn_rel_b.weight": (32, 2)}, {}, UnsupportedModelError, "dec.blk.1.attn_rel_b.*UMT5"),
        ("t5", {}, {"attention.value_length": 4}, UnsupportedModelError, "value_length' is 4"),
        ("t5", {}, {"decoder_start_token_id": 10}, ModelFormatError, r"\[10\]"),
        ("t5", {}, {"attention.relative_buckets_count": None}, ModelFormatError, "relative_buckets_count' is missing"),
        ("t5", {}, {"block_count": 20_000}, ModelFormatError, "more layers than any"),
        ("t5", {"blk.0.attn_q.weight": (8, 8)}, {}, UnsupportedModelError, "'blk.0.attn_q.weight' is not part"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(
    written: Callable[..., ModelArtifact],
    architecture: str,
    shapes: dict[str, tuple[int, ...]],
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=rf"tiny\.gguf.*{message}"):
        GgufWeightLoader().describe(written(architecture, shapes=shapes, **changes))


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("clip", None, "'clip' is the half of a model that sees or hears"),
        ("clip", "mmproj", "type 'mmproj'.* read from safetensors"),
        ("llama", "adapter", "type 'adapter'.* holds a LoRA adapter"),
        ("t5encoder", "model", "'t5encoder' is the encoder of a T5 alone"),
        ("llama-embed", None, "'llama-embed' is a Llama that looks both ways"),
        ("gemma-embedding", None, "'gemma-embedding' is a Gemma that looks both ways"),
        ("martian", None, "'martian' is not supported; supported are bert, bloom"),
    ],
)
def test_files_that_are_no_model_on_their_own_say_why(
    architecture: str, kind: str | None, message: str, tmp_path: Path, as_artifact: AsArtifact
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", architecture)
    if kind is not None:
        add_value(writer, "general.type", kind)
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=rf"part\.gguf.*{message}"):
        GgufWeightLoader().describe(as_artifact(tmp_path / "part.gguf"))


@pytest.mark.parametrize(
    ("pooling", "method", "tasks"),
    [
        (None, None, ("generate", "embed")),
        (0, None, ("generate", "embed")),
        (1, "mean", ("generate", "embed")),
        (3, "last", ("generate", "embed")),
        (4, "type 4", ("generate",)),
        ("mean", "'mean'", ("generate",)),
    ],
)
def test_decoders_embed_as_their_files_say(
    gguf_file: GgufWriter, as_artifact: AsArtifact, pooling: Any, method: str | None, tasks: tuple[str, ...]
) -> None:
    """None does in a way that it was not made for."""
    stated = {} if pooling is None else {"pooling_type": pooling}
    info = GgufWeightLoader().describe(as_artifact(gguf_file(metadata={**LLAMA_METADATA, **stated})))
    assert info.config.get("sentence_embedding", {}).get("pooling_method") == method
    assert info.tasks == tasks


def test_decoders_that_look_both_ways_are_refused(gguf_file: GgufWriter, as_artifact: AsArtifact) -> None:
    """They go by the names of those that do not."""
    told = gguf_file("causal.gguf", metadata={**LLAMA_METADATA, "attention.causal": True})
    assert GgufWeightLoader().describe(as_artifact(told)).architecture == "LlamaForCausalLM"
    path = gguf_file(metadata={**LLAMA_METADATA, "attention.causal": False})
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: metadata 'llama.attention.causal' is false"):
        GgufWeightLoader().describe(as_artifact(path))


QWEN3: dict[str, Any] = {**LLAMA_METADATA, "pooling_type": 4}
YES, NO = 3, 1


def reranker(
    gguf_file: GgufWriter,
    tensors: dict[str, np.ndarray],
    rows: Sequence[int] = (YES, NO),
    labels: Sequence[str] | None = ("yes", "no"),
) -> Path:
    """Of a head that is not tied converters keep these rows alone."""
    stored = {**tensors, "cls.output.weight": tensors["token_embd.weight"][list(rows)]}
    named = {} if labels is None else {"classifier.output_labels": list(labels)}
    return gguf_file(architecture="qwen3", metadata={**QWEN3, **named}, tensors=stored)


def test_rerankers_that_answer_have_two_labels(
    gguf_file: GgufWriter, as_artifact: AsArtifact, make_llama_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    loader, tensors = GgufWeightLoader(), make_llama_tensors()
    info = loader.describe(as_artifact(reranker(gguf_file, tensors)))
    assert (info.architecture, info.tasks) == ("Qwen3ForSequenceClassification", ("embed", "classify"))
    assert info.config["id2label"] == {"0": "no", "1": "yes"}
    assert "sentence_embedding" not in info.config, "scores are what it was made for"
    (scores,) = (tensor.data for tensor in loader.tensors(info) if tensor.name == "score.weight")
    np.testing.assert_array_equal(scores, tensors["token_embd.weight"][[NO, YES]])


@pytest.mark.parametrize("labels", [None, ["good", "bad"], ["no", "yes"]])
def test_other_labels_of_decoders_are_refused(
    gguf_file: GgufWriter,
    as_artifact: AsArtifact,
    make_llama_tensors: Callable[..., dict[str, np.ndarray]],
    labels: list[str] | None,
) -> None:
    path = reranker(gguf_file, make_llama_tensors(), labels=labels)
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: metadata 'qwen3.classifier.output_labels' names"):
        GgufWeightLoader().describe(as_artifact(path))


def test_answers_without_a_row_each_are_corrupt(
    gguf_file: GgufWriter, as_artifact: AsArtifact, make_llama_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    loader = GgufWeightLoader()
    info = loader.describe(as_artifact(reranker(gguf_file, make_llama_tensors(), (YES, NO, 2))))
    with pytest.raises(ModelFormatError, match=r"'cls.output.weight' has 3 rows, not one for 'yes' and one for 'no'"):
        list(loader.tensors(info))
