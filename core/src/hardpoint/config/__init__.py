"""Everything a user can set. Command line, YAML and environment derive from these models."""

# fmt: off
# isort: off
from __future__ import annotations

from hardpoint.config.arguments import add_arguments, load_config
from hardpoint.config.models import (
    AppConfig, CacheConfig, EngineConfig, ExecutionConfig, ModelConfig, PluginPolicy, SchedulerConfig, ServerConfig,
)

__all__ = [
    "AppConfig", "CacheConfig", "EngineConfig", "ExecutionConfig", "ModelConfig", "PluginPolicy", "SchedulerConfig",
    "ServerConfig", "add_arguments", "load_config",
]
