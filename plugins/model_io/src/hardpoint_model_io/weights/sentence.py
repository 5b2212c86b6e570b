"""How a folder's embeddings of whole texts are made, from the files that sentence-transformers keeps beside a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.files import MAX_JSON_BYTES, confined_path, read_bytes, read_json_object

__all__ = ["max_sentence_tokens", "score_activation", "sentence_settings"]

MODULES = "modules.json"
LIMITS = "sentence_bert_config.json"
SETTINGS = "config_sentence_transformers.json"
_METHODS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMED = {"lasttoken": "last"}


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        """The class without its package, which was moved more than once."""
        return self.type.rpartition(".")[2]


def sentence_settings(artifact: ModelArtifact) -> dict[str, Any] | None:
    """``pooling_method``, ``normalizes`` and ``other_modules`` of the folder, or None without ``modules.json``.

    Rerankers that answer yes or no have ``label_token_ids`` as well, in the order no, yes.

    What no model plugin here computes is passed on by name, so that the plugin can refuse it. Raises
    ``ModelFormatError`` naming the file.
    """
    if MODULES not in artifact.files:
        return None
    modules = _modules(artifact)
    kinds = [module.kind for module in modules]
    settings: dict[str, Any] = {
        # Without a pooling module there is a vector per token, and no embedding of the whole.
        "pooling_method": None,
        "normalizes": "Normalize" in kinds,
        "other_modules": [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")],
    }
    for module in modules:
        if module.kind == "Pooling" and settings["pooling_method"] is None:
            settings["pooling_method"] = _pooling_method(artifact, module)
        elif module.kind == "LogitScore" and (labels := _label_tokens(artifact, module)):
            settings |= {"pooling_method": "last", "label_token_ids": labels}
            settings["other_modules"].remove("LogitScore")
    return settings


def score_activation(artifact: ModelArtifact) -> str | None:
    """The class of the function that a cross-encoder's scores go through, or None where the folder does not say."""
    if SETTINGS not in artifact.files:
        return None
    path = confined_path(artifact.root, SETTINGS)
    value = read_json_object(path).get("activation_fn")
    if value is not None and not isinstance(value, str):
        raise ModelFormatError(f"{path}: 'activation_fn' is {value!r}, but must be the name of a class")
    return value


def max_sentence_tokens(artifact: ModelArtifact) -> int | None:
    """The longest text that the model was made for, or None where the folder does not say."""
    if LIMITS not in artifact.files:
        return None
    path = confined_path(artifact.root, LIMITS)
    value = read_json_object(path).get("max_seq_length")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelFormatError(f"{path}: 'max_seq_length' is {value!r}, but must be a positive number or null")
    return value


def _modules(artifact: ModelArtifact) -> list[_Module]:
    path = confined_path(artifact.root, MODULES)
    try:
        return msgspec.json.decode(read_bytes(path, MAX_JSON_BYTES), type=list[_Module])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFormatError(
            f"{path} is not a list of modules, each with a 'type': {error}; download the file again"
        ) from None


def _module_config(artifact: ModelArtifact, module: _Module) -> Path:
    name = f"{module.path}/config.json" if module.path else "config.json"
    if name not in artifact.files:
        raise ModelFormatError(
            f"{artifact.root}/{name} is missing, though {MODULES} says that it tells how to pool; download it as well"
        )
    return confined_path(artifact.root, name)


def _label_tokens(artifact: ModelArtifact, module: _Module) -> list[int] | None:
    """Tokens for no and yes, or None for a score that is made of one token alone."""
    path = _module_config(artifact, module)
    config = read_json_object(path)
    found: list[Any] = [config.get(f"{name}_token_id") for name in ("false", "true")]
    if found[0] is None:
        return None
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in found):
        raise ModelFormatError(f"{path}: the tokens of its score are {found!r:.100}, but must be ids of two tokens")
    return found


def _pooling_method(artifact: ModelArtifact, module: _Module) -> str:
    """One method, or several joined by ``+`` whose vectors would lie behind one another."""
    path = _module_config(artifact, module)
    methods = list(_stated(read_json_object(path)))
    if not methods:
        raise ModelFormatError(f"{path} turns on no pooling; known are {', '.join(_METHODS)}")
    return "+".join(methods)


def _stated(config: Mapping[str, Any]) -> Iterator[str]:
    named = config.get("pooling_mode")
    if isinstance(named, str):
        yield _NAMED.get(named, named)
        return
    yield from (method for field, method in _METHODS.items() if config.get(field) is True)
