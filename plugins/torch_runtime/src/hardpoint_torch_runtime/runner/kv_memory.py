"""KV cache memory: flat byte buffers from the agreed plan, seen through one strided view per layer.

Byte address of (layer l, block b, head h, state s, byte c) in a tensor record's buffer (R1.40), where the strides of
head and state follow from the record's order of dimensions (R1.43)::

    offset + l * layer_stride + b * block_stride + h * head_stride + s * state_stride + c
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.kv_cache import AttentionSpec, KVCacheConfig, KVCacheSpec, KVCacheTensor
from hardpoint.interfaces.kv_cache_specs import MambaSpec

__all__ = ["KVMemory", "LayerPlace", "byte_strides", "state_tensors"]

HUGE_PAGES_FROM = 32 << 20
"""Bytes of a buffer from which the part of a huge page that stays unused does not matter."""
DIMENSIONS = ("layer", "block", "head", "state", "content")


class KVMemory:
    """Owns the buffers. ``views`` holds per layer [blocks, heads, states, content], content in the spec's dtype
    (for attention: 2 * head size elements, keys before values) or in bytes where the spec has none. ``states`` holds
    the tensors of each recurrent layer, [blocks, *shape], over the same bytes."""

    def __init__(
        self,
        config: KVCacheConfig,
        specs: Mapping[str, KVCacheSpec],
        device: torch.device,
        kernel_block_sizes: Mapping[str, int] | None = None,
        *,
        rank: int = 0,
    ) -> None:
        """``specs`` by layer as the plan grants them (``KVCacheConfig.layer_specs``); ``kernel_block_sizes`` where
        they differ from the plan's. Raises ``ConfigError`` for memory that cannot be had or seen this way."""
        self.num_blocks = config.num_blocks
        records = config.tensors_of(rank)
        self.buffers = _allocate(records, device)
        self.views: dict[str, torch.Tensor] = {}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        pages: dict[tuple[int, ...], torch.Tensor] = {}
        for record, buffer in zip(records, self.buffers, strict=True):
            for index, name in enumerate(record.layer_names):
                place = LayerPlace(record, index, specs[name], config.num_blocks, config.layout)
                self.views[name] = place.view(buffer, (kernel_block_sizes or {}).get(name))
                if isinstance(place.spec, MambaSpec):
                    self.states[name] = state_tensors(self.views[name], place.spec)
                seen = place.pages(buffer)
                # Groups that share memory have the same pages: clearing them once is enough.
                pages[seen.data_ptr(), *seen.stride()] = seen
        self._pages = tuple(pages.values())

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """``pairs`` int32 [C, 2]: the first block of each is copied to the second in every layer, pair after pair."""
        for source, destination in pairs.tolist():
            for pages in self._pages:
                pages[destination] = pages[source]

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
            return torch.frombuffer(_map_pages(size), dtype=torch.int8)[:size]
        return torch.zeros(size, dtype=torch.int8, device=device)
    except (MemoryError, OSError, RuntimeError) as error:
        advice = "lower --kv-cache-memory or --num-kv-blocks"
        raise ConfigError(f"a KV cache buffer of {size / 2**30:.1f} GiB cannot be had on {device}; {advice}") from error


def _map_pages(size: int) -> mmap.mmap:
    """Memory of this process alone, zeros. Asked for in huge pages where the system has them: the first use of a small
    one costs as much as computing what goes into it. Raises ``OSError`` where there is not as much."""
    found = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGES_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def byte_strides(
    order: Sequence[str], extents: Mapping[str, int], given: Mapping[str, int | None] | None = None
) -> dict[str, int]:
    """Strides by dimension: from the innermost of ``order`` outwards, each as far as all before it reach (R1.43).

    ``extents`` by dimension, that of the content in bytes. Strides in ``given`` replace the computed ones, and what
    lies further out builds on them. Raises ``ConfigError`` unless ``order`` names every dimension, the content last.
    """
    if sorted(order) != sorted(DIMENSIONS) or order[-1] != "content":
        raise ConfigError(
            f"a KV layout orders its dimensions as {', '.join(order)}; it must name each of {', '.join(DIMENSIONS)} "
            "once, with the content innermost: choose another --kv-layout"
        )
    strides: dict[str, int] = {}
    reach = 1
    for name in reversed(order):
        override = (given or {}).get(name)
        strides[name] = reach if override is None else override
        reach = strides[name] * extents[name]
    return strides


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where layer ``index`` of ``record`` lies, whose spec is the one that the plan grants. ``layout`` is for messages.

    Raises ``ConfigError`` when it does not fit the record.
    """

    record: KVCacheTensor
    index: int
    spec: KVCacheSpec
    num_blocks: int
    layout: str = ""

    def __post_init__(self) -> None:
        record, page = self.record, self.spec.page_size_bytes
        last = self.start + (self.num_blocks - 1) * record.block_stride + page
        if last > record.size:
            raise ConfigError(
                f"layer {self.name!r} needs {last} bytes for {self.num_blocks} blocks, but its KV cache tensor "
                f"has {record.size}; the KV layout plugin planned it wrongly"
            )

    @property
    def name(self) -> str:
        return self.record.layer_names[self.index]

    @property
    def start(self) -> int:
        """Byte at which block 0 begins."""
        return self.record.offset + self.index * self.record.layer_stride

    def pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """int8 [blocks, page bytes], padding included."""
        shape = (self.num_blocks, self.spec.page_size_bytes)
        return buffer.as_strided(shape, (self.record.block_stride, 1), self.start)

    def view(self, buffer: torch.Tensor, kernel_block_size: int | None = None) -> torch.Tensor:
        """[blocks, heads, states, content] without a copy (R1.42). A manager block is ``ratio`` kernel blocks, each a
        contiguous share of its page."""
        spec = self.spec
        ratio = self.kernel_block_count(kernel_block_size or spec.block_size)
        extents = {
            "layer": len(self.record.layer_names),
            "block": self.num_blocks * ratio,
            "head": spec.heads,
            "state": spec.states_per_block // ratio,
            "content": spec.content_bytes,
        }
        given = {"layer": self.record.layer_stride, "block": self.record.block_stride // ratio}
        strides = byte_strides(self.record.order, extents, given)
        axes = DIMENSIONS[1:]
        raw = buffer.as_strided([extents[n] for n in axes], [strides[n] for n in axes], self.start)
        # R1.44: bytes first, elements afterwards.
        return raw if not isinstance(spec, AttentionSpec) else self._as_elements(raw, spec)

    def _as_elements(self, raw: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        places = (raw.storage_offset(), *raw.stride()[:-1], raw.shape[-1])
        if any(place % dtype.itemsize for place in places):
            raise ConfigError(
                f"layer {self.name!r}: {spec.dtype} elements cannot start at every {math.gcd(*places)} bytes, as the "
                f"pages of {spec.page_size_bytes} bytes of KV layout {self.layout!r} would have it; choose another "
                "--kv-layout or --kv-cache-dtype"
            )
        return raw.view(dtype)

    def kernel_block_count(self, kernel_block_size: int) -> int:
        """How many kernel blocks one manager block holds (R1.45, R1.46).

        Raises ``ConfigError`` where the kernel's size does not divide the manager's, or pages do not lie back to back.
        """
        spec, stride = self.spec, self.record.block_stride
        if kernel_block_size == spec.block_size:
            return 1
        ratio, rest = divmod(spec.block_size, kernel_block_size)
        if rest or spec.states_per_block % ratio:
            raise ConfigError(
                f"layer {self.name!r}: block size {spec.block_size} is no multiple of the attention kernel's "
                f"{kernel_block_size}; set --block-size to a multiple of it"
            )
        if stride != spec.unpadded_page_size_bytes:
            raise ConfigError(
                f"layer {self.name!r}: KV layout {self.layout!r} puts {stride} bytes from one block to the next, but "
                f"a block holds {spec.unpadded_page_size_bytes}, so blocks of {spec.block_size} tokens cannot be split "
                f"into {ratio} kernel blocks of {kernel_block_size} tokens (ratio {ratio}); set --block-size "
                f"{kernel_block_size}, or choose a --kv-layout with contiguous layers such as layer_outermost"
            )
        return ratio


def state_tensors(view: torch.Tensor, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
    """The tensors of a recurrent layer's states, each [blocks, *shape], seen through its byte view
    int8 [blocks, 1, 1, content] (R1.32). Raises ``ConfigError`` for elements that would not be aligned."""
    tensors, start = [], 0
    for shape, name in zip(spec.shapes, spec.dtypes, strict=True):
        dtype: torch.dtype = getattr(torch, name)
        size = math.prod(shape) * dtype.itemsize
        if (view.storage_offset() + start) % dtype.itemsize or view.stride(0) % dtype.itemsize:
            raise ConfigError(
                f"a recurrent state's {name} tensor of shape {shape} begins at byte {start} of pages of "
                f"{view.stride(0)} bytes; pad the state to a multiple of {dtype.itemsize} or order larger dtypes first"
            )
        part = view[:, 0, 0, start : start + size].view(dtype)
        tensors.append(part.unflatten(1, shape))
        start += size
    return tuple(tensors)
