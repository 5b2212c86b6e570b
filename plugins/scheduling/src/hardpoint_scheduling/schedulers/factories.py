"""Entry points of kind ``scheduler``, and the check of the limits they get."""

from __future__ import annotations

import time
from collections.abc import Callable

from hardpoint.errors import ConfigError
from hardpoint.interfaces import NoOptions, Scheduler, SchedulerContext, SchedulerLimits, plugin
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.hash_seed import resolve_hash
from hardpoint_scheduling.kv_cache.registry import load_registry
from hardpoint_scheduling.schedulers.extensions import host_extensions
from hardpoint_scheduling.schedulers.policies.fcfs import FcfsPolicy
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from hardpoint_scheduling.schedulers.slots import SlotTable
from hardpoint_scheduling.schedulers.state import SchedulerState


def check_limits(limits: SchedulerLimits) -> None:
    """Raises ``ConfigError`` for limits that cannot work, naming the setting to change."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(limits, name) < 1:
            raise ConfigError(f"{name} is {getattr(limits, name)}; it must be at least 1")
    if limits.max_inflight_steps != 1:
        raise ConfigError(
            f"max_inflight_steps is {limits.max_inflight_steps}; scheduler 'fcfs' supports 1. "
            "Set max_inflight_steps to 1 or choose another --scheduler"
        )
    active = limits.max_num_active_seqs
    if active is not None and not 1 <= active <= limits.max_num_seqs:
        raise ConfigError(f"max_num_active_seqs is {active}; allowed: 1 to max_num_seqs ({limits.max_num_seqs})")
    if not 0.0 <= limits.watermark < 1.0:
        raise ConfigError(f"watermark is {limits.watermark}; allowed: 0 up to, but not including, 1")
    if limits.long_prefill_threshold < 0:
        raise ConfigError(f"long_prefill_threshold is {limits.long_prefill_threshold}; allowed: 0 (off) or more")
    if not limits.chunked_prefill and limits.max_num_batched_tokens < limits.max_model_len:
        raise ConfigError(
            f"without chunked prefill a whole sequence is computed in one step: max_num_batched_tokens "
            f"({limits.max_num_batched_tokens}) must be at least max_model_len ({limits.max_model_len})"
        )


@plugin(
    "scheduler",
    capabilities={
        "preempts": True,
        "caches_prefixes": True,
        "deadlines": True,
        "unchunked": True,
        "row_failures": True,
    },
)
def create_fcfs(ctx: SchedulerContext, options: NoOptions, *, clock: Callable[[], float] = time.time) -> Scheduler:
    """Entry point ``fcfs``. ``clock`` gives seconds on the scale of ``EngineRequest.deadline``.

    Raises ``ConfigError`` for impossible limits or a KV plan without managers, and the plugin errors of the hash and
    spec plugins it needs.
    """
    del options
    check_limits(ctx.limits)
    registry = load_registry(ctx.plugins, [group.spec.kind for group in ctx.kv_cache.groups])
    kv = KVCoordinator(
        ctx.kv_cache, registry, max_model_len=ctx.limits.max_model_len, prefix_caching=ctx.limits.prefix_caching
    )
    return BatchScheduler(
        SchedulerState(
            limits=ctx.limits,
            kv=kv,
            hasher=resolve_hash(ctx.plugins, ctx.hash_algorithm, ctx.logger).hasher(kv.hash_block_size),
            extensions=host_extensions(ctx.extensions),
            table=SlotTable(ctx.limits.max_num_seqs),
            policy=FcfsPolicy(),
            clock=clock,
        )
    )
