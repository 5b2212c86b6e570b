"""From a description of a model to its class in ``transformers``, built without memory; and what cannot be run at all.

Only classes of the library itself are built: code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_transformers_models.interception import SHAPES_ONLY
from hardpoint_transformers_models.refusal import OWN_ATTENTION, refusal, told

__all__ = ["build_on_meta", "causal_names", "refuse_architecture", "require_known"]

ATTENDING = frozenset({"full_attention", "sliding_attention"})
"""The kinds of layers that keep keys and values and nothing else."""
GROWING_ROTATIONS = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the longest sequence of a batch: a token's values would depend
on its neighbors', and those that were cached would no longer fit."""
CODE_FIELD = "auto_map"
OURS_TO_SAY = (
    *("model_type", CODE_FIELD, "quantization_config", "compression_config"),
    *("return_dict", "use_return_dict", "torchscript"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "use_cache"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal", "use_kernels"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "gradient_checkpointing"),
)
"""Fields about running a model, not about the model: code and kernels to fetch, other results, how weights are stored.
The worker decides on all of that. And the model's type, which its class knows: the library looks rules up by it."""
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000
"""Each is built, if without memory, before any tensor is looked for."""
MAX_EXPERTS = 1 << 17
"""The names of all of them are listed, and some are built one by one."""
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
MIXERS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.RNNBase)


def build_on_meta(info: ModelInfo, dtype: torch.dtype) -> Any:
    """The architecture's ``PreTrainedModel`` on torch's device without memory.

    Raises ``UnsupportedModelError`` for one that cannot be run this way, with the reason; ``ModelFormatError`` for a
    configuration that its class refuses.
    """
    require_known(info)
    model_class = getattr(transformers, info.architecture)
    if getattr(model_class, "_is_stateful", False):
        raise refusal(info.architecture, "its layers keep a state that is no keys and values")
    config = _config_of(model_class, info)
    refuse_architecture(info.architecture, config)
    try:
        with torch.device("meta"):
            model = model_class._from_config(
                config, dtype=dtype, attn_implementation=SHAPES_ONLY, experts_implementation=SHAPES_ONLY
            )
    except Exception as error:
        if SHAPES_ONLY in str(error):
            raise refusal(info.architecture, OWN_ATTENTION) from error
        raise ModelFormatError(
            f"{info.architecture}: transformers {transformers.__version__} builds no model from the configuration of "
            f"{info.artifact.name!r}: {told(error)}"
        ) from error
    _refuse_modules(info.architecture, model)
    return model.eval().requires_grad_(False)


def refuse_architecture(architecture: str, config: Any) -> None:
    """Raise ``UnsupportedModelError`` for what the configuration tells already."""
    reason = ""
    if getattr(config, "is_encoder_decoder", False):
        reason = "it has an encoder, whose output layers attend to; only decoders of text run this way"
    elif parts := _models_within(config):
        reason = f"it is composed of several models ({', '.join(parts)}); only decoders of text run this way"
    elif others := sorted(set(getattr(config, "layer_types", None) or ()) - ATTENDING):
        reason = f"it has layers of the kinds {', '.join(others)}; only {', '.join(sorted(ATTENDING))} run this way"
    elif getattr(config, "hidden_size_per_layer_input", None):
        reason = "its layers look tokens up in tables of their own (hidden_size_per_layer_input)"
    if reason:
        raise refusal(architecture, reason)


def _models_within(config: Any) -> list[str]:
    """Parts of a configuration that describe models. Others, which only group settings, are of no type."""
    parts = getattr(config, "sub_configs", None) or {}
    return sorted(name for name, kind in parts.items() if getattr(kind, "model_type", None) != "")


def require_known(info: ModelInfo) -> None:
    """Raise ``UnsupportedModelError`` for an architecture that is no causal model of the library."""
    name = info.architecture
    if name in causal_names():
        return
    code = f"; the code that comes with it ({CODE_FIELD}) is never run" if info.config.get(CODE_FIELD) else ""
    raise UnsupportedModelError(
        f"nothing installed runs the architecture {name!r} of {info.artifact.name!r}: no causal model of transformers "
        f"{transformers.__version__} has that name{code}; install a distribution that provides the entry point "
        f"hardpoint.model.v1:{name}, or a newer transformers if that has it; `hardpoint models list` "
        "names the architectures with a plugin"
    )


def causal_names() -> set[str]:
    """The classes that the installed library has for causal models."""
    found: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        found.update((names,) if isinstance(names, str) else names)
    return found


def _config_of(model_class: Any, info: ModelInfo) -> Any:
    _check_fields(model_class, info)
    fields = {name: value for name, value in info.config.items() if name not in OURS_TO_SAY}
    if isinstance(fields.get("rope_parameters"), Mapping):
        # Derived from it by the loader, for models that know the older names only.
        fields = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    try:
        return model_class.config_class.from_dict(fields)
    except Exception as error:
        raise ModelFormatError(
            f"{info.architecture}: transformers {transformers.__version__} does not take the configuration of "
            f"{info.artifact.name!r}: {told(error)}"
        ) from error


def _check_fields(model_class: Any, info: ModelInfo) -> None:
    """Of what is absent the library makes a size of its own, and an unknown activation it does not name."""
    kind = model_class.config_class
    others = getattr(kind, "attribute_map", {})
    for size in SIZES:
        is_told = any(info.config.get(name) is not None for name in (size, others.get(size, size)))
        if not is_told and not isinstance(getattr(kind, size, None), property):
            raise ModelFormatError(f"{info.architecture}: config field {size!r} is absent; the file is incomplete")
    for name, value in info.config.items():
        if type(value) is int and value > _largest(name, others):
            raise ModelFormatError(
                f"{info.architecture}: config field {name!r} is {value}; at most {_largest(name, others)} is understood"
            )
    for name in ACTIVATIONS:
        value = info.config.get(name)
        if value is not None and not (isinstance(value, str) and value in ACT2FN):
            raise UnsupportedModelError(
                f"{info.architecture}: config field {name!r} is {value!r:.120}; transformers "
                f"{transformers.__version__} has {', '.join(sorted(ACT2FN))}"
            )


def _largest(name: str, others: Mapping[str, str]) -> int:
    """What a whole number may be at most: numbers of layers and experts are work, sizes of matrices are not yet."""
    if name in ("num_hidden_layers", "num_layers", others.get("num_hidden_layers")):
        return MAX_LAYERS
    return MAX_EXPERTS if re.search(r"(num|n)_.*experts", name) else MAX_INTEGER


def _refuse_modules(architecture: str, model: Any) -> None:
    """Raise ``UnsupportedModelError`` for what only the modules tell."""
    base = model.base_model
    if base is model or model.get_output_embeddings() is None:
        raise refusal(architecture, "its head cannot be told from its layers")
    accepted = inspect.signature(base.forward).parameters
    for needed in ("inputs_embeds", "position_ids"):
        if needed not in accepted:
            raise refusal(architecture, f"its layers take no {needed}")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MIXERS):
            raise refusal(architecture, f"{name} is a {kind}, which keeps a state of its own from token to token")
        rotation = getattr(module, "rope_type", None)
        kinds = rotation.values() if isinstance(rotation, Mapping) else (rotation,)
        if growing := sorted({one for one in kinds if one in GROWING_ROTATIONS}):
            raise refusal(
                architecture,
                f"its rotary positions are of the kind {', '.join(growing)}, whose frequencies depend on the longest "
                "sequence of a batch",
            )
