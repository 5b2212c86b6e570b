"""Our scheduler, layout and hash keep the contracts of their kinds."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.interfaces import (
    HashContext,
    HashFunction,
    KVLayout,
    NoOptions,
    Scheduler,
    SchedulerContext,
)
from hardpoint.testing.hash_suite import HashSuite
from hardpoint.testing.kv_layout_suite import KVLayoutSuite
from hardpoint.testing.scheduler_suite import SchedulerSuite
from hardpoint_scheduling.kv_cache.hashing import create_sha256
from hardpoint_scheduling.kv_cache.layouts import LayerOutermostLayout
from hardpoint_scheduling.schedulers.fcfs import create as create_fcfs


class TestFcfs(SchedulerSuite):
    preempts: ClassVar[bool] = True
    caches_prefixes: ClassVar[bool] = True
    deadlines: ClassVar[bool] = True
    unchunked: ClassVar[bool] = True

    def create_scheduler(self, ctx: SchedulerContext) -> Scheduler:
        return create_fcfs(ctx, NoOptions())


class TestSha256(HashSuite):
    entry: ClassVar[str | None] = "hardpoint_scheduling.kv_cache.hashing:create_sha256"

    def create_hash(self, ctx: HashContext) -> HashFunction:
        return create_sha256(ctx, NoOptions())


class TestLayerOutermost(KVLayoutSuite):
    def create_layout(self) -> KVLayout:
        return LayerOutermostLayout()
