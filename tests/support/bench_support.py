"""Rigs for the scheduler benchmark whose schedulers need no installed plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hardpoint.interfaces import KVCacheConfig, Scheduler, SchedulerLimits
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint_bench.rig import Rig, Sizes

__all__ = ["BLOCK_SIZE", "make_rig"]

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Source:
    """A scheduler class in the place of an installed plugin."""

    scheduler: type[FakeScheduler] = FakeScheduler
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    name: str = "fake"
    label: str = "scheduler:fake (tests 1.0)"

    def create(self, limits: SchedulerLimits, kv_cache: KVCacheConfig) -> Scheduler:
        return self.scheduler(limits, num_blocks=kv_cache.num_blocks, block_size=BLOCK_SIZE)


def make_rig(
    sizes: Sizes,
    scheduler: type[FakeScheduler] = FakeScheduler,
    capabilities: Mapping[str, Any] | None = None,
    **limits: Any,
) -> Rig:
    """Blocks of four tokens; ``limits`` beyond those of ``sizes``."""
    settled = SchedulerLimits(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        **limits,
    )
    return Rig.around(Source(scheduler, capabilities or {}), settled, sizes.num_blocks, BLOCK_SIZE)
