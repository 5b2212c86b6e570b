"""One layer's cache: its pages, and how stored elements stand for real keys and values.

Legend: K KV heads, D head size of keys, V of values, B block size, W elements per head and token, S key positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from hardpoint_attention.reference.groups import RowGroup

__all__ = ["FLOAT8_DTYPES", "SCALE_BYTES", "LayerCache", "Workspace"]

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_BYTES = 8
"""Behind the content of each head and token in int8 caches: float32 scales of its key and its value."""

INT8_MAX = 127


class Workspace:
    """Scratch memory that only grows, shared by the layers of one KV group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized [rows, columns]; valid until the next call."""
        size = rows * columns * dtype.itemsize
        if size > self._bytes.numel():
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes[:size].view(dtype).view(rows, columns)


class LayerCache:
    """A cache [blocks, K, B, W] as pages, one per block and head. ``scales`` of keys and of values: float32 [1] or [K].

    The dtype tells how it is stored: float8 divided by ``scales``; int8 with scales behind each entry; others as they
    are. Latent layers (MLA) cache no values, which are the first entries of the keys.

    Block b, head k is page ``b * pages_per_block + k``. Strides may be any; where pages are contiguous and evenly
    spaced, gathering them is fastest. Raises ``TypeError`` for other dtypes.
    """

    def __init__(
        self, kv_cache: torch.Tensor, head_size: int, scales: Sequence[torch.Tensor | None] = (None, None)
    ) -> None:
        _, self.num_kv_heads, block_size, self.width = kv_cache.shape
        self.dtype = kv_cache.dtype
        self.head_size = head_size
        self._scales = scales
        self.page_size = block_size * self.width
        self.page_bytes = self.page_size * kv_cache.element_size()
        if not self.dtype.is_floating_point and self.dtype is not torch.int8:
            raise TypeError(f"no way to read a KV cache of {self.dtype} is known; choose another --kv-cache-dtype")
        self._cache = kv_cache

    @cached_property
    def _apart(self) -> int | None:
        """How many pages a block is from the next, where pages are contiguous and evenly spaced."""
        shape, strides = self._cache.shape, self._cache.stride()
        apart = self.num_kv_heads if shape[0] == 1 else strides[0] // self.page_size
        expected = (apart * self.page_size, self.page_size, self.width, 1)
        # The stride of a dimension of size one means nothing (R5.42).
        real = zip(shape, strides, expected, strict=True)
        return None if any(stride != wanted for size, stride, wanted in real if size > 1) else apart

    @property
    def pages_per_block(self) -> int:
        return self.num_kv_heads if self._apart is None else self._apart

    def _gathered(self, pages: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """[pages * B, W]."""
        cache = _as_copyable(self._cache)
        if self._apart is None:
            blocks = torch.div(pages, self.num_kv_heads, rounding_mode="floor")
            return cache[blocks, pages - blocks * self.num_kv_heads].view(-1, self.width)
        rows = (cache.shape[0] - 1) * self._apart + self.num_kv_heads
        by_page = cache.as_strided((rows, self.page_size), (self.page_size, 1))
        scratch = workspace.take(pages.shape[0], self.page_size, cache.dtype)
        torch.index_select(by_page, 0, pages, out=scratch)
        return scratch.view(-1, self.width)

    @property
    def is_quantized(self) -> bool:
        return self.dtype.itemsize == 1

    @property
    def content_size(self) -> int:
        return self.width - SCALE_BYTES if self.dtype is torch.int8 else self.width

    @property
    def is_latent(self) -> bool:
        return self.content_size == self.head_size

    def read(
        self, group: RowGroup, value_size: int, dtype: torch.dtype, workspace: Workspace
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's keys [R, K, S, D] and values [R, K, S, V]; views of scratch that the next call overwrites.

        In ``dtype``, or in float32 from quantized caches, so that no rounding is added to theirs.
        """
        pages = group.pages
        if pages is None:
            raise RuntimeError("a group without pages has nothing in the cache")
        entries = self._gathered(pages, workspace)
        if group.stale is not None:
            entries.index_fill_(0, group.stale, 0)
        states = entries.view(group.num_rows, self.num_kv_heads, -1, self.width)[:, :, : group.num_keys]
        keys, values = self._split(states, value_size)
        if self.dtype is torch.int8:
            scales = states[..., self.content_size :].contiguous().view(torch.float32)
            return keys.float() * scales[..., :1], values.float() * scales[..., 0 if self.is_latent else 1, None]
        if self.is_quantized:
            key_scale, value_scale = self._scales
            value_scale = key_scale if self.is_latent else value_scale
            return self._scaled(keys, key_scale), self._scaled(values, value_scale)
        return keys.to(dtype), values.to(dtype)

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store ``key`` [T, K, D] and ``value`` [T, K, V] at the slots of the mapping, whose length counts; none where
        it is negative."""
        count = slot_mapping.shape[0]
        real = [key[:count]] if self.is_latent else [key[:count], value[:count]]
        states = self._encoded(real)
        is_real = slot_mapping >= 0
        if not bool(is_real.all()):
            slot_mapping, states = slot_mapping[is_real], states[is_real]
        block_size = self._cache.shape[2]
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        places = (blocks, slot_mapping - blocks * block_size)
        _as_copyable(self._cache).transpose(1, 2).index_put_(places, _as_copyable(states))

    def _split(self, states: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.dtype in FLOAT8_DTYPES:
            states = states.view(self.dtype)
        size = self.head_size
        if self.is_latent:
            return states[..., :size], states[..., :value_size]
        return states[..., :size], states[..., size : self.content_size]

    def _scaled(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return stored.float() if scale is None else stored.float() * scale.float().view(1, -1, 1, 1)

    def _encoded(self, real: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the cache holds of these parts: [T, K, W] in its dtype."""
        if self.dtype is torch.int8:
            scales = [part.float().abs().amax(dim=-1, keepdim=True) / INT8_MAX for part in real]
            # A latent has one scale, and room for two.
            scales += [scales[0]] * (2 - len(scales))
            stored = [_to_int8(part, scale) for part, scale in zip(real, scales, strict=False)]
            return torch.cat((*stored, torch.cat(scales, dim=-1).view(torch.int8)), dim=-1)
        if self.dtype in FLOAT8_DTYPES:
            return torch.cat([self._to_float8(*pair) for pair in zip(real, self._scales, strict=False)], dim=-1)
        return (real[0] if len(real) == 1 else torch.cat(list(real), dim=-1)).to(self.dtype)

    def _to_float8(self, part: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        scaled = part.float() if scale is None else part.float() / scale.float().view(1, -1, 1)
        largest = torch.finfo(self.dtype).max
        # Conversion alone would make NaN or infinity of what is too large.
        return scaled.clamp(-largest, largest).to(self.dtype).view(torch.uint8)


def _to_int8(part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    divisor = torch.where(scale == 0, 1.0, scale)
    return (part.float() / divisor).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def _as_copyable(states: torch.Tensor) -> torch.Tensor:
    """float8 seen as bytes, which every device can gather and scatter."""
    return states.view(torch.uint8) if states.dtype in FLOAT8_DTYPES else states
