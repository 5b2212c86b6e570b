"""What is shipped here keeps the contracts of its kinds, and the rules for all plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint.testing.hash_suite import HashSuite
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite
from hardpoint.testing.kv_layout_suite import KVLayoutSuite
from hardpoint.testing.scheduler_suite import SchedulerSuite
from hardpoint.testing.scheduling_policy_suite import SchedulingPolicySuite


class _Complete:
    """What our schedulers declare, whatever the policy."""

    preempts: ClassVar[bool] = True
    caches_prefixes: ClassVar[bool] = True
    deadlines: ClassVar[bool] = True
    unchunked: ClassVar[bool] = True
    kv_events: ClassVar[bool] = True
    pools: ClassVar[bool] = True
    max_inflight_steps: ClassVar[int] = 4


class TestFcfs(_Complete, SchedulerSuite):
    plugin: ClassVar[str | None] = "fcfs"


@pytest.mark.slow
class TestPriority(_Complete, SchedulerSuite):
    plugin: ClassVar[str | None] = "priority"


@pytest.mark.slow
class TestFairShareScheduler(_Complete, SchedulerSuite):
    plugin: ClassVar[str | None] = "policy"
    options: ClassVar[Mapping[str, Any]] = {"policy": "fair_share"}


class TestSha256(HashSuite):
    plugin: ClassVar[str | None] = "sha256"
    entry: ClassVar[str | None] = "hardpoint_scheduling.kv_cache.hashing:create_sha256"


class TestXxhash(HashSuite):
    plugin: ClassVar[str | None] = "xxhash"
    entry: ClassVar[str | None] = "hardpoint_scheduling.kv_cache.xxhash128:create_xxhash"


class TestLayerOutermost(KVLayoutSuite):
    plugin: ClassVar[str | None] = "layer_outermost"
    windows: ClassVar[bool] = True


class TestBlockOutermost(KVLayoutSuite):
    plugin: ClassVar[str | None] = "block_outermost"
    windows: ClassVar[bool] = True


class TestFullAttention(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "full_attention"


@pytest.mark.slow
class TestFcfsPolicy(SchedulingPolicySuite):
    plugin: ClassVar[str | None] = "fcfs"


@pytest.mark.slow
class TestPriorityPolicy(SchedulingPolicySuite):
    plugin: ClassVar[str | None] = "priority"


class TestFairShare(SchedulingPolicySuite):
    plugin: ClassVar[str | None] = "fair_share"
    options: ClassVar[Mapping[str, Any]] = {"weights": {"tenant 1": 2.5}, "default_weight": 0.5}
