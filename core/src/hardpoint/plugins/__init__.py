"""The plugin system: kinds, import-free discovery, the plan, each process's runtime, and the doctor.

Names are imported on first use, so that what reads only metadata pays for nothing else.
"""

# fmt: off
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.plugins.discovery import discover
    from hardpoint.plugins.doctor import DoctorReport, diagnose
    from hardpoint.plugins.hooks import HookRunner
    from hardpoint.plugins.kinds import KINDS, Cardinality, KindSpec, Phase, Trust, kind_spec
    from hardpoint.plugins.manifest import load_manifest
    from hardpoint.plugins.plan import PlannedPlugin, PluginPlan, SelectedBy
    from hardpoint.plugins.platform_selection import PlatformChoice, select_platform
    from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin
    from hardpoint.plugins.report import LoadReport, PluginState, PluginStatus
    from hardpoint.plugins.resolve import build_plan, resolve_plan
    from hardpoint.plugins.runtime import PluginRuntime
    from hardpoint.plugins.selection import PluginSelection, parse_names, parse_pins

__all__ = [
    "KINDS", "Cardinality", "DiscoveredPlugin", "Discovery", "DoctorReport", "HookRunner", "KindSpec", "LoadReport",
    "Phase", "PlannedPlugin", "PlatformChoice", "PluginPlan", "PluginRuntime", "PluginSelection", "PluginState",
    "PluginStatus", "RefusedPlugin", "SelectedBy", "Trust", "build_plan", "diagnose", "discover",
    "kind_spec", "load_manifest", "parse_names", "parse_pins", "resolve_plan", "select_platform",
]

_MODULES = {
    "discovery": "discover", "doctor": "DoctorReport diagnose", "hooks": "HookRunner", "manifest": "load_manifest",
    "kinds": "KINDS Cardinality KindSpec Phase Trust kind_spec", "plan": "PlannedPlugin PluginPlan SelectedBy",
    "platform_selection": "PlatformChoice select_platform", "records": "DiscoveredPlugin Discovery RefusedPlugin",
    "report": "LoadReport PluginState PluginStatus", "resolve": "build_plan resolve_plan",
    "runtime": "PluginRuntime", "selection": "PluginSelection parse_names parse_pins",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
