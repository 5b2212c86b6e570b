"""Assembles an engine core from a spec and plugins: executor, model, KV plan, scheduler, in that order."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from hardpoint.engine.core import EngineCore
from hardpoint.engine.messages import EngineFacts
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import ConfigError
from hardpoint.interfaces.executor import Executor, ExecutorContext
from hardpoint.interfaces.kv_cache import (
    KVCacheConfig,
    KVLayout,
    KVPlanRequest,
    KVSpecRegistration,
    LayerSpec,
    spec_from_wire,
)
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.scheduler import Scheduler, SchedulerContext
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.runtime import PluginRuntime

__all__ = ["build_engine", "engine_facts"]

_logger = logging.getLogger("hardpoint.engine")


def build_engine(spec: EngineSpec, runtime: PluginRuntime) -> EngineCore:
    """A loaded, warmed-up engine in this process. On any failure the workers are stopped before the error goes on.

    Raises what loading raises: configuration, plugin and model errors.
    """
    started = time.monotonic()
    executor = _create_executor(spec, runtime)
    try:
        core = _build_around(spec, runtime, executor)
    except BaseException:
        executor.shutdown()
        raise
    _logger.info("engine %s is ready after %.1f s", spec.model_name, time.monotonic() - started)
    return core


def engine_facts(core: EngineCore, spec: EngineSpec, runtime: PluginRuntime) -> EngineFacts:
    blocks = core.scheduler.stats().num_total_blocks
    return EngineFacts(
        tasks=core.executor.supported_tasks(),
        num_blocks=blocks,
        capacity_tokens=blocks * spec.worker_config.block_size,
        load_reports=(runtime.report(),),
    )


def _build_around(spec: EngineSpec, runtime: PluginRuntime, executor: Executor) -> EngineCore:
    executor.collective_rpc("init_device")
    executor.collective_rpc("load_model")
    kv_cache = _plan_kv_cache(spec, runtime, executor)
    executor.initialize_kv_cache(kv_cache)
    scheduler = _create_scheduler(spec, runtime, kv_cache)
    executor.collective_rpc("warm_up")
    _log_capacity(spec, kv_cache)
    return EngineCore(
        scheduler,
        executor,
        max_inflight_steps=spec.limits.max_inflight_steps,
        hooks=HookRunner.from_runtime(runtime),
    )


def _create_executor(spec: EngineSpec, runtime: PluginRuntime) -> Executor:
    context = ExecutorContext(
        **_fields(runtime.context("executor", spec.executor)),
        worker=spec.worker,
        config=spec.worker_config,
        plan=spec.plan,
        runtime_dir=spec.runtime_dir,
    )
    executor: Executor = runtime.create("executor", spec.executor, context)
    return executor


def _plan_kv_cache(spec: EngineSpec, runtime: PluginRuntime, executor: Executor) -> KVCacheConfig:
    layers = executor.kv_cache_specs()
    if not layers:
        raise ConfigError(f"model {spec.model_name!r} reports no layer with a KV cache; this engine needs one")
    classes = _spec_classes(runtime, layers)
    layout: KVLayout = runtime.create("kv_layout", spec.kv_layout, runtime.context("kv_layout", spec.kv_layout))
    return layout.plan(
        KVPlanRequest(
            specs={layer.layer_name: spec_from_wire(layer.spec, classes) for layer in layers},
            budget_bytes=executor.kv_cache_budget(),
            max_model_len=spec.limits.max_model_len,
            max_num_batched_tokens=spec.limits.max_num_batched_tokens,
            num_blocks=spec.num_blocks,
        )
    )


def _spec_classes(runtime: PluginRuntime, layers: list[LayerSpec]) -> Mapping[str, Any]:
    """Classes of exactly the kinds this model uses; an unknown one raises ``PluginNotFoundError``."""
    classes: dict[str, Any] = {}
    for kind in sorted({layer.spec.kind for layer in layers}):
        context = runtime.context("kv_cache_spec", kind)
        registration: KVSpecRegistration = runtime.create("kv_cache_spec", kind, context)
        classes[kind] = registration.spec_class
    return classes


def _create_scheduler(spec: EngineSpec, runtime: PluginRuntime, kv_cache: KVCacheConfig) -> Scheduler:
    context = SchedulerContext(
        **_fields(runtime.context("scheduler", spec.scheduler)),
        limits=spec.limits,
        kv_cache=kv_cache,
        hash_algorithm=spec.hash_algorithm,
    )
    scheduler: Scheduler = runtime.create("scheduler", spec.scheduler, context)
    return scheduler


def _log_capacity(spec: EngineSpec, kv_cache: KVCacheConfig) -> None:
    blocks = kv_cache.num_blocks - 1
    tokens = blocks * spec.worker_config.block_size
    longest = spec.limits.max_model_len
    _logger.info(
        "KV cache: %d blocks of %d tokens, %d tokens in all; %.1f requests of the full %d tokens at once",
        *(blocks, spec.worker_config.block_size, tokens, tokens / longest, longest),
    )


def _fields(context: PluginContext) -> dict[str, Any]:
    return {name: getattr(context, name) for name in PluginContext.__dataclass_fields__}
