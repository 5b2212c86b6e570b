"""How tensors of GGUF files differ from those of Hugging Face checkpoints, and what undoes it.

Legend: H query heads, G heads of keys and values (or groups of heads), D entries of a head, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from hardpoint_model_io.formats.gguf_record import Recompute, Reorder, Reshape

__all__ = [
    "AS_CONVOLUTION",
    "AS_ROW",
    "AS_VECTOR",
    "DECAY_LOG",
    "DECAY_LOG_VECTOR",
    "FUSED_QKV",
    "PAIRED_KEYS",
    "PAIRED_QUERIES",
    "SUBTRACT_ONE",
    "TRANSPOSE",
    "delta_groups",
    "latent_up_projection",
]

Config = Mapping[str, Any]


def _unpaired(config: Config, count: int, heads: str) -> np.ndarray:
    """Neighbors that rotate together (a0 b0 a1 b1 ...) back to the two halves of each head (a0 a1 ... b0 b1 ...)."""
    num_heads = config[heads]
    if count % (2 * num_heads):
        raise ValueError(f"{count} rows, which do not divide into {num_heads} heads of pairs")
    return np.arange(count).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _grouped(config: Config, count: int) -> np.ndarray:
    """All queries [H * D], keys [G * D] and values [G * D] back to groups: of each its queries, its key, its value."""
    num_heads, num_groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, rest = divmod(count, num_heads + 2 * num_groups)
    if rest or num_heads % num_groups:
        raise ValueError(f"{count} rows, which are no {num_heads} heads of queries and {num_groups} of keys and values")
    rows = np.arange(count)
    queries, keys, values = np.split(rows, [num_heads * size, (num_heads + num_groups) * size])
    return np.concatenate([part.reshape(num_groups, -1) for part in (queries, keys, values)], axis=1).reshape(-1)


def delta_groups(config: Config, count: int) -> np.ndarray:
    """Queries, keys and values of all groups, and behind them all gates, back to groups: of each its query, its key,
    the values of its heads and their gates."""
    num_groups, num_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, values = num_groups * config["linear_key_head_dim"], num_heads * config["linear_value_head_dim"]
    if count != 2 * (keys + values) or num_heads % num_groups:
        raise ValueError(f"{count} rows, not the {2 * (keys + values)} of queries, keys, values and gates")
    parts = np.split(np.arange(count), np.cumsum([keys, keys, values]))
    return np.concatenate([part.reshape(num_groups, -1) for part in parts], axis=1).reshape(-1)


def latent_up_projection(config: Config, parts: list[np.ndarray]) -> np.ndarray:
    """Of each head the matrix that makes its key [latent, plain], turned around, and that of its value [value, latent]:
    back to one over the other, head by head, [H * (plain + value), latent]."""
    keys, values = parts
    num_heads = config["num_attention_heads"]
    latent = config["kv_lora_rank"]
    if keys.shape[:2] != (num_heads, latent) or values.shape != (num_heads, config["v_head_dim"], latent):
        raise ValueError(f"shapes {list(keys.shape)} and {list(values.shape)}, not those of {num_heads} heads")
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, latent)


def _decay_log(stored: np.ndarray) -> np.ndarray:
    """The file holds what states decay by, ``-exp(log)``."""
    if not np.all(stored < 0):
        raise ValueError("values that are not below 0, which decays are")
    return np.log(-stored)


def _convolution(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != 2:
        raise ValueError(f"shape {list(shape)}, not one row of weights for each channel")
    return shape[0], 1, shape[1]


def _vector(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (prod(shape),)


PAIRED_QUERIES = Reorder(lambda config, count: _unpaired(config, count, "num_attention_heads"))
PAIRED_KEYS = Reorder(lambda config, count: _unpaired(config, count, "num_key_value_heads"))
FUSED_QKV = Reorder(_grouped)
SUBTRACT_ONE = Recompute(lambda stored: stored - np.float32(1))
TRANSPOSE = Recompute(lambda stored: np.ascontiguousarray(stored.T))
DECAY_LOG = Recompute(_decay_log)
DECAY_LOG_VECTOR = Recompute(lambda stored: _decay_log(stored).reshape(-1))
AS_CONVOLUTION = Reshape(_convolution)
AS_VECTOR = Reshape(_vector)
AS_ROW = Reshape(lambda shape: (1, *shape) if len(shape) == 1 else shape)
