"""What the platform makes of the operator's settings in the launcher, and what it may not leave open."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.config import EngineConfig
from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineSettings, ModelArtifact, ModelInfo
from hardpoint.launch import _settle
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole
from hardpoint.testing.fake_platform import FakePlatform, FakePlatformOptions
from hardpoint.version import __version__


class Forgetful(FakePlatform):
    """Leaves the worker open."""

    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.worker = None


def settle(platform: FakePlatform, **cache: Any) -> EngineSettings:
    artifact = ModelArtifact(name="some-model", root="/nonexistent", files=(), source="test")
    facts = {"architecture": "Fake", "max_position": 64, "vocab_size": 97, "dtype": "bfloat16", "loader": "fake"}
    info = ModelInfo(artifact=artifact, config={"num_hidden_layers": 2}, **facts)  # type: ignore[arg-type]
    runtime = PluginRuntime(PluginPlan(__version__), {ProcessRole.LAUNCHER})
    runtime.platform = platform
    return _settle(runtime, EngineConfig.model_validate({"model": {"name": "some-model"}, "cache": cache}), info)


def test_a_platform_that_names_no_worker_stops_the_start() -> None:
    """R12.28, P12.10: naming the platform."""
    with pytest.raises(ConfigError, match="platform 'fake' set no worker"):
        settle(Forgetful(environment={}))


def test_the_platform_fills_what_is_open() -> None:
    """R12.28: it sees the configuration and the model's facts, and its entries hold."""
    settings = settle(FakePlatform(FakePlatformOptions(worker="mine", memory_bytes=1 << 20), {}))
    assert (settings.worker, settings.executor, settings.dtype) == ("mine", "uniproc", "float32")
    assert (settings.kv_cache_bytes, settings.architecture) == (1 << 19, "Fake")
    assert settings.model == {"num_hidden_layers": 2}


def test_phase_one_leaves_an_explicit_block_size_alone() -> None:
    """R12.39: only without one is a size chosen; here the platform prefers more and is not asked."""
    platform = FakePlatform(FakePlatformOptions(block_size=32), {})
    assert settle(platform, block_size=5).block_size == 5
    assert settle(platform).block_size == 32
