"""The parts as a running engine gets them: by name, through the plan, from the installed entry points."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import pytest

from hardpoint.config.plugin_options import add_plugin_flags
from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces import KVPlanRequest, LayerSpec, PluginContext, SchedulerContext, SchedulingPolicy
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing import FakeWorker
from hardpoint_scheduling.schedulers.policies.fair_share import FairSharePolicy
from hardpoint_scheduling.schedulers.policies.fcfs import FcfsPolicy
from hardpoint_scheduling.schedulers.policies.priority import PriorityPolicy
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from sched_support import BLOCK, Loop, expected, kv_config, limits, request, spec


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


def create(name: str, options: dict[str, Any]) -> BatchScheduler:
    """The scheduler ``name`` with ``options`` for itself and for policies, as an engine process creates it."""
    selection = PluginSelection(options=options)
    runtime = PluginRuntime(build_plan(discover(), selection), {ProcessRole.ENGINE})
    made = runtime.make("scheduler", name, SchedulerContext, limits=limits(), kv_cache=kv_config(40))
    assert isinstance(made, BatchScheduler)
    return made


def test_a_policy_gets_the_options_that_are_set_for_it() -> None:
    """R3.4 [D]."""
    options = {
        "scheduler": {"policy": {"policy": "fair_share"}},
        "scheduling_policy": {"fair_share": {"weights": {"gold": 3.0}}},
    }
    policy = create("policy", options)._state.policy
    assert isinstance(policy, FairSharePolicy)
    queue = policy.create_queue()
    running = []
    for tenant in ("oldest", "plain", "gold"):
        queue.append(LiveRequest(request(tenant, [4], tenant=tenant), 9))
        running.append(queue.pop())
    for member in running[1:]:
        policy.on_scheduled(member, 30)
    assert policy.victim(running).request_id == "plain"


@pytest.mark.parametrize(
    ("name", "policy"), [("fcfs", FcfsPolicy), ("priority", PriorityPolicy), ("policy", FcfsPolicy)]
)
def test_ready_made_schedulers_have_their_policy(name: str, policy: type[SchedulingPolicy]) -> None:
    """R3.4: FCFS and PRIORITY are built in and named."""
    assert type(create(name, {})._state.policy) is policy


def test_an_unknown_policy_stops_the_start() -> None:
    """R3.4: and the message lists those that exist."""
    with pytest.raises(PluginNotFoundError, match=r"no scheduling_policy plugin 'fair'.*fair_share"):
        create("policy", {"scheduler": {"policy": {"policy": "fair"}}})


def test_the_policy_has_a_flag_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.set_defaults(plugin=[])
    assert add_plugin_flags(parser) == ()
    arguments = parser.parse_args(["--scheduling-policy", "priority"])
    assert arguments.plugin == ["scheduler.policy.policy=priority"]
