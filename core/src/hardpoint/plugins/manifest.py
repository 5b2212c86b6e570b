"""The optional manifest ``<package>/hardpoint.json``: what a plugin offers, readable without importing it."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import msgspec

from hardpoint.errors import PluginError
from hardpoint.plugins.plan import PlannedPlugin
from hardpoint.plugins.records import DiscoveredPlugin

MANIFEST_FILE = "hardpoint.json"
_MAX_BYTES = 2**20
UNCHECKED = "unchecked"
"""Key of a schema that tells less than the model accepts: values are then judged where the plugin loads."""


class _Shape(msgspec.Struct):
    """The form of what is read from the schema of options; all else in it may be anything."""

    description: str = ""
    required: tuple[str, ...] = ()
    properties: dict[str, _Shape] = {}
    anyOf: tuple[_Shape, ...] = ()
    enum: tuple[Any, ...] = ()
    items: _Shape | bool | tuple[Any, ...] = True
    definitions: dict[str, _Shape] = msgspec.field(name="$defs", default_factory=dict)


class PluginManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One plugin's entry. ``options`` is the JSON schema of its options model, or ``None`` when not stated."""

    options: dict[str, Any] | None = None
    required_tasks: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    capabilities: dict[str, Any] = {}

    @property
    def options_object(self) -> dict[str, Any]:
        """The part of ``options`` that holds ``properties``; a model that contains itself is held by reference."""
        return self._resolved(self.options or {})

    @property
    def option_schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of each option by key, a reference replaced by what it stands for, and ``is_required``."""
        whole = self.options_object
        required = whole.get("required", ())
        schemas = whole.get("properties", {})
        return {key: {**self._resolved(part), "is_required": key in required} for key, part in schemas.items()}

    def _resolved(self, part: dict[str, Any]) -> dict[str, Any]:
        named = (self.options or {}).get("$defs", {}).get(str(part.get("$ref")).rpartition("/")[2], {})
        choices = {"anyOf": [self._resolved(choice) for choice in part["anyOf"]]} if "anyOf" in part else {}
        return {**named, **part, **choices}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: kind, then plugin name, then entry."""

    plugins: dict[str, dict[str, PluginManifest]]
    manifest_version: int = 1


def load_manifest(plugin: DiscoveredPlugin | PlannedPlugin) -> PluginManifest | None:
    """The manifest entry of ``plugin``, or ``None`` when its package ships none. Raises as :func:`read_manifest`."""
    manifest = read_manifest(plugin)
    return None if manifest is None else manifest.plugins.get(plugin.kind, {}).get(plugin.name)


def read_manifest(plugin: DiscoveredPlugin | PlannedPlugin) -> Manifest | None:
    """The manifest of the package that holds ``plugin``, or ``None`` when it ships none.

    Only the spec of the top-level package is looked up, so no code of the plugin runs. Raises ``PluginError`` naming
    the file when it cannot be understood.
    """
    package = plugin.entry_point.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(folder, MANIFEST_FILE)
        if os.path.exists(path):
            return _parse(path)
    return None


def _parse(path: str) -> Manifest:
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MAX_BYTES:
            raise OSError(f"it must be a file of at most {_MAX_BYTES} bytes")
        with open(path, "rb") as stream:
            manifest = msgspec.json.decode(stream.read(), type=Manifest)
        msgspec.convert(
            [entry.options for kind in manifest.plugins.values() for entry in kind.values()], list[_Shape | None]
        )
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise PluginError(f"the plugin manifest {path} is not valid: {error}") from error
    if manifest.manifest_version != 1:
        raise PluginError(f"the plugin manifest {path} has version {manifest.manifest_version}; this core reads 1")
    return manifest
