"""Scattering new keys and values into the cache by slot (R5.70 to R5.72).

The FlashAttention and FlashInfer packages have no such operation that skips negative slots. Triton's serves where it is
installed; plain operators are the same everywhere else.

Legend: T slots, K KV heads, D head size, B block size.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache

import torch

from hardpoint.interfaces.attention import AttentionLayerParams
from hardpoint_attention.triton.states import paged_states

__all__ = ["CacheWriter", "prefers_kernel", "write_by_kernel", "write_states"]


class CacheWriter:
    """Writes a layer's keys and values. ``prefers``: whether a device's cache is written by a kernel."""

    def __init__(self, params: AttentionLayerParams, prefers: Callable[[torch.device], bool] | None = None) -> None:
        self._params = params
        self._prefers = prefers or prefers_kernel

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See :func:`write_states`."""
        write = write_by_kernel if self._prefers(kv_cache.device) else write_states
        write(key, value, kv_cache, slot_mapping, self._params.key_scale, self._params.value_scale)


def prefers_kernel(device: torch.device) -> bool:
    """One kernel rather than many operators, on devices where Triton compiles."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def write_by_kernel(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """:func:`write_states` in one launch."""
    states = paged_states(kv_cache, key.shape[-1])
    scales = (key_scale, value_scale) if states.is_quantized else (None, None)
    launch = importlib.import_module("hardpoint_attention.triton.launch")
    launch.write(key, value, (states.keys, states.values), slot_mapping, scales=scales, limit=states.limit)


def write_states(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Write the first T of ``key`` and ``value`` [T or more, K, D] into ``kv_cache`` [blocks, K, B, 2 D].

    Negative slots are skipped without the host learning which: these tokens write back what the null block's first
    slot holds, which no token owns. So the operation may be captured. Scales (float32 [1] or [K]) divide what is
    stored in 8 bits; what does not fit becomes the largest value that does.
    """
    count = slot_mapping.shape[0]
    size = key.shape[-1]
    by_token = kv_cache.transpose(1, 2)
    block_size = kv_cache.shape[2]
    is_padding = (slot_mapping < 0).view(-1, 1, 1)
    slots = slot_mapping.clamp(min=0)
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - blocks * block_size
    for part, states, scale in (
        (by_token[..., :size], key[:count], key_scale),
        (by_token[..., size:], value[:count], value_scale),
    ):
        stored = _stored(states, part.dtype, scale)
        kept = part[blocks, offsets]
        part.index_put_((blocks, offsets), _choose(is_padding, kept, stored))


def _stored(states: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    if dtype.itemsize > 1:
        return states.to(dtype)
    real = states.float() if scale is None else states.float() / scale.view(1, -1, 1)
    largest = torch.finfo(dtype).max
    return real.clamp(-largest, largest).to(dtype)


def _choose(condition: torch.Tensor, kept: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    if kept.dtype.itemsize > 1:
        return torch.where(condition, kept, fresh)
    # Not every device chooses among 8-bit floats; their bytes will do.
    chosen = torch.where(condition, kept.view(torch.uint8), fresh.view(torch.uint8))
    return chosen.view(kept.dtype)
