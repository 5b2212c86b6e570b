"""Our scheduler, KV cache spec, layout and hash keep the contracts of their kinds, and the rules for all plugins."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.hash_suite import HashSuite
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite
from hardpoint.testing.kv_layout_suite import KVLayoutSuite
from hardpoint.testing.scheduler_suite import SchedulerSuite


class TestFcfs(SchedulerSuite):
    plugin: ClassVar[str | None] = "fcfs"
    preempts: ClassVar[bool] = True
    caches_prefixes: ClassVar[bool] = True
    deadlines: ClassVar[bool] = True
    unchunked: ClassVar[bool] = True


class TestSha256(HashSuite):
    plugin: ClassVar[str | None] = "sha256"
    entry: ClassVar[str | None] = "hardpoint_scheduling.kv_cache.hashing:create_sha256"


class TestXxhash(HashSuite):
    plugin: ClassVar[str | None] = "xxhash"
    entry: ClassVar[str | None] = "hardpoint_scheduling.kv_cache.xxhash128:create_xxhash"


class TestLayerOutermost(KVLayoutSuite):
    plugin: ClassVar[str | None] = "layer_outermost"


class TestFullAttention(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "full_attention"
