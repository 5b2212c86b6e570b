"""The platform of the device at hand: found, described, bound and counted as the framework itself does."""

from __future__ import annotations

import pytest
import torch

from hardpoint.interfaces.platform import DeviceDescription, LogicalDevice, ThreadPlan
from hardpoint.interfaces.plugin import PluginContext, ProbeStatus, declaration_of
from hardpoint_testing_torch import installed_factory

pytestmark = pytest.mark.gpu

FIRST = LogicalDevice(0)


@pytest.fixture(scope="module")
def name(device: torch.device) -> str:
    return "cuda" if torch.version.hip is None else "rocm"


def test_it_is_available_and_says_what_the_framework_says(name: str, description: DeviceDescription) -> None:
    factory = installed_factory("platform", name)
    declaration = declaration_of(factory)
    assert declaration is not None
    assert declaration.probe is not None
    answer = declaration.probe()
    assert answer.status is ProbeStatus.AVAILABLE, answer.reason
    platform = factory(PluginContext(name, 1, frozenset()), declaration.options())
    found = platform.describe(FIRST)
    assert (found.device_type, found.capability) == (description.device_type, description.capability)
    assert description.features <= found.features
    assert abs(found.memory_bytes - description.memory_bytes) < 0.05 * description.memory_bytes


def test_memory_follows_what_is_allocated(name: str, device: torch.device) -> None:
    factory = installed_factory("platform", name)
    declaration = declaration_of(factory)
    assert declaration is not None
    platform = factory(PluginContext(name, 1, frozenset()), declaration.options())
    platform.init_worker(FIRST, ThreadPlan(compute_threads=1))
    torch.cuda.empty_cache()
    before = platform.memory_used(FIRST)
    size = 256 << 20
    held = torch.zeros(size, dtype=torch.uint8, device=device)
    platform.synchronize(FIRST)
    assert platform.memory_used(FIRST) - before >= 0.9 * size
    del held
    torch.cuda.empty_cache()
    assert platform.memory_used(FIRST) - before >= 0.9 * size, "the worst so far is what the cache must leave room for"
    assert 0 < platform.memory_budget(FIRST) < platform.describe(FIRST).memory_bytes
