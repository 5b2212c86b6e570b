"""Plugins as they are installed, by kind and name, for checks that should run what users run."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.model_source import WeightLoader, WeightLoaderContext
from hardpoint.interfaces.plugin import NoOptions, PluginContext, ProcessRole, declaration_of

__all__ = ["installed_backend", "installed_factory", "installed_loader"]


def installed_factory(kind: str, name: str) -> Any:
    """The factory behind the entry point ``name`` of ``kind``. Raises ``PluginNotFoundError`` listing the others."""
    points = entry_points(group=f"hardpoint.{kind}.v1")
    for point in points:
        if point.name == name:
            return point.load()
    others = ", ".join(sorted(points.names)) or "none"
    raise PluginNotFoundError(f"no plugin {kind}:{name} is installed; installed: {others}")


def installed_backend(name: str) -> AttentionBackend:
    """The attention backend ``name`` with the options it has by default."""
    factory = installed_factory("attention_backend", name)
    declaration = declaration_of(factory)
    options = NoOptions() if declaration is None else declaration.options()
    context = PluginContext(name=name, api_version=1, roles=frozenset({ProcessRole.WORKER}))
    backend: AttentionBackend = factory(context, options)
    return backend


def installed_loader(name: str, *, packed: bool = False) -> WeightLoader:
    """The weight loader ``name``, dequantizing what is stored packed, unless that is wanted as it is."""
    context = WeightLoaderContext(
        name=name, api_version=1, roles=frozenset({ProcessRole.WORKER}), rank=0, packed=packed
    )
    loader: WeightLoader = installed_factory("weight_loader", name)(context, NoOptions())
    return loader
