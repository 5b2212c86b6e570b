"""Layers into groups that share one block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces import FullAttentionSpec, KVCacheGroup, KVCacheSpec, spec_to_wire


def merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """One spec for layers of one group (R1.29).

    Full-attention specs may differ in window and chunk size as long as at most one window or one chunk size occurs;
    everything else must be equal. Raises ``ConfigError`` otherwise.
    """
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    plain = {_without_window(spec) for spec in specs}
    if len(plain) > 1:
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


def group_layers(specs: Mapping[str, KVCacheSpec]) -> list[tuple[tuple[str, ...], KVCacheSpec]]:
    """Groups in order of their first layer: names and merged spec.

    Layers group by equal spec. Full-attention layers without a window join those of the first window, since both hold
    every block; layers with another window or a chunk size form their own group.
    """
    groups: list[list[str]] = []
    for name, spec in specs.items():
        for group in groups:
            if _mergeable([*(specs[member] for member in group), spec]):
                group.append(name)
                break
        else:
            groups.append([name])
    return [(tuple(group), merge_specs([specs[name] for name in group])) for group in groups]


def wire_groups(groups: Sequence[tuple[tuple[str, ...], KVCacheSpec]]) -> tuple[KVCacheGroup, ...]:
    return tuple(KVCacheGroup(names, spec_to_wire(spec)) for names, spec in groups)


def _mergeable(specs: Sequence[KVCacheSpec]) -> bool:
    try:
        merge_specs(specs)
    except ConfigError:
        return False
    return True


def _without_window(spec: KVCacheSpec) -> KVCacheSpec:
    if type(spec) is FullAttentionSpec:
        return msgspec.structs.replace(spec, sliding_window=None, chunk_size=None)
    return spec


def _listing(specs: Sequence[KVCacheSpec]) -> str:
    return "; ".join(sorted({repr(spec) for spec in specs}))
