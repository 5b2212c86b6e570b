"""How a folder's embeddings of whole texts are made, from the files that sentence-transformers keeps beside a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.files import MAX_JSON_BYTES, confined_path, read_bytes, read_json_object

__all__ = ["max_sentence_tokens", "sentence_settings"]

MODULES = "modules.json"
LIMITS = "sentence_bert_config.json"
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

    What no model plugin here computes is passed on by name, so that the plugin can refuse it. Raises
    ``ModelFormatError`` naming the file.
    """
    if MODULES not in artifact.files:
        return None
    modules = _modules(artifact)
    kinds = [module.kind for module in modules]
    pooling = next((module for module in modules if module.kind == "Pooling"), None)
    return {
        # Without a pooling module there is a vector per token, and no embedding of the whole.
        "pooling_method": None if pooling is None else _pooling_method(artifact, pooling),
        "normalizes": "Normalize" in kinds,
        "other_modules": [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")],
    }


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


def _pooling_method(artifact: ModelArtifact, module: _Module) -> str:
    """One method, or several joined by ``+`` whose vectors would lie behind one another."""
    name = f"{module.path}/config.json" if module.path else "config.json"
    if name not in artifact.files:
        raise ModelFormatError(
            f"{artifact.root}/{name} is missing, though {MODULES} says that it tells how to pool; download it as well"
        )
    path = confined_path(artifact.root, name)
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
