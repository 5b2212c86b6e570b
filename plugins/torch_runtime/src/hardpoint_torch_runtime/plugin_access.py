"""Creating plugins whose context is the worker's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch

from hardpoint.interfaces.plugin import PluginAccess, PluginContext
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext

__all__ = ["create_in_worker", "extend_context", "label_of"]

ContextT = TypeVar("ContextT", bound=PluginContext)


def extend_context(context_class: type[ContextT], base: PluginContext, **extra: Any) -> ContextT:
    """A kind's own context from the plain one."""
    common = {entry.name: getattr(base, entry.name) for entry in fields(PluginContext)}
    return context_class(**common, **extra)


def create_in_worker(
    plugins: PluginAccess, kind: str, name: str, config: WorkerConfig | None, device: torch.device | None
) -> Any:
    """A plugin of a kind whose context is the worker's."""
    return plugins.create(
        kind, name, extend_context(WorkerContext, plugins.context(kind, name), config=config, device=device)
    )


def label_of(plugins: PluginAccess, kind: str, name: str) -> str:
    """How messages name the plugin and where it comes from."""
    return f"{kind}:{name} ({plugins.context(kind, name).distribution or 'unknown distribution'})"
