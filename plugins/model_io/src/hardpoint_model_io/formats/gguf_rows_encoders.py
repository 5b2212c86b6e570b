"""GGUF architectures of encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufArray, GgufFile
from hardpoint_model_io.formats.gguf_config import token_id
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField, Restore
from hardpoint_model_io.formats.gguf_rope import rope_scaling
from hardpoint_model_io.formats.gguf_stems import SENTENCE_FIELD

__all__ = ["ENCODER_ROWS"]

_SIZES = (
    MetadataField("embedding_length", "hidden_size", int, required=True),
    MetadataField("block_count", "num_hidden_layers", int, required=True),
    MetadataField("feed_forward_length", "intermediate_size", int, required=True),
    MetadataField("attention.head_count", "num_attention_heads", int, required=True),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
)
_BERT_FIELDS = (*_SIZES, MetadataField("attention.layer_norm_epsilon", "layer_norm_eps", float, required=True))
_MODERN_FIELDS = (
    *_SIZES,
    MetadataField("attention.layer_norm_epsilon", "norm_eps", float, required=True),
    MetadataField("attention.sliding_window", "local_attention", int, required=True),
    MetadataField("rope.freq_base", "global_rope_theta", float, required=True),
    MetadataField("rope.freq_base_swa", "local_rope_theta", float, default=10_000.0),
)
_BERT_STEMS = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.attn_q": "attention.self.query",
    "blk.attn_k": "attention.self.key",
    "blk.attn_v": "attention.self.value",
    "blk.attn_output": "attention.output.dense",
    "blk.attn_output_norm": "attention.output.LayerNorm",
    "blk.ffn_up": "intermediate.dense",
    "blk.ffn_down": "output.dense",
    "blk.layer_output_norm": "output.LayerNorm",
}
_ROBERTA_LABELS = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
_MODERN_STEMS = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
    "blk.attn_norm": "attn_norm",
    "blk.attn_qkv": "attn.Wqkv",
    "blk.attn_output": "attn.Wo",
    "blk.ffn_norm": "mlp_norm",
    "blk.ffn_up": "mlp.Wi",
    "blk.ffn_down": "mlp.Wo",
    # What labels are made of, or words guessed by, which embeddings do without.
    "cls": "head.dense",
    "cls.norm": "head.norm",
}
_LABELS = "cls.output.weight"
_JUDGES = ("embed", "classify")
_DEFAULT_PADDING = 1
"""Of RoBERTa and those that follow it."""


def _complete_types(metadata: Metadata, config: dict[str, Any]) -> None:
    """How many kinds of tokens there are."""
    types = metadata.file.tensors.get("token_types.weight")
    if types is None or len(types.shape) != 2:
        raise ModelFormatError(f"{metadata.path}: the tensor 'token_types.weight' is missing or not a matrix")
    config["type_vocab_size"] = types.shape[0]


def _refuse_labels(metadata: Metadata, config: dict[str, Any]) -> None:
    """Of a cross-encoder that is a BERT converters leave out the layer between first token and labels."""
    del config
    if metadata.has("cls.weight", _LABELS):
        raise UnsupportedModelError(
            f"{metadata.path}: a GGUF file of a BERT with labels lacks its pooler, without which scores are others; "
            "use the checkpoint in safetensors"
        )


def _complete_positions(metadata: Metadata, config: dict[str, Any]) -> None:
    """Positions of RoBERTa are counted from behind the padding's id; files hold those alone that are used."""
    found = token_id(metadata.file, "padding_token_id")
    config["pad_token_id"] = _DEFAULT_PADDING if found is None else found
    config["max_position_embeddings"] += _num_unused(config)


def _num_unused(config: Mapping[str, Any]) -> int:
    return int(config["pad_token_id"]) + 1


def _complete_labels(metadata: Metadata, config: dict[str, Any]) -> None:
    """As many labels as rows, with their names where the file has them."""
    scores = metadata.file.tensors[_LABELS]
    count = 1 if len(scores.shape) == 1 else scores.shape[0]
    names = [f"LABEL_{number}" for number in range(count)]
    if isinstance(metadata.raw("classifier.output_labels"), GgufArray):
        stored = metadata.file.strings(metadata.key("classifier.output_labels"))
        if len(stored) != count:
            raise ModelFormatError(
                f"{metadata.path}: metadata {metadata.key('classifier.output_labels')!r} names {len(stored)} labels, "
                f"but {_LABELS!r} has {count} rows"
            )
        names = [name.decode("utf-8", "replace") for name in stored]
    config["id2label"] = {str(number): name for number, name in enumerate(names)}
    config.pop(SENTENCE_FIELD, None)


def _complete_modern(metadata: Metadata, config: dict[str, Any]) -> None:
    # There are two bases, each under a name of its own.
    if rope_scaling(metadata, {**config, "rope_theta": config["global_rope_theta"]}) is not None:
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('rope.scaling.type')!r} stretches positions, which is not "
            "supported for 'modern-bert'"
        )
    config["hidden_activation"] = metadata.text("hidden_activation") or "gelu"
    for field, suffix in (("norm_bias", "token_embd_norm.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        config[field] = metadata.has(suffix)
    pattern, num_layers = "attention.sliding_window_pattern", config["num_hidden_layers"]
    if isinstance(metadata.raw(pattern), GgufArray):
        windowed = metadata.per_layer(pattern, num_layers)
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in windowed]
    else:
        config["global_attn_every_n_layers"] = metadata.integer(pattern, 3)


def _complete_modern_labels(metadata: Metadata, config: dict[str, Any]) -> None:
    """The file does not say which state is judged; its readers take the mean of all."""
    config["classifier_pooling"] = "mean"
    config["classifier_bias"] = metadata.has("cls.bias")


def _written_as(vocabulary: str, *, labels: bool = False) -> Callable[[GgufFile], bool]:
    """Whether a file has a ``vocabulary``, by which alone the members of the family are told apart, and labels."""

    def applies(file: GgufFile) -> bool:
        return file.metadata.get("tokenizer.ggml.model") == vocabulary and (not labels or _LABELS in file.tensors)

    return applies


_BERT = GgufArchitecture(
    gguf="bert",
    architecture="BertModel",
    model_type="bert",
    stems=_BERT_STEMS,
    fields=_BERT_FIELDS,
    constants={"hidden_act": "gelu"},
    completions=(_complete_types, _refuse_labels),
    blocks="encoder.layer",
    tasks=("embed",),
    looks_both_ways=True,
)


def _follower(name: str, model_type: str, vocabulary: str) -> tuple[GgufArchitecture, GgufArchitecture]:
    """Rows of an encoder that follows RoBERTa, with labels and without."""
    alone = replace(
        _BERT,
        architecture=f"{name}Model",
        model_type=model_type,
        transforms={"position_embd": Restore(_num_unused)},
        completions=(_complete_types, _complete_positions),
        applies=_written_as(vocabulary),
    )
    judging = replace(
        alone,
        architecture=f"{name}ForSequenceClassification",
        stems=_BERT_STEMS | _ROBERTA_LABELS,
        completions=(*alone.completions, _complete_labels),
        applies=_written_as(vocabulary, labels=True),
        tasks=_JUDGES,
    )
    return judging, alone


_MODERN = GgufArchitecture(
    gguf="modern-bert",
    architecture="ModernBertModel",
    model_type="modernbert",
    stems=_MODERN_STEMS,
    fields=_MODERN_FIELDS,
    completions=(_complete_modern,),
    blocks="layers",
    tasks=("embed",),
    looks_both_ways=True,
)
ENCODER_ROWS = (
    *_follower("Roberta", "roberta", "gpt2"),
    *_follower("XLMRoberta", "xlm-roberta", "t5"),
    _BERT,
    replace(
        _MODERN,
        architecture="ModernBertForSequenceClassification",
        stems=_MODERN_STEMS | {"cls.output": "classifier"},
        completions=(*_MODERN.completions, _complete_modern_labels, _complete_labels),
        applies=lambda file: _LABELS in file.tensors,
        tasks=_JUDGES,
    ),
    _MODERN,
)
