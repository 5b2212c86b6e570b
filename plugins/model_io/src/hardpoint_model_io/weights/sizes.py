"""Holds a configuration against the tensors beside it, before anybody allocates memory on its word."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hardpoint.errors import ModelFormatError

__all__ = ["check_sizes"]

_OPTIONAL = (
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("n_shared_experts", "shared_intermediate_size", "type_vocab_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("mamba_expand", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
)
"""0 where an architecture has none of it, which only its own code can judge."""
_LENGTHS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *_OPTIONAL,
)
_MAX_SHOWN = 80
_SLACK = 16
"""Quantized checkpoints store up to this many values in one element: 2-bit codes in a 32-bit word."""


def check_sizes(config: Mapping[str, Any], shapes: Iterable[tuple[int, ...]], origin: str) -> None:
    """Raise ``ModelFormatError`` naming ``origin`` and the field that no model made of these tensors can have.

    Sizes that are merely wrong pass: where the weights are loaded, each tensor that does not fit is named.
    Fields that are absent, null or a list (one value per layer) are left to the architecture's own code.
    Without ``shapes`` the fields are checked for themselves alone.
    """
    shapes = list(shapes)
    text = config.get("text_config", config)
    sizes = {
        name: _size(text[name], name, origin) for name in (*_LENGTHS, "num_hidden_layers") if _is_given(text, name)
    }
    longest = max((length for shape in shapes for length in shape), default=1)
    for name, size in sizes.items() if shapes else ():
        if name == "num_hidden_layers" and size > len(shapes):
            raise _misfit(origin, name, size, f"the weights are only {len(shapes)} tensors")
        if name != "num_hidden_layers" and size > longest * _SLACK:
            raise _misfit(origin, name, size, f"no dimension of the weights is longer than {longest}")
    query, shared = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if query and shared and query % shared:
        raise ModelFormatError(
            f"{origin}: {query} attention heads do not divide evenly over {shared} key/value heads; download it again"
        )


def _is_given(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if name in _OPTIONAL and type(value) is int and value == 0:
        return False
    return value is not None and not isinstance(value, list)


def _size(value: Any, name: str, origin: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFormatError(f"{origin}: {name!r} is {json.dumps(value)[:_MAX_SHOWN]}, but must be a positive number")
    return value


def _misfit(origin: str, name: str, value: int, fact: str) -> ModelFormatError:
    return ModelFormatError(
        f"{origin}: {name!r} is {str(value)[:_MAX_SHOWN]}, but {fact}; configuration and weights do not belong "
        "together, download both again"
    )
