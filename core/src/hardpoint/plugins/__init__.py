"""The plugin system: kinds, import-free discovery, the plan, each process's runtime, and the doctor.

What needs pydantic or pluggy is imported on first use, so that commands which read only metadata stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS, Cardinality, KindSpec, Phase, Trust, kind_spec
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan, SelectedBy
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin
from hardpoint.plugins.registry import Registry
from hardpoint.plugins.report import LoadReport, PluginState, PluginStatus
from hardpoint.plugins.resolve import build_plan, resolve_plan
from hardpoint.plugins.selection import PluginSelection, parse_names, parse_pins

if TYPE_CHECKING:
    from hardpoint.plugins.doctor import DoctorReport, diagnose
    from hardpoint.plugins.hooks import HookRunner
    from hardpoint.plugins.manifest import load_manifest
    from hardpoint.plugins.platform_selection import PlatformChoice, select_platform
    from hardpoint.plugins.runtime import PluginRuntime

__all__ = [
    "KINDS",
    "Cardinality",
    "DiscoveredPlugin",
    "Discovery",
    "DoctorReport",
    "HookRunner",
    "KindSpec",
    "LoadReport",
    "Phase",
    "PlannedPlugin",
    "PlatformChoice",
    "PluginPlan",
    "PluginRuntime",
    "PluginSelection",
    "PluginState",
    "PluginStatus",
    "RefusedPlugin",
    "Registry",
    "SelectedBy",
    "Trust",
    "build_plan",
    "diagnose",
    "discover",
    "kind_spec",
    "load_manifest",
    "parse_names",
    "parse_pins",
    "resolve_plan",
    "select_platform",
]

_LAZY = {
    "DoctorReport": "doctor",
    "HookRunner": "hooks",
    "PlatformChoice": "platform_selection",
    "PluginRuntime": "runtime",
    "diagnose": "doctor",
    "load_manifest": "manifest",
    "select_platform": "platform_selection",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
