"""From a byte budget to a memory plan."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.errors import ConfigError
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
from hardpoint_scheduling.kv_cache.grouping import group_layers, wire_groups
from hardpoint_scheduling.kv_cache.registry import load_registry

_Groups = Sequence[tuple[tuple[str, ...], KVCacheSpec]]


class LayerOutermostLayout(KVLayout):
    """Each layer's blocks lie together: ``block_stride`` is a page, ``layer_stride`` a page times the block count.

    Every group gets one tensor of its own, so a block id addresses one page in the layers of the group that owns it.
    Pages of different groups may therefore differ in size: only a layout whose groups share memory has to make them
    equal (see ``alignment``), and to do so before the workers build layers of the block size it arrives at.
    """

    def __init__(self, plugins: PluginAccess | None = None) -> None:
        self._plugins = plugins

    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        load_registry(self._plugins, _kinds(request, self._plugins)).check(request.specs)
        groups = group_layers(request.specs)
        if not groups:
            return KVCacheConfig(num_blocks=1, groups=(), tensors=())
        num_blocks = request.num_blocks
        if num_blocks is None:
            num_blocks = request.budget_bytes // _bytes_per_block(groups)
        _check_one_sequence_fits(request, groups, num_blocks)
        return KVCacheConfig(
            num_blocks=num_blocks,
            groups=wire_groups(groups),
            tensors=tuple(_tensor(names, spec, num_blocks) for names, spec in groups),
        )


@plugin("kv_layout")
def create_layer_outermost(ctx: PluginContext, options: NoOptions) -> KVLayout:
    """Entry point ``layer_outermost``."""
    del options
    return LayerOutermostLayout(ctx.plugins)


def _kinds(request: KVPlanRequest, plugins: PluginAccess | None) -> set[str]:
    """The installed plugins that the layers name; a spec without one is left to the registry's check."""
    installed = set(plugins.names("kv_cache_spec")) if plugins is not None else set()
    return {spec.kind for spec in request.specs.values()} & installed


def _tensor(names: tuple[str, ...], spec: KVCacheSpec, num_blocks: int) -> KVCacheTensor:
    layer_bytes = spec.page_size_bytes * num_blocks
    return KVCacheTensor(
        size=layer_bytes * len(names), layer_names=names, layer_stride=layer_bytes, block_stride=spec.page_size_bytes
    )


def _bytes_per_block(groups: _Groups) -> int:
    """Memory that one more block id costs: a page in every layer."""
    return sum(spec.page_size_bytes * len(names) for names, spec in groups)


def _blocks_for(groups: _Groups, max_model_len: int, max_in_flight: int) -> int:
    """Blocks one sequence can hold, and the null block."""
    return 1 + sum(spec.max_blocks(max_model_len, max_in_flight) for _, spec in groups)


def _check_one_sequence_fits(request: KVPlanRequest, groups: _Groups, num_blocks: int) -> None:
    in_flight = request.max_num_batched_tokens
    needed = _blocks_for(groups, request.max_model_len, in_flight)
    if needed <= num_blocks:
        return
    needed_bytes = needed * _bytes_per_block(groups)
    fitting = _longest_fitting(request, groups, num_blocks)
    shorter = f"set --max-model-len {fitting} or less, or " if fitting else ""
    if request.num_blocks is None:
        have = f"the budget of {request.budget_bytes:,} bytes holds {max(num_blocks, 0)}"
        more = f"--kv-cache-memory {needed_bytes} or more"
    else:
        have = f"--num-kv-blocks allows {num_blocks}"
        more = f"--num-kv-blocks {needed} or more ({needed_bytes:,} bytes)"
    raise ConfigError(
        f"one sequence of --max-model-len {request.max_model_len} tokens needs {needed} KV cache blocks (the null "
        f"block included), but {have}; {shorter}set {more}"
    )


def _longest_fitting(request: KVPlanRequest, groups: _Groups, num_blocks: int) -> int:
    """The largest context length that fits ``num_blocks``; 0 when not even one token does."""
    fits, fails = 0, request.max_model_len
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _blocks_for(groups, middle, request.max_num_batched_tokens) <= num_blocks:
            fits = middle
        else:
            fails = middle
    return fits
