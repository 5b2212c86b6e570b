"""From a model's name and flat settings to a launch, for the Python front ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.config.settle import settle
from hardpoint.launch import Launch, prepare
from hardpoint.roles import ProcessRole

Launcher = Callable[[str, Mapping[str, Any], frozenset[ProcessRole]], Launch]


def launch_model(model: str, settings: Mapping[str, Any], roles: frozenset[ProcessRole]) -> Launch:
    """``settings`` are the command line's in their Python spelling. Raises what ``prepare`` raises."""
    engine = EngineConfig.sections(model, **settings)
    return launch_config(settle({"engines": {str(engine["model"].get("served_name") or model): engine}}), roles)


def launch_config(config: AppConfig, roles: frozenset[ProcessRole]) -> Launch:
    """The one engine of ``config``. Raises what ``prepare`` raises."""
    (name,) = config.engines
    return prepare(config, name, environ=dict(os.environ), roles=roles)
