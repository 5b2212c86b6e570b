"""Entry points of kind ``scheduler``, and the check of the limits they get."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.interfaces import PluginAccess, Scheduler, SchedulerContext, SchedulerLimits, SchedulingPolicy, plugin
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.events import KVEventLog
from hardpoint_scheduling.kv_cache.hash_seed import resolve_hash
from hardpoint_scheduling.kv_cache.registry import load_registry
from hardpoint_scheduling.schedulers.extensions import host_extensions
from hardpoint_scheduling.schedulers.policies.fcfs import FcfsPolicy
from hardpoint_scheduling.schedulers.policies.priority import PriorityPolicy
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from hardpoint_scheduling.schedulers.slots import SlotTable
from hardpoint_scheduling.schedulers.state import SchedulerState

_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_inflight_steps",
    "num_pipeline_stages",
    "prefill_interval",
)


def check_limits(limits: SchedulerLimits) -> None:
    """Raises ``ConfigError`` for limits that cannot work, naming the setting to change."""
    for name in _AT_LEAST_ONE:
        if getattr(limits, name) < 1:
            raise ConfigError(f"{name} is {getattr(limits, name)}; it must be at least 1")
    active = limits.max_num_active_seqs
    if active is not None and not 1 <= active <= limits.max_num_seqs:
        raise ConfigError(f"max_num_active_seqs is {active}; allowed: 1 to max_num_seqs ({limits.max_num_seqs})")
    if not 0.0 <= limits.watermark < 1.0:
        raise ConfigError(f"watermark is {limits.watermark}; allowed: 0 up to, but not including, 1")
    scheduled = limits.max_scheduled_tokens
    if scheduled is not None and not 1 <= scheduled <= limits.max_num_batched_tokens:
        raise ConfigError(
            f"max_scheduled_tokens is {scheduled}; allowed: 1 to max_num_batched_tokens "
            f"({limits.max_num_batched_tokens})"
        )
    if min(limits.encoder_budget, limits.encoder_cache_size) < 0 or (
        (limits.encoder_budget > 0) != (limits.encoder_cache_size > 0)
    ):
        raise ConfigError(
            f"encoder_budget is {limits.encoder_budget} and encoder_cache_size {limits.encoder_cache_size}; set both "
            "above 0, or both to 0 where no media are encoded"
        )
    if limits.long_prefill_threshold < 0:
        raise ConfigError(f"long_prefill_threshold is {limits.long_prefill_threshold}; allowed: 0 (off) or more")
    name = "max_num_batched_tokens" if scheduled is None else "max_scheduled_tokens"
    most = limits.max_num_batched_tokens if scheduled is None else scheduled
    if not limits.chunked_prefill and most < limits.max_model_len:
        raise ConfigError(
            f"without chunked prefill a whole sequence is computed in one step: {name} ({most}) must be at least "
            f"max_model_len ({limits.max_model_len})"
        )


CAPABILITIES: Mapping[str, Any] = {
    "preempts": True,
    "caches_prefixes": True,
    "deadlines": True,
    "unchunked": True,
    "row_failures": True,
    "kv_events": True,
    "pools": True,
    "max_inflight_steps": 4,
}

Clock = Callable[[], float]
"""Seconds on the scale of ``EngineRequest.deadline``."""


class BatchOptions(BaseModel):
    """Options of every scheduler here: how finely prefixes are matched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match_unit: int | None = Field(
        default=None,
        ge=1,
        description="tokens per block hash where KV groups differ in block size; their common divisor by default",
    )
    tail_unit: int | None = Field(
        default=None,
        ge=1,
        description="a cached prefix may end inside a block, at any multiple of so many tokens, at the cost of a copy "
        "(one KV group only; whole blocks by default)",
    )


class PolicyOptions(BatchOptions):
    """Options of the scheduler ``policy``."""

    policy: str = Field(
        default="fcfs",
        description="scheduling_policy plugin that orders requests",
        json_schema_extra={"flag": "--scheduling-policy", "plugin_kind": "scheduling_policy"},
    )


@plugin("scheduler", options=BatchOptions, capabilities=CAPABILITIES)
def create_fcfs(ctx: SchedulerContext, options: BatchOptions, *, clock: Clock = time.time) -> Scheduler:
    """Entry point ``fcfs``: first come, first served. Raises what :func:`build_scheduler` raises."""
    return build_scheduler(ctx, FcfsPolicy(), options, clock)


@plugin("scheduler", options=BatchOptions, capabilities=CAPABILITIES)
def create_priority(ctx: SchedulerContext, options: BatchOptions, *, clock: Clock = time.time) -> Scheduler:
    """Entry point ``priority``: by ``EngineRequest.priority``, then by arrival. Raises as :func:`build_scheduler`."""
    return build_scheduler(ctx, PriorityPolicy(), options, clock)


@plugin("scheduler", options=PolicyOptions, capabilities=CAPABILITIES)
def create_with_policy(ctx: SchedulerContext, options: PolicyOptions, *, clock: Clock = time.time) -> Scheduler:
    """Entry point ``policy``: any ``scheduling_policy`` plugin, with the options set for that plugin.

    Raises the plugin errors of the policy, above all for a name that nobody provides (R3.4), and what
    :func:`build_scheduler` raises.
    """
    return build_scheduler(ctx, load_policy(ctx.plugins, options.policy), options, clock)


def load_policy(plugins: PluginAccess | None, name: str) -> SchedulingPolicy:
    """The ``scheduling_policy`` plugin ``name``; without plugin access (use as a library) only ``fcfs`` exists."""
    if plugins is not None:
        policy: SchedulingPolicy = plugins.create("scheduling_policy", name, plugins.context("scheduling_policy", name))
        return policy
    if name != "fcfs":
        raise PluginNotFoundError(
            f"scheduling policy {name!r} needs plugin access; without it only 'fcfs' is available"
        )
    return FcfsPolicy()


def build_scheduler(
    ctx: SchedulerContext, policy: SchedulingPolicy, options: BatchOptions, clock: Clock
) -> BatchScheduler:
    """Raises ``ConfigError`` for impossible limits, units or a KV plan without managers, and the plugin errors of the
    hash and spec plugins it needs.
    """
    limits, extensions = ctx.limits, host_extensions(ctx.extensions)
    check_limits(limits)
    # Of one request: a whole batch in each step under way, and lookahead, which never exceeds one.
    num_batches = limits.max_inflight_steps + bool(extensions.lookahead)
    registry = load_registry(ctx.plugins, [kind for group in ctx.kv_cache.groups for kind in group.spec.kinds])
    kv = KVCoordinator(
        ctx.kv_cache,
        registry,
        max_model_len=limits.max_model_len,
        prefix_caching=limits.prefix_caching,
        max_in_flight_tokens=num_batches * limits.max_num_batched_tokens,
        match_unit=options.match_unit,
        tail_unit=options.tail_unit,
    )
    if limits.prefix_caching and kv.num_groups and not kv.prefix_caching:
        ctx.logger.info(
            "prefix caching is on, but some layers of this model keep nothing that a prefix could go on from: every "
            "prompt will be computed"
        )
    state = SchedulerState(
        limits=limits,
        kv=kv,
        hasher=resolve_hash(ctx.plugins, ctx.hash_algorithm, ctx.logger).hasher(kv.hash_block_size),
        extensions=extensions,
        table=SlotTable(limits.max_num_seqs),
        policy=policy,
        clock=clock,
    )
    if limits.kv_events:
        kv.pool.log = KVEventLog(state.live.get, kv.hash_block_size, kv.group_block_sizes())
    return BatchScheduler(state)
