"""What an executor must find in its context."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ExecutorContext, PluginAccess, WorkerConfig

__all__ = ["require"]


def require(ctx: ExecutorContext) -> tuple[PluginAccess, WorkerConfig]:
    """Raises ``ConfigError`` naming what the engine left out."""
    missing = [field for field in ("plugins", "config", "worker") if not getattr(ctx, field)]
    if ctx.plugins is None or ctx.config is None or not ctx.worker:
        raise ConfigError(f"executor {ctx.name!r} was created without {', '.join(missing)} in its context")
    return ctx.plugins, ctx.config
