"""The scheduler that a configuration selects, created as an engine process would, without model or worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.config import AppConfig
from hardpoint.interfaces import KVCacheConfig, Scheduler, SchedulerContext, SchedulerLimits
from hardpoint.launch import plugin_selection
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole

__all__ = ["InstalledScheduler"]


@dataclass(frozen=True, slots=True)
class InstalledScheduler:
    """One scheduler under the plan that its configuration makes: allow-list, pins and options count as in a server.

    ``capabilities`` are those the plugin declares; ``label`` names it with its distribution and version.
    """

    name: str
    label: str
    capabilities: Mapping[str, Any]
    hash_algorithm: str
    _runtime: PluginRuntime

    @classmethod
    def of(cls, config: AppConfig, environ: Mapping[str, str] = os.environ) -> InstalledScheduler:
        """That of the one engine in ``config``. Raises the plugin errors for one that is missing or cannot load."""
        (engine,) = config.engines.values()
        plan = build_plan(discover(), plugin_selection(config, engine, dict(environ), serves=False))
        runtime = PluginRuntime(plan, {ProcessRole.ENGINE})
        name = engine.scheduler.scheduler
        record = runtime.load_factory("scheduler", name)
        return cls(name, record.planned.label, record.declaration.capabilities, engine.cache.hash_algorithm, runtime)

    def create(self, limits: SchedulerLimits, kv_cache: KVCacheConfig) -> Scheduler:
        """A new one. Raises ``ConfigError`` for limits or a KV plan that it cannot work with."""
        fields = {"limits": limits, "kv_cache": kv_cache, "hash_algorithm": self.hash_algorithm}
        made: Scheduler = self._runtime.make("scheduler", self.name, SchedulerContext, **fields)
        return made
