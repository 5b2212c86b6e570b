"""Finds conformance classes: of a kind, and of single plugins that bring their own.

Both are entry points of the kind ``conformance``. One named like a kind is that kind's kit; one named
``<kind>.<plugin>`` is a class that a plugin's author derived from it, for plugins that need more than their name said.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from operator import attrgetter

from hardpoint.errors import PluginLoadError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.manifest import load_manifest
from hardpoint.plugins.records import DiscoveredPlugin
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["kinds_with_kit", "kit_of", "suite_for"]


def _entries() -> Mapping[str, DiscoveredPlugin]:
    return {entry.name: entry for entry in discover().of("conformance")}


def kinds_with_kit() -> tuple[str, ...]:
    """Kinds that have a conformance class here, by name. Imports nothing."""
    return tuple(sorted(name for name in _entries() if "." not in name))


def kit_of(kind: str) -> type[PluginSuite] | None:
    """The conformance class of ``kind``, or ``None``. Raises ``PluginLoadError`` when it cannot be imported."""
    entry = _entries().get(kind)
    return None if entry is None else _load(entry)


def suite_for(plugin: DiscoveredPlugin) -> type[PluginSuite] | None:
    """The class to hold an installed plugin against: its own, else its kind's, else ``None``.

    Capabilities of its manifest that are named like a switch of the class (``preempts``) set it: what a plugin claims
    is what it is held to.
    """
    own = _entries().get(f"{plugin.kind}.{plugin.name}")
    kit = _load(own) if own is not None else kit_of(plugin.kind)
    if kit is None:
        return None
    manifest = load_manifest(plugin)
    claimed = manifest.capabilities if manifest is not None else {}
    switches = {key: value for key, value in claimed.items() if type(value) is type(getattr(kit, key, None))}
    title = f"Test_{plugin.kind}_{plugin.name}".replace("-", "_").replace(".", "_")
    fixed = {"plugin": plugin.name, "__module__": kit.__module__, "__doc__": kit.__doc__}
    return type(title, (kit,), {**switches, **fixed})


def _load(entry: DiscoveredPlugin) -> type[PluginSuite]:
    module, _, attribute = entry.entry_point.partition(":")
    try:
        found: object = attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PluginLoadError(
            f"the conformance class {entry.entry_point} of {entry.distribution} cannot be loaded: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, PluginSuite)):
        raise PluginLoadError(f"{entry.entry_point} of {entry.distribution} is no subclass of PluginSuite")
    return found
