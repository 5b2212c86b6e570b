"""`hardpoint plugins test` has what it needs for each of our KV cache specs, without the help of these tests."""

from __future__ import annotations

import pytest

from hardpoint.plugins.discovery import discover
from hardpoint.plugins.records import DiscoveredPlugin
from hardpoint.testing.kits import suite_for
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite

OURS = [plugin for plugin in discover().of("kv_cache_spec") if plugin.distribution == "hardpoint-scheduling"]


@pytest.mark.parametrize("plugin", OURS, ids=lambda plugin: plugin.name)
def test_the_class_of_an_installed_spec_has_samples(plugin: DiscoveredPlugin) -> None:
    """L12.23: the class found for a plugin makes its specs and builds its manager over them."""
    suite = suite_for(plugin)
    assert suite is not None
    kit = suite()
    assert isinstance(kit, KVCacheSpecSuite)
    registration = kit.create_registration()
    for spec in kit.create_specs():
        assert spec.kind == plugin.name
        manager = registration.manager(kit.create_pool(9), 0, spec)
        assert kit.keeps_all or not manager.keeps_all


def test_there_are_seven() -> None:
    assert len(OURS) == 7
