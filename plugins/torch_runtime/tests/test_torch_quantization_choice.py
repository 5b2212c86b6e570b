"""Which quantization methods a worker takes: what the platform runs and the method itself does not refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod


class Acme(QuantizationMethod):
    """Leaves every layer as it is."""

    name = "acme"

    def __init__(self, refusal: str | None) -> None:
        self.refusal = refusal

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        return self.refusal

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return None


def load(world: Any, monkeypatch: pytest.MonkeyPatch, supported: tuple[str, ...], refusal: str | None = None) -> None:
    plain = world.plugins.context

    def context(kind: str, name: str) -> PluginContext:
        found: PluginContext = replace(plain(kind, name), platform=world.platform)
        return found

    monkeypatch.setattr(Platform, "supported_quantization", supported)
    monkeypatch.setattr(world.plugins, "context", context)
    world.plugins.factories["quantization", "acme"] = lambda ctx: Acme(refusal)
    world.start(quantization="acme")


@pytest.mark.parametrize("supported", [(), ("acme",), ("fp8", "acme")])
def test_a_platform_without_a_list_restricts_nothing(
    world: Any, monkeypatch: pytest.MonkeyPatch, supported: tuple[str, ...]
) -> None:
    """R12.20."""
    load(world, monkeypatch, supported)


def test_what_the_platform_does_not_run_is_refused_with_what_it_runs(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12.20: before the method is created, and before any weight is read."""
    with pytest.raises(ConfigError, match=r"runs no quantization 'acme'; allowed: fp8, int4; change --quantization"):
        load(world, monkeypatch, ("fp8", "int4"), "never asked")


def test_the_reason_of_a_method_that_refuses_is_shown(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quantization 'acme' refuses this model: too small"):
        load(world, monkeypatch, (), "too small")
