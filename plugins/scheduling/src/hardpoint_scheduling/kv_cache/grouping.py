"""Layers into groups that share one block table."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    KVPlanRequest,
    MixedSizeSpec,
    MLASpec,
    SlidingWindowSpec,
    spec_to_wire,
)
from hardpoint_scheduling.kv_cache.alignment import equal_pages
from hardpoint_scheduling.kv_cache.registry import SpecRegistry

HYBRID_SETTING = "--hybrid-kv-cache"

_Layers = dict[str, KVCacheSpec]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one block table. ``specs`` are theirs, one by one; ``spec`` stands for all of them."""

    names: tuple[str, ...]
    specs: tuple[KVCacheSpec, ...]
    spec: KVCacheSpec
    role: str = ""

    @classmethod
    def of(cls, specs: Mapping[str, KVCacheSpec], role: str = "") -> LayerGroup:
        """Raises ``ConfigError`` for layers that do not always need the same token slots."""
        layers = tuple(specs.values())
        merged = merge_specs(layers) if _mergeable(layers) else MixedSizeSpec.of(layers)
        return cls(tuple(specs), layers, merged, role)

    @property
    def page_bytes(self) -> int:
        """What one block takes in all layers of the group."""
        return sum(spec.page_size_bytes for spec in self.specs)


def merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """One spec for layers of one group (R1.29).

    Full-attention specs may differ in window and chunk size as long as at most one window or one chunk size occurs;
    everything else must be equal. Raises ``ConfigError`` otherwise.
    """
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    if len({isinstance(spec, MLASpec) for spec in specs}) > 1:
        raise ConfigError(f"latents (MLA) and keys with values cannot be described by one spec: {_listing(specs)}")
    if len({_without_window(spec) for spec in specs}) > 1:
        raise ConfigError(f"layers with different KV cache specs cannot share a group: {_listing(specs)}")
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    windows = {spec.sliding_window for spec in full} - {None}
    chunks = {spec.chunk_size for spec in full} - {None}
    if len(windows) > 1 or len(chunks) > 1 or (windows and chunks):
        raise ConfigError(
            f"layers of one group may have one sliding window or one chunk size, but these have windows "
            f"{sorted(w for w in windows if w)} and chunk sizes {sorted(c for c in chunks if c)}"
        )
    window, chunk = next(iter(windows), None), next(iter(chunks), None)
    return msgspec.structs.replace(full[0], sliding_window=window, chunk_size=chunk)


def keeping_all(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """R1.28: windows and chunks as properties of layers that keep every token, so that one block table serves all.

    Raises ``ConfigError`` for layers that cannot share one.
    """
    kept: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        kept[name] = spec
        if isinstance(spec, SlidingWindowSpec):
            kept[name] = FullAttentionSpec(**_shared_fields(spec), sliding_window=spec.sliding_window)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            kept[name] = FullAttentionSpec(**_shared_fields(spec), chunk_size=spec.chunk_size)
    by_key = {spec.slot_key: name for name, spec in kept.items()}
    if len(by_key) > 1:
        named = ", ".join(f"{name!r} ({type(kept[name]).__name__})" for name in by_key.values())
        raise ConfigError(
            f"these layers cannot share one block table: {named}; do not turn off {HYBRID_SETTING} for this model"
        )
    return kept


def group_layers(request: KVPlanRequest, registry: SpecRegistry) -> list[LayerGroup]:
    """Groups in order of their first layer.

    Layers that always need the same token slots form one group, whatever their pages, if ``registry`` names the same
    grouping base for them. Where a model has layers of several kinds, all pages are made equal and no group has more
    layers than :func:`_layers_per_group` says, so that groups can share memory: block n of one lies where block n of
    the others does. Raises what alignment raises.
    """
    kinds = _kinds(request.specs, request.roles, registry)
    if len(kinds) > 1:
        kinds = _kinds(equal_pages(request.specs, request.block_size_rules), request.roles, registry)
    size = _layers_per_group(list(kinds.values()), request)
    groups = []
    for (role, *_), layers in kinds.items():
        count = -(-len(layers) // size)
        # Every count-th layer: neighbors lie in different groups, so the ranks of a pipeline hold a share of each.
        parts = [list(layers)[start::count] for start in range(count)]
        groups += [LayerGroup.of({name: layers[name] for name in part}, role) for part in parts]
    return groups


def wire_groups(groups: Sequence[LayerGroup]) -> tuple[KVCacheGroup, ...]:
    return tuple(KVCacheGroup(group.names, spec_to_wire(group.spec), group.role) for group in groups)


def _kinds(
    specs: Mapping[str, KVCacheSpec], roles: Mapping[str, str], registry: SpecRegistry
) -> dict[tuple[str, Hashable, Hashable], _Layers]:
    """Layers by role, grouping base and the slots they need."""
    kinds: dict[tuple[str, Hashable, Hashable], _Layers] = {}
    for name, spec in specs.items():
        kind = (roles.get(name, ""), registry.grouping_base(type(spec)), spec.slot_key)
        kinds.setdefault(kind, {})[name] = spec
    return kinds


def _layers_per_group(kinds: Sequence[_Layers], request: KVPlanRequest) -> int:
    """The size of the groups whose blocks take the least memory for a sequence of the largest length.

    Small groups leave no room unused, large ones are fewer: within a tenth of the least, the largest size wins.
    """
    longest, in_flight = request.max_model_len, request.max_num_batched_tokens
    costs = {}
    for size in sorted({len(layers) for layers in kinds}):
        blocks = 0
        for layers in kinds:
            spec = next(iter(layers.values()))
            blocks += -(-len(layers) // size) * spec.max_blocks(longest, in_flight)
        costs[size] = size * blocks
    least = min(costs.values(), default=0)
    return max((size for size, cost in costs.items() if 10 * cost <= 11 * least), default=1)


def _shared_fields(spec: AttentionSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in AttentionSpec.__struct_fields__}


def _mergeable(specs: Sequence[KVCacheSpec]) -> bool:
    try:
        merge_specs(specs)
    except ConfigError:
        return False
    return True


def _without_window(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, FullAttentionSpec):
        return msgspec.structs.replace(spec, sliding_window=None, chunk_size=None)
    return spec


def _listing(specs: Sequence[KVCacheSpec]) -> str:
    return "; ".join(sorted({repr(spec) for spec in specs}))
