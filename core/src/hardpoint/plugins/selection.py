"""What the operator asked for, as one frozen record, and how its parts are written as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.plugins.kinds import kind_spec

ALLOW_VARIABLE = "HARDPOINT_PLUGINS"
STRICT_VARIABLE = "HARDPOINT_PLUGINS_STRICT"
ENDPOINT_SETTING = "server.endpoints"
ENDPOINT_VARIABLE = "HARDPOINT_ENDPOINTS"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
DEFAULT_ENDPOINTS = ("openai", "ops")
"""The endpoints a server opens unless told otherwise: one visible configuration value."""


class PluginSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the plan, beside the installed metadata.

    ``allow`` and ``endpoints`` are lists of exact names; ``None`` means unset and ``()`` none at all. An unset
    ``allow`` admits everything installed, an unset ``endpoints`` nothing. An allow-list filters and does not select:
    a plugin it admits is still *merely installed* where the failure policy asks.

    ``choices`` are names the operator gave per kind (several only for keyed kinds and those with many);
    ``defaults`` stand in for kinds without a choice. ``pins`` map ``"kind:name"`` to the distribution to take.
    ``options`` are per kind and name. ``tasks`` are what the server offers, ``None`` when not known.
    """

    allow: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] | None = None
    choices: dict[str, str | tuple[str, ...]] = {}
    defaults: dict[str, str] = {}
    pins: dict[str, str] = {}
    options: dict[str, dict[str, dict[str, Any]]] = {}
    tasks: tuple[str, ...] | None = None
    strict: bool = False

    def named(self, kind: str) -> tuple[str, ...]:
        """The names chosen for ``kind``, in the order given."""
        choice = self.choices.get(kind, ())
        return (choice,) if isinstance(choice, str) else tuple(choice)

    def without_effect(self) -> list[str]:
        """What is wrong with options of plugins that another one of their kind was chosen over."""
        faults = []
        for kind in (kind for kind in self.options if kind_spec(kind).chosen):
            chosen = (*self.named(kind), *([] if self.named(kind) else filter(None, [self.defaults.get(kind)])))
            unused = [name for name in self.options[kind] if chosen and name not in chosen]
            faults += [f"options of {kind} {x!r} have no effect: {chosen[0]!r} is chosen, not {x!r}" for x in unused]
        return faults

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **settings: Any) -> PluginSelection:
        """A selection whose allow-list and strictness come from the environment unless ``settings`` give them."""
        if settings.get("allow") is None:
            settings["allow"] = parse_names(environ.get(ALLOW_VARIABLE))
        if not settings.get("strict"):
            text = environ.get(STRICT_VARIABLE)
            settings["strict"] = bool(text) and parse_flag(STRICT_VARIABLE, text or "")
        return cls(**settings)


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated list of names; ``None`` stays unset, an empty text is an empty list."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def parse_pins(pins: Iterable[str]) -> dict[str, str]:
    """``kind:name=distribution`` lines as a mapping. Raises ``ConfigError`` for another form or a doubled pin."""
    parsed: dict[str, str] = {}
    for pin in pins:
        target, equals, distribution = pin.partition("=")
        kind, colon, name = target.partition(":")
        if not (equals and colon and name and distribution):
            raise ConfigError(f"plugin pin {pin!r} is not of the form kind:name=distribution")
        kind_spec(kind)
        if parsed.setdefault(target, distribution) != distribution:
            raise ConfigError(f"plugin {target} is pinned to both {parsed[target]!r} and {distribution!r}")
    return parsed


def parse_flag(variable: str, text: str) -> bool:
    """A switch in the environment. Raises ``ConfigError`` naming ``variable`` for other words than the known ones."""
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{variable}={text!r} is neither yes nor no; use one of {', '.join(_TRUE + _FALSE)}")
    return text.lower() in _TRUE
