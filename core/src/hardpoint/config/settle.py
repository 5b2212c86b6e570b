"""From the settings as given to the frozen configuration, for every front end: this process's hooks come in between."""

from __future__ import annotations

import logging
import os
from copy import deepcopy
from typing import Any

import msgspec
from pydantic import ValidationError

from hardpoint.config.errors import from_validation
from hardpoint.config.models import AppConfig, PluginPolicy
from hardpoint.errors import ConfigError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection, parse_pins
from hardpoint.roles import ProcessRole

_OPERATORS_OWN = ("plugin_policy", "plugins.hooks", "server.endpoints")
"""What decides which plugins may act: hooks act under it already, and installing a package must not widen it."""


def settle(document: dict[str, Any]) -> AppConfig:
    """Boot this process's hooks, let their ``configure`` edit ``document``, and validate the result.

    Raises ``ConfigError`` naming each faulty setting and the plugins that edited any; and the plugin errors.
    """
    runner, editors = _boot_hooks(document), []
    for plugin in runner.implementations("configure"):
        draft = deepcopy(document)
        if runner.call("configure", only=plugin, config=draft) and draft != document:
            editors.append(f"{plugin} ({runner.plugins()[plugin]})")
            _refuse_permissions(editors[-1], document, draft)
            document = draft
            logging.getLogger("hardpoint.config").info("the configure hook of %s edited the settings", editors[-1])
    try:
        return AppConfig.model_validate(document)
    except ValidationError as error:
        edited = f"; edited by the configure hook of {', '.join(editors)}" if editors else ""
        raise ConfigError(f"{from_validation(error, AppConfig)}{edited}") from None


def _boot_hooks(document: dict[str, Any]) -> HookRunner:
    try:
        policy = PluginPolicy.model_validate(document.get("plugin_policy", {}))
        options = msgspec.convert(_at(document, "plugins.hooks") or {}, dict[str, dict[str, Any]])
    except (ValidationError, msgspec.ValidationError):
        return HookRunner()  # The validation of the whole tells what is wrong.
    installed, own = discover(), {"allow": policy.allow, "pins": parse_pins(policy.pins), "strict": policy.strict}
    if not installed.of("hooks"):
        return HookRunner()
    plan = build_plan(installed, PluginSelection.from_environment(os.environ, options={"hooks": options}, **own))
    plan = msgspec.structs.replace(plan, plugins=plan.of("hooks"))
    return HookRunner.from_runtime(PluginRuntime(plan, {ProcessRole.LAUNCHER}, installed=installed))


def _refuse_permissions(plugin: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for path in _OPERATORS_OWN:
        if (_at(before, path) or None) != (_at(after, path) or None):
            advice = "set it in the file, on the command line or in the environment, or take the plugin out"
            raise ConfigError(f"hooks plugin {plugin} changed {path}, which is for the operator alone to say: {advice}")


def _at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document
