"""What a start finds out before it loads anything, for the doctor: settings as they are read, and their faults."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator

import msgspec

from hardpoint.config.arguments import add_arguments, load_config
from hardpoint.config.models import AppConfig
from hardpoint.errors import HardpointError, PluginError
from hardpoint.interfaces.scheduler import SchedulerLimits
from hardpoint.launch import plugin_selection, require_capabilities
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.manifest import load_manifest
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.selection import ALLOW_VARIABLE, PluginSelection, parse_names
from hardpoint.server.keys import load_admin_keys, load_keys, require_safe_binding

__all__ = ["configured", "settings_faults", "unknown_names"]

PLUGIN_KIND = "plugin_kind"
"""The key of a field's ``json_schema_extra`` that says of which kind the plugin is that an option names."""
_SETTINGS = {
    "scheduler": ("scheduler", "scheduler"),
    "kv_layout": ("cache", "kv_layout"),
    "hash": ("cache", "hash_algorithm"),
    "chat_renderer": ("model", "chat_renderer"),
}
"""Sections and fields of the settings that have a default and name a plugin, by its kind."""


def configured(path: str | None) -> tuple[PluginSelection, AppConfig]:
    """What the file and the environment select, as a start reads them. A setting that was given counts as a choice.

    Without a file no plugin's code runs for it; with one, its hooks may edit the settings, as they do at a start.
    Raises as reading settings does.
    """
    path = path or os.environ.get("HARDPOINT_CONFIG")
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=True)
    # Which model is served plays no part, but a configuration must name one.
    config = load_config(parser.parse_args(["model", *(["--config", path] if path else ["--plugins="])]), os.environ)
    (engine,) = config.engines.values()
    selection = plugin_selection(config, engine, dict(os.environ), serves=True)
    given = {
        kind: selection.defaults[kind]
        for kind, (section, field) in _SETTINGS.items()
        if field in getattr(engine, section).model_fields_set
    }
    given |= {"io_processor": engine.model.io_processor} if engine.model.io_processor else {}
    chosen = msgspec.structs.replace(
        selection,
        allow=selection.allow if path else parse_names(os.environ.get(ALLOW_VARIABLE)),
        choices={**selection.choices, **given},
        defaults={kind: name for kind, name in selection.defaults.items() if kind not in given},
    )
    return chosen, config


def settings_faults(config: AppConfig, plan: PluginPlan) -> Iterator[str]:
    """What a server with these settings would be refused for before it looks at a model."""
    (engine,) = config.engines.values()
    limits = SchedulerLimits(
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=1,
        kv_events=engine.cache.kv_events,
        max_inflight_steps=2 if engine.scheduler.async_scheduling else 1,
    )
    checks: list[Callable[[], object]] = [
        lambda: require_safe_binding(config.server, load_keys(config.server)),
        lambda: load_admin_keys(config.server),
    ]
    # Whether there is a scheduler at all is told elsewhere.
    if any(planned.active for planned in plan.of("scheduler")):
        checks.append(lambda: require_capabilities(plan, limits))
    for check in checks:
        try:
            check()
        except HardpointError as error:
            yield str(error)


def unknown_names(plan: PluginPlan) -> Iterator[str]:
    """What is wrong with plugins that options of active plugins name, where a manifest says of which kind they are."""
    for planned in plan.plugins:
        manifest = None
        if planned.active:
            with contextlib.suppress(PluginError):  # a manifest that cannot be read is told of elsewhere
                manifest = load_manifest(planned)
        for key, schema in manifest.option_schemas.items() if manifest is not None else ():
            kind, name = schema.get(PLUGIN_KIND), planned.options.get(key, schema.get("default"))
            if kind in KINDS and isinstance(name, str):
                try:
                    plan.find(str(kind), name)
                except PluginError as error:
                    yield f"{error} (named by plugins.{planned.kind}.{planned.name}.{key})"
