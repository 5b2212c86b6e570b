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

_KEYS = ("api_key", "admin_key")
_ADMISSION = ("endpoints", "host", "allow_anonymous", "allowed_hosts", *_KEYS, "api_key_file", "admin_key_file")
_OPERATORS_OWN = ("plugin_policy", "plugins.hooks", *(f"server.{name}" for name in _ADMISSION))
"""Which plugins may act and who may ask the server: installing a package must widen neither."""


def settle(document: dict[str, Any]) -> AppConfig:
    """Boot this process's hooks, let their ``configure`` edit ``document``, and validate the result.

    Raises ``ConfigError`` naming each faulty setting and the plugins that edited any; and the plugin errors.
    """
    runner, editors = _boot_hooks(document), []
    document = deepcopy(document)
    server = _at(document, "server")
    keys = {name: server.pop(name) for name in _KEYS if name in server} if isinstance(server, dict) else {}
    for plugin in runner.implementations("configure"):
        draft = deepcopy(document)
        if runner.call("configure", only=plugin, config=draft) and draft != document:
            editors.append(f"{plugin} ({runner.plugins()[plugin]})")
            _refuse_permissions(editors[-1], document, draft)
            document = draft
            logging.getLogger("hardpoint.config").info("the configure hook of %s edited the settings", editors[-1])
    if keys and isinstance(document.setdefault("server", {}), dict):
        document["server"].update(keys)
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
        if _at(before, path, ...) != _at(after, path, ...):
            advice = "set it in the file, on the command line or in the environment, or take the plugin out"
            raise ConfigError(f"hooks plugin {plugin} changed {path}, which is for the operator alone to say: {advice}")


def _at(document: Any, path: str, missing: Any = None) -> Any:
    for part in path.split("."):
        document = document.get(part, missing) if isinstance(document, dict) else missing
    return document
