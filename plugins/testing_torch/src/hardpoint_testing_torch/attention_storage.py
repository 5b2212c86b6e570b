"""How a KV cache keeps keys and values, emulated: what is stored of real values, and what it stands for.

Legend: T tokens, K KV heads, D head size, V size of a head's values, W elements of one head and token in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardpoint.interfaces.kv_dtypes import KVQuantization, KVStorage, kv_storage

__all__ = ["SCALE_BYTES", "StoredStates"]

SCALE_BYTES = 8
"""Two float32 behind the content of ``PER_TOKEN_HEAD``: the key's scale and the value's."""


@dataclass(frozen=True, slots=True)
class StoredStates:
    """``kv_cache_dtype`` as :func:`kv_storage` reads it. Scales float32 [1] or [K]; None: 1.

    ``value_size``: V of latents, of which only keys are stored; None for keys and values side by side.
    """

    kv_cache_dtype: str
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    value_size: int | None = None

    @property
    def storage(self) -> KVStorage:
        return kv_storage(self.kv_cache_dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache's elements."""
        made: torch.dtype = getattr(torch, self.storage.dtype)
        return made

    @property
    def is_exact(self) -> bool:
        """False where stored values are only near the real ones, also for activations of the cache's own dtype."""
        return self.storage.quantization is KVQuantization.NONE

    def width(self, head_size: int) -> int:
        """W of keys and values of ``head_size``."""
        content = head_size if self.value_size is not None else 2 * head_size
        return content + (SCALE_BYTES if self.storage.quantization is KVQuantization.PER_TOKEN_HEAD else 0)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[T, K, W] in the cache's dtype of ``keys`` [T, K, D] and ``values`` [T, K, V]."""
        parts = [(keys, self.key_scale)]
        if self.value_size is None:
            parts.append((values, self.value_scale))
        if self.storage.quantization is KVQuantization.PER_TOKEN_HEAD:
            stored = [_to_int8(part) for part, _ in parts]
            scales = torch.cat([scale for _, scale in stored], dim=-1).contiguous()
            return torch.cat([*(content for content, _ in stored), scales.view(torch.int8)], dim=-1)
        return torch.cat([_cast(part, scale, self.dtype) for part, scale in parts], dim=-1)

    def decode(self, states: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys [T, K, D] and values [T, K, V] that ``states`` [T, K, W] stand for."""
        if self.storage.quantization is KVQuantization.PER_TOKEN_HEAD:
            scales = states[..., -SCALE_BYTES:].contiguous().view(torch.float32)
            content = states[..., :-SCALE_BYTES].float()
            return content[..., :head_size] * scales[..., :1], content[..., head_size:] * scales[..., 1:]
        keys = states[..., :head_size].float() * _factor(self.key_scale)
        if self.value_size is not None:
            return keys, keys[..., : self.value_size]
        return keys, states[..., head_size:].float() * _factor(self.value_scale)

    def round_trip(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they come out of the cache."""
        return self.decode(self.encode(keys, values), keys.shape[-1])

    def largest_error(self, real: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """How far what stands for each entry of ``real`` [T, K, D] may be off, being the nearest there is."""
        real = real.float().abs()
        if self.storage.quantization is KVQuantization.PER_TOKEN_HEAD:
            return (real.amax(-1, keepdim=True) / 127 * 0.51).expand_as(real)
        if not self.dtype.is_floating_point:
            return torch.full_like(real, 0.51)
        info, factor = torch.finfo(self.dtype), _factor(scale)
        beyond = (real - info.max * factor).clamp(min=0)
        return beyond + 0.51 * (real * info.eps + info.smallest_normal * info.eps * factor)

    def empty(self, num_blocks: int, heads: int, block_size: int, head_size: int) -> torch.Tensor:
        """A cache [blocks, K, block size, W] of what nobody may read: NaN, or numbers with NaN for their scales."""
        size = (num_blocks, heads, block_size, self.width(head_size))
        if self.dtype.is_floating_point:
            return torch.full(size, torch.nan).to(self.dtype)
        cache = torch.full(size, 99, dtype=self.dtype)
        if self.storage.quantization is KVQuantization.PER_TOKEN_HEAD:
            nothing = torch.full((*size[:-1], 2), torch.nan).view(self.dtype)
            cache[..., -SCALE_BYTES:] = nothing
        return cache


def _factor(scale: torch.Tensor | None) -> torch.Tensor | float:
    """Broadcasts over [T, K, D]."""
    return 1.0 if scale is None else scale.float().reshape(-1, 1)


def _cast(states: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Torch turns what is beyond a float8's range into NaN; caches keep the largest number instead."""
    if dtype.itemsize > 1:
        return states.to(dtype)
    info = torch.finfo(dtype)
    return (states.float() / _factor(scale)).clamp(info.min, info.max).to(dtype)


def _to_int8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Content int8 [T, K, D] and scales float32 [T, K, 1]."""
    real = states.float()
    scale = real.abs().amax(-1, keepdim=True) / 127
    content = torch.where(scale > 0, real / scale, 0).round()
    return content.to(torch.int8), scale
