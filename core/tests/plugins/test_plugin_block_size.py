"""Phase 1 in the launcher: sizes come from manifests, and no backend is imported for them (R12.39, R12.42)."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineSettings
from hardpoint.launch import _choose_block_size
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole
from hardpoint.testing.fake_platform import FakePlatform, FakePlatformOptions

if TYPE_CHECKING:
    from .conftest import Site


def install(site: Site, name: str, block_sizes: Any = None) -> None:
    """An attention backend that must not be imported; without ``block_sizes`` it ships no manifest."""
    entry = {"capabilities": {"block_sizes": block_sizes}}
    site.install(
        f"attn-{name}",
        {f"attention_backend:{name}": f"attn_{name}:create"},
        modules={f"attn_{name}.": "raise RuntimeError('imported')"},
        manifest=None if block_sizes is None else {"plugins": {"attention_backend": {name: entry}}},
    )


def choose(site: Site, *candidates: str, **settings: Any) -> int:
    platform = FakePlatform(FakePlatformOptions(attention_backends=candidates), {})
    runtime = PluginRuntime(site.plan(), {ProcessRole.LAUNCHER}, installed=site.discover())
    chosen = _choose_block_size(runtime, platform, EngineSettings(**settings))
    assert not [module for module in sys.modules if module.startswith("attn_")]
    return chosen


def test_all_candidates_agree_on_the_smallest(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    install(site, "one", {"multiple_of": 16})
    install(site, "two", {"exact": [8, 64, 96]})
    install(site, "unasked", {"exact": [7]})
    with caplog.at_level(logging.INFO, "hardpoint.launch"):
        assert choose(site, "one", "two", "absent") == 64
    assert "KV block size 64, set by phase 1 of alignment (one: any multiple of 16; two: 8 or 64 or 96)" in caplog.text


def test_the_search_starts_at_the_platforms_preference(site: Site) -> None:
    install(site, "one", {"multiple_of": 1})
    assert choose(site, "one", preferred_block_size=16) == 16
    assert choose(site, "one") == 1


def test_a_named_backend_alone_decides(site: Site) -> None:
    install(site, "one", {"exact": [16]})
    install(site, "two", {"exact": [64]})
    assert choose(site, "one", "two", attention_backend="two") == 64
    with pytest.raises(ConfigError, match=r"suits every attention backend \(one: 16; two: 64\); name one backend with"):
        choose(site, "one", "two")


def test_without_a_manifest_the_platforms_preference_stands_or_is_missed(site: Site) -> None:
    install(site, "mute")
    assert choose(site, "mute", preferred_block_size=16) == 16
    with pytest.raises(ConfigError, match=r"neither 'fake' nor a manifest \(mute\) states a block size; set --block"):
        choose(site, "mute")


def test_a_backend_that_states_nothing_leaves_the_choice_to_the_others(site: Site) -> None:
    install(site, "mute")
    install(site, "one", {"multiple_of": 24})
    assert choose(site, "mute", "one", preferred_block_size=16) == 24


def test_a_capability_that_is_no_rule_is_named(site: Site) -> None:
    install(site, "odd", {"multiple_of": "16"})
    with pytest.raises(ConfigError, match=r"attention_backend:odd \(attn-odd 1.0\): .* states no block sizes"):
        choose(site, "odd")
