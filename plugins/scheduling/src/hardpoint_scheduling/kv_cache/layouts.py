"""From a byte budget to a memory plan.

Where groups share memory, block n of every group is the same bytes. That is sound because a block id is owned by one
group at a time (I1.6), and it is what makes models with layers of several kinds cheap: no byte waits for a group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from hardpoint.interfaces import (
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    KVLayout,
    KVPlanRequest,
    NoOptions,
    PluginAccess,
    PluginContext,
    plugin,
)
from hardpoint_scheduling.kv_cache.grouping import LayerGroup, group_layers, keeping_all, wire_groups
from hardpoint_scheduling.kv_cache.registry import load_registry
from hardpoint_scheduling.kv_cache.sizing import bytes_per_block, check_one_sequence_fits, on_rank

SHARED_BUFFER = 0
"""The number of the buffer that several tensors of a plan share."""

_Run = tuple[tuple[str, ...], int]
"""Neighbors with pages of one size: their names and that size."""


class PagedLayout(KVLayout):
    """What both layouts have in common: groups, number of blocks, one plan per rank. ``name`` is for messages."""

    name: str

    def __init__(self, plugins: PluginAccess | None = None) -> None:
        self._plugins = plugins

    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        if not request.hybrid:
            request = replace(request, specs=keeping_all(request.specs))
        registry = load_registry(self._plugins, _kinds(request, self._plugins))
        registry.check(request.specs)
        groups = group_layers(request, registry)
        if not any(group.spec.max_blocks(request.max_model_len, request.max_num_batched_tokens) for group in groups):
            # Encoders keep nothing: the null block, which costs nothing either, serves all of their tables.
            return KVCacheConfig(num_blocks=1, groups=wire_groups(groups), tensors=(), layout=self.name)
        ranks = [on_rank(groups, names) for names in request.layers_by_rank] or [groups]
        num_blocks = request.num_blocks
        if num_blocks is None:
            num_blocks = min(request.budget_bytes // bytes_per_block(rank) for rank in ranks)
        check_one_sequence_fits(request, groups, max(map(bytes_per_block, ranks)), num_blocks)
        placed = [self._tensors(rank, num_blocks) for rank in ranks]
        return KVCacheConfig(
            num_blocks=num_blocks,
            groups=wire_groups(groups),
            tensors=() if request.layers_by_rank else placed[0],
            tensors_by_rank=tuple(placed) if request.layers_by_rank else (),
            layout=self.name,
        )

    def _tensors(self, groups: Sequence[LayerGroup], num_blocks: int) -> tuple[KVCacheTensor, ...]:
        """One record per run of equal pages; several groups share one buffer, and so do runs that are interleaved."""
        stride = bytes_per_block(groups)
        return tuple(
            record
            for group in groups
            for record in self.place(_runs(group.names, group.specs), stride, num_blocks, len(groups) > 1)
        )

    @abstractmethod
    def place(self, runs: Sequence[_Run], block_bytes: int, num_blocks: int, is_shared: bool) -> list[KVCacheTensor]:
        """Memory of one group from the start of its buffer, which holds ``block_bytes`` times ``num_blocks``."""


class LayerOutermostLayout(PagedLayout):
    """Each layer's blocks lie together: ``block_stride`` is a page, ``layer_stride`` a page times the block count."""

    name = "layer_outermost"

    def place(self, runs: Sequence[_Run], block_bytes: int, num_blocks: int, is_shared: bool) -> list[KVCacheTensor]:
        records, start = [], 0
        for names, page in runs:
            records.append(
                KVCacheTensor(
                    size=(start + page * len(names)) * num_blocks,
                    layer_names=names,
                    layer_stride=page * num_blocks,
                    block_stride=page,
                    offset=start * num_blocks,
                    buffer=SHARED_BUFFER if is_shared else None,
                )
            )
            # Runs that share with nobody get buffers of their own, which are easier to find room for.
            start += page * len(names) if is_shared else 0
        return records


class BlockOutermostLayout(PagedLayout):
    """Each block holds the pages of all layers: ``layer_stride`` is a page, ``block_stride`` the pages of all layers.

    One block is one range of bytes, which is what transfers and offloading want; kernel blocks must be whole blocks.
    """

    name = "block_outermost"

    def place(self, runs: Sequence[_Run], block_bytes: int, num_blocks: int, is_shared: bool) -> list[KVCacheTensor]:
        records, start = [], 0
        for names, page in runs:
            records.append(
                KVCacheTensor(
                    size=block_bytes * num_blocks,
                    layer_names=names,
                    layer_stride=page,
                    block_stride=block_bytes,
                    offset=start,
                    buffer=SHARED_BUFFER if is_shared or len(runs) > 1 else None,
                    order=("block", "layer", "head", "state", "content"),
                )
            )
            start += page * len(names)
        return records


@plugin("kv_layout", capabilities={"mixed": True, "windows": True})
def create_layer_outermost(ctx: PluginContext, options: NoOptions) -> KVLayout:
    """Entry point ``layer_outermost``."""
    del options
    return LayerOutermostLayout(ctx.plugins)


@plugin("kv_layout", capabilities={"mixed": True, "windows": True})
def create_block_outermost(ctx: PluginContext, options: NoOptions) -> KVLayout:
    """Entry point ``block_outermost``."""
    del options
    return BlockOutermostLayout(ctx.plugins)


def _kinds(request: KVPlanRequest, plugins: PluginAccess | None) -> set[str]:
    """The installed plugins that the layers name; a spec without one is left to the registry's check."""
    installed = set(plugins.names("kv_cache_spec")) if plugins is not None else set()
    return {spec.kind for spec in request.specs.values()} & installed


def _runs(names: Sequence[str], specs: Sequence[KVCacheSpec]) -> list[_Run]:
    """Layers by page size; sizes in the order in which they first occur."""
    first = {spec.page_size_bytes: place for place, spec in reversed(list(enumerate(specs)))}
    layers = sorted(zip(names, specs, strict=True), key=lambda layer: first[layer[1].page_size_bytes])
    runs = groupby(layers, key=lambda layer: layer[1].page_size_bytes)
    return [(tuple(name for name, _ in layers_of_size), page) for page, layers_of_size in runs]
