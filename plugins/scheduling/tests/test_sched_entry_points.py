"""The parts as a running engine gets them: by name, through the plan, from the installed entry points."""

from __future__ import annotations

from dataclasses import fields

from hardpoint.interfaces import KVPlanRequest, LayerSpec, PluginContext, SchedulerContext
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing import FakeWorker
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from sched_support import BLOCK, Loop, expected, limits, request, spec


def test_layout_and_scheduler_work_through_the_plugin_runtime() -> None:
    runtime = PluginRuntime(build_plan(discover(), PluginSelection()), {ProcessRole.ENGINE, ProcessRole.WORKER})
    layout = runtime.create("kv_layout", "layer_outermost", runtime.context("kv_layout", "layer_outermost"))
    worker = FakeWorker(block_size=BLOCK)
    layers: list[LayerSpec] = worker.kv_cache_specs()
    config = layout.plan(
        KVPlanRequest({layer.layer_name: spec() for layer in layers}, worker.kv_cache_budget(), 64, 16, num_blocks=40)
    )
    worker.initialize_kv_cache(config)
    base = runtime.context("scheduler", "fcfs")
    common = {field.name: getattr(base, field.name) for field in fields(PluginContext)}
    scheduler = runtime.create("scheduler", "fcfs", SchedulerContext(**common, limits=limits(), kv_cache=config))
    assert isinstance(scheduler, BatchScheduler)
    loop = Loop(scheduler, worker)
    loop.scheduler.add(request("a", range(3, 20)))
    loop.run()
    assert loop.tokens("a") == expected(list(range(3, 20)), 5)
