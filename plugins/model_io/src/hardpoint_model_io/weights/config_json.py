"""A model's description from ``config.json`` and ``generation_config.json``. Code the files refer to is never run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint_model_io.files import confined_path, read_json_object
from hardpoint_model_io.formats.gguf_stems import SENTENCE_FIELD
from hardpoint_model_io.weights.encoder_decoder import (
    DECODER_PROMPT,
    complete_sizes,
    decoder_prompt,
    is_encoder_decoder,
)
from hardpoint_model_io.weights.sentence import max_sentence_tokens, score_activation, sentence_settings
from hardpoint_model_io.weights.separator import separator_id

CONFIG = "config.json"
GENERATION = "generation_config.json"
MAX_VALUE = 1 << 31
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "max_target_positions",
    "max_seq_len",
)
_OLDER_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
}
"""What the first families called the sizes that all have."""
_POOLING_METHODS = ("cls", "last", "mean")
_JUDGING_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
_COUNTS_BEHIND_PADDING = ("camembert", "roberta", "xlm-roberta")
"""Model types whose table of positions is used from behind the padding's id on."""
_UNLIMITED = ("mamba", "mamba2", "falcon_mamba")
"""Kinds of models whose layers know no positions, and whose files name no limit."""
_UNLIMITED_POSITIONS = 1 << 18
"""What these are served up to: far more than they were trained on, and no more than tables by position can bear."""
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072}
}
"""By kind of language model what files of models that see images leave out, and everybody has to know."""
_GENERATIVE_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def describe_config(artifact: ModelArtifact, loader: str, dtype: str | None) -> ModelInfo:
    """``dtype``: storage dtype found in the weights, or None to take it from the configuration.

    Raises ``ModelFormatError`` naming the file and field.
    """
    if CONFIG not in artifact.files:
        raise ModelFormatError(
            f"{artifact.root}/{CONFIG} is missing; a model folder needs it beside its weights, download it as well"
        )
    path = str(confined_path(artifact.root, CONFIG))
    config = read_json_object(confined_path(artifact.root, CONFIG))
    generation = {}
    if GENERATION in artifact.files:
        generation = read_json_object(confined_path(artifact.root, GENERATION))
    text = _text_config(config, path)
    # One spelling for model code: the newer files nest the rotary settings, the older ones have names of their own.
    _flatten_rope(text)
    _complete(text)
    generation.pop(DECODER_PROMPT, None)
    if is_encoder_decoder(config):
        complete_sizes(config)
    else:
        _name_sizes(text)
    vocab_size = _positive(text, ("vocab_size",), path)
    bos = _token_ids(text.get("bos_token_id"), "bos_token_id", vocab_size, path)
    architecture = _architecture(config, path)
    max_position = _max_position(text, path) - unused_positions(config)
    if max_position < 1:
        raise ModelFormatError(f"{path}: 'pad_token_id' leaves no positions for tokens; the file is damaged")
    config.pop(SENTENCE_FIELD, None)
    if (sentence := sentence_settings(artifact)) is not None:
        config[SENTENCE_FIELD] = sentence
        max_position = min(max_position, max_sentence_tokens(artifact) or max_position)
    if architecture.endswith(_JUDGING_SUFFIXES):
        if _needs_separator(config):
            config["sep_token_id"] = separator_id(artifact)
        if (activation := score_activation(artifact)) is not None:
            config["sentence_transformers"] = {"activation_fn": activation}
    if is_encoder_decoder(config):
        generation[DECODER_PROMPT] = decoder_prompt(config, generation, vocab_size, path)
    return ModelInfo(
        artifact=artifact,
        architecture=architecture,
        config=config,
        max_position=max_position,
        vocab_size=vocab_size,
        dtype=dtype or _config_dtype(config, text),
        loader=loader,
        eos_token_ids=_end_tokens(generation, config, text, vocab_size, artifact.root),
        bos_token_id=bos[0] if bos else None,
        generation=generation,
        tasks=("generate",) if is_encoder_decoder(config) else _tasks(architecture, sentence),
    )


def _tasks(architecture: str, sentence: Mapping[str, Any] | None) -> tuple[str, ...]:
    """``sentence``: what the folder's files say about embeddings. No embeddings are better than others than those."""
    if architecture.endswith(_JUDGING_SUFFIXES):
        return ("embed", "classify")
    if not architecture.endswith(_GENERATIVE_SUFFIXES):
        return ("embed",)
    is_known = sentence is None or (sentence["pooling_method"] in _POOLING_METHODS and not sentence["other_modules"])
    return ("generate", "embed") if is_known else ("generate",)


def without_head(info: ModelInfo, tensor_names: Collection[str]) -> ModelInfo:
    """A decoder that was saved to embed is named by the one that generates, and mostly stored without its head."""
    is_tied = bool(info.config.get("tie_word_embeddings"))
    lacks_head = SENTENCE_FIELD in info.config and not is_tied and "lm_head.weight" not in tensor_names
    if not (lacks_head and info.architecture.endswith("ForCausalLM")):
        return info
    architecture = f"{info.architecture.removesuffix('ForCausalLM')}Model"
    return msgspec.structs.replace(info, architecture=architecture, tasks=("embed",))


def _needs_separator(config: Mapping[str, Any]) -> bool:
    """Whether tokens of a pair's two texts are of different types."""
    types = config.get("type_vocab_size")
    return config.get("sep_token_id") is None and isinstance(types, int) and types > 1


def unused_positions(config: Mapping[str, Any]) -> int:
    """Entries of the table of positions that no token of a text has."""
    if config.get("model_type") not in _COUNTS_BEHIND_PADDING:
        return 0
    padding = config.get("pad_token_id", 1)
    return padding + 1 if isinstance(padding, int) and not isinstance(padding, bool) and padding >= 0 else 2


def _architecture(config: Mapping[str, Any], path: str) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnsupportedModelError(f"{path}: 'architectures' is {names!r}, but must name the model's architecture")
    return names[0]


def _text_config(config: dict[str, Any], path: str) -> dict[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ModelFormatError(f"{path}: 'text_config' must be an object")
    return text


def _complete(text: dict[str, Any]) -> None:
    kind = text.get("model_type")
    for name, value in _LEFT_OUT.get(kind, {}).items() if isinstance(kind, str) else ():
        if text.get(name) is None:
            text[name] = value


def _flatten_rope(config: dict[str, Any]) -> None:
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    if "rope_theta" in parameters:
        config.setdefault("rope_theta", parameters["rope_theta"])
    if parameters.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", {key: value for key, value in parameters.items() if key != "rope_theta"})


def _max_position(text: Mapping[str, Any], path: str) -> int:
    if text.get("model_type") in _UNLIMITED and all(text.get(key) is None for key in _POSITION_KEYS):
        return _UNLIMITED_POSITIONS
    return _positive(text, _POSITION_KEYS, path)


def _name_sizes(config: dict[str, Any]) -> None:
    """Add the usual names; fields that are there already stay as they are."""
    for name, others in _OLDER_NAMES.items():
        given = next((config[other] for other in others if config.get(other) is not None), None)
        if given is not None and config.get(name) is None:
            config[name] = given


def _positive(config: Mapping[str, Any], keys: tuple[str, ...], path: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_VALUE:
                raise ModelFormatError(f"{path}: {key!r} is {json.dumps(value)[:80]}, but must be a positive number")
            return value
    raise ModelFormatError(f"{path}: none of the fields {', '.join(keys)} is set; the file is incomplete")


def _config_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(value := source.get(key), str):
                return value.removeprefix("torch.")
    return "float32"


def _end_tokens(
    generation: Mapping[str, Any], config: Mapping[str, Any], text: Mapping[str, Any], vocab_size: int, root: str
) -> tuple[int, ...]:
    """Generation config first, then config: each id once, in that order."""
    found: list[int] = []
    for source, name in ((generation, GENERATION), (config, CONFIG), (text, CONFIG)):
        found += _token_ids(source.get("eos_token_id"), "eos_token_id", vocab_size, f"{root}/{name}")
    return tuple(dict.fromkeys(found))


def _token_ids(value: Any, key: str, vocab_size: int, path: str) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ModelFormatError(f"{path}: {key!r} holds {token!r}, not an id below the vocabulary size {vocab_size}")
    return list(ids)
