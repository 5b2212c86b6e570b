"""Assembles an engine core from a spec and plugins: executor, model, KV plan, scheduler, in that order."""

from __future__ import annotations

import logging
import time

from hardpoint.engine.core import EngineCore
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import ConfigError, WorkerError, as_raised
from hardpoint.interfaces.executor import Executor, ExecutorContext
from hardpoint.interfaces.kv_cache import KVCacheConfig, KVLayout, KVPlanRequest, spec_from_wire
from hardpoint.interfaces.scheduler import Scheduler, SchedulerContext
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.runtime import PluginRuntime

_logger = logging.getLogger("hardpoint.engine")
_STAGED = "supports_pipeline_parallel"


def build_engine(spec: EngineSpec, runtime: PluginRuntime) -> EngineCore:
    """A loaded, warmed-up engine in this process. On any failure the workers are stopped before the error goes on.

    Raises what loading raises: configuration, plugin and model errors.
    """
    started = time.monotonic()
    planned, factory, declared = runtime.load_factory("executor", runtime.plan.selected("executor").name)
    if not planned.distribution and not (isinstance(factory, type) and issubclass(factory, Executor)):
        raise ConfigError(f"executor {planned.name} is no subclass of hardpoint.interfaces.Executor; change --executor")
    staged = declared.capabilities.get(_STAGED, getattr(factory, _STAGED, False))
    if spec.worker_config.parallel.pipeline_parallel_size > 1 and not staged:
        raise ConfigError(f"{planned.label} runs no pipeline; set --pipeline-parallel-size 1 or change --executor")
    fields = {"config": spec.worker_config, "plan": spec.plan, "runtime_dir": spec.runtime_dir}
    worker = runtime.plan.selected("worker").name
    executor: Executor = runtime.make_selected("executor", ExecutorContext, worker=worker, **fields)
    try:
        core = _build_around(spec, runtime, executor)
        for report in core.load_reports():
            _logger.info("%s", report.summary())
    except WorkerError as error:
        executor.shutdown()
        # What a worker raised on purpose keeps its class, so that callers can tell a bad model from a bad worker.
        raise as_raised(error.kind, str(error).partition(f"{error.kind}: ")[2] or str(error)) or error from error
    except BaseException:
        executor.shutdown()
        raise
    _logger.info("engine %s is ready after %.1f s", spec.model_name, time.monotonic() - started)
    return core


def _build_around(spec: EngineSpec, runtime: PluginRuntime, executor: Executor) -> EngineCore:
    hooks = HookRunner.from_runtime(runtime)
    executor.collective_rpc("init_device")
    hooks.call("startup_phase", phase="weights")
    executor.collective_rpc("load_model")
    hooks.call("startup_phase", phase="kv_cache")
    executor.initialize_kv_cache(kv_cache := _plan_kv_cache(spec, runtime, executor))
    names = {"limits": spec.limits, "kv_cache": kv_cache, "hash_algorithm": runtime.plan.selected("hash").name}
    scheduler: Scheduler = runtime.make_selected("scheduler", SchedulerContext, **names)
    hooks.call("startup_phase", phase="warm_up")
    executor.collective_rpc("warm_up")
    hooks.call("startup_phase", phase="ready")
    return EngineCore(
        scheduler,
        executor,
        max_inflight_steps=spec.limits.max_inflight_steps,
        hook=hooks.call,
        load_reports=lambda: (runtime.report(), *executor.load_reports()),
    )


def _plan_kv_cache(spec: EngineSpec, runtime: PluginRuntime, executor: Executor) -> KVCacheConfig:
    layers = executor.kv_cache_specs()
    if not layers:
        raise ConfigError(f"model {spec.model_name!r} reports no layer with a KV cache; this engine needs one")
    # Only the kinds this model uses are created; an unknown one names what to install.
    kinds = {layer.spec.kind for layer in layers}
    classes = {kind: runtime.make("kv_cache_spec", kind).spec_class for kind in sorted(kinds)}
    layout: KVLayout = runtime.make_selected("kv_layout")
    longest, wished = spec.limits.max_model_len, {x.layer_name: spec_from_wire(x.spec, classes) for x in layers}
    in_flight = spec.limits.max_num_batched_tokens * spec.limits.max_inflight_steps
    config = layout.plan(
        KVPlanRequest(
            specs=wished,
            budget_bytes=executor.kv_cache_budget(),
            max_model_len=longest,
            max_num_batched_tokens=in_flight,
            num_blocks=spec.num_blocks,
            roles={layer.layer_name: layer.role for layer in layers if layer.role},
            hybrid=spec.hybrid_kv_cache,
            block_size_rules=spec.block_size_rules,
        )
    )
    granted, usable = config.layer_specs(wished), config.num_blocks - 1
    held = sum(granted[group.layer_names[0]].max_blocks(longest, in_flight) for group in config.groups)
    text = "KV cache: %d blocks, %d groups of layers; room for %s requests of the full %d tokens at once"
    _logger.info(text, usable, len(config.groups), f"{usable / held:.1f}" if held else "any number of", longest)
    return config
