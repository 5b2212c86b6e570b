"""KV cache memory: flat byte buffers from the agreed plan, seen through one strided view per layer.

Byte address of (layer l, block b, head h, state s, byte c) in a tensor record's buffer (R1.40, R1.43)::

    offset + l * layer_stride + b * block_stride + (h * states + s) * content_bytes + c
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.kv_cache import AttentionSpec, KVCacheConfig, KVCacheSpec, KVCacheTensor

__all__ = ["KVMemory", "kernel_block_count", "layer_views"]


class KVMemory:
    """Owns the buffers. ``views`` holds per layer [blocks, heads, states, content], content in the spec's dtype
    (for attention: 2 * head size elements, keys before values)."""

    def __init__(
        self,
        config: KVCacheConfig,
        specs: Mapping[str, KVCacheSpec],
        device: torch.device,
        kernel_block_sizes: Mapping[str, int] | None = None,
        *,
        rank: int = 0,
    ) -> None:
        self.num_blocks = config.num_blocks
        records = config.tensors_of(rank)
        self.buffers = _allocate(records, device)
        self.views: dict[str, torch.Tensor] = {}
        self._pages: list[torch.Tensor] = []
        for record, buffer in zip(records, self.buffers, strict=True):
            self._pages += [
                page_view(buffer, record, index, specs[name], config.num_blocks)
                for index, name in enumerate(record.layer_names)
            ]
            self.views.update(layer_views(buffer, record, specs, config.num_blocks, kernel_block_sizes or {}))

    def zero_blocks(self, block_ids: np.ndarray) -> None:
        """Clear these blocks in every layer: stale values (NaN among them) of an earlier owner must not be read.

        A block id belongs to one group at a time, so clearing it everywhere harms nobody (I1.6).
        """
        if len(block_ids) == 0:
            return
        ids = torch.from_numpy(block_ids.astype(np.int64))
        for pages in self._pages:
            pages[ids.to(pages.device)] = 0


def _allocate(records: Sequence[KVCacheTensor], device: torch.device) -> list[torch.Tensor]:
    """One buffer per record; records with an equal buffer number get the same, sized for the largest."""
    sizes: dict[int, int] = {}
    for record in records:
        if record.buffer is not None:
            sizes[record.buffer] = max(record.size, sizes.get(record.buffer, 0))
    shared = {number: allocate_bytes(size, device) for number, size in sizes.items()}
    return [
        allocate_bytes(record.size, device) if record.buffer is None else shared[record.buffer] for record in records
    ]


def allocate_bytes(size: int, device: torch.device) -> torch.Tensor:
    """A zeroed int8 buffer. On the CPU pages become resident only when touched, so an unused cache costs no memory."""
    try:
        if device.type == "cpu":
            return torch.from_numpy(np.zeros(size, dtype=np.int8))
        return torch.zeros(size, dtype=torch.int8, device=device)
    except (MemoryError, RuntimeError) as error:
        advice = "lower --kv-cache-memory or --num-kv-blocks"
        raise ConfigError(f"a KV cache buffer of {size / 2**30:.1f} GiB cannot be had on {device}; {advice}") from error


def page_view(
    buffer: torch.Tensor, record: KVCacheTensor, index: int, spec: KVCacheSpec, num_blocks: int
) -> torch.Tensor:
    """int8 [blocks, page bytes] of the record's layer ``index``."""
    start = record.offset + index * record.layer_stride
    last = start + (num_blocks - 1) * record.block_stride + spec.page_size_bytes
    if last > record.size:
        raise ConfigError(
            f"layer {record.layer_names[index]!r} needs {last} bytes for {num_blocks} blocks, but its KV cache tensor "
            f"has {record.size}; the KV layout plugin planned it wrongly"
        )
    return buffer.as_strided((num_blocks, spec.page_size_bytes), (record.block_stride, 1), start)


def layer_views(
    buffer: torch.Tensor,
    record: KVCacheTensor,
    specs: Mapping[str, KVCacheSpec],
    num_blocks: int,
    kernel_block_sizes: Mapping[str, int],
) -> dict[str, torch.Tensor]:
    """Views of one record's layers, without a copy (R1.42)."""
    views = {}
    for index, name in enumerate(record.layer_names):
        spec = specs[name]
        ratio = kernel_block_count(name, record, spec, kernel_block_sizes.get(name, spec.block_size))
        pages = page_view(buffer, record, index, spec, num_blocks)
        # A split block keeps its bytes: each kernel block is a contiguous share of the dense page.
        states = spec.states_per_block // ratio
        block_stride = record.block_stride // ratio
        view = buffer.as_strided(
            (num_blocks * ratio, spec.heads, states, spec.content_bytes),
            (block_stride, states * spec.content_bytes, spec.content_bytes, 1),
            pages.storage_offset(),
        )
        views[name] = view.view(getattr(torch, spec.dtype)) if isinstance(spec, AttentionSpec) else view
    return views


def kernel_block_count(name: str, record: KVCacheTensor, spec: KVCacheSpec, kernel_block_size: int) -> int:
    """How many kernel blocks one manager block holds (R1.45, R1.46).

    Raises ``ConfigError`` where the kernel's size does not divide the manager's, or the layout pads its blocks.
    """
    if kernel_block_size == spec.block_size:
        return 1
    ratio, rest = divmod(spec.block_size, kernel_block_size)
    if rest or math.gcd(spec.states_per_block, ratio) != ratio:
        raise ConfigError(
            f"layer {name!r}: block size {spec.block_size} is no multiple of the attention kernel's "
            f"{kernel_block_size}; set --block-size to a multiple of it"
        )
    if record.block_stride != spec.page_size_bytes:
        raise ConfigError(
            f"layer {name!r}: blocks of {spec.block_size} tokens cannot be split into {ratio} kernel blocks of "
            f"{kernel_block_size}, because this KV layout puts {record.block_stride} bytes between blocks of "
            f"{spec.page_size_bytes}; set --block-size {kernel_block_size} or choose a layout with contiguous layers"
        )
    return ratio
