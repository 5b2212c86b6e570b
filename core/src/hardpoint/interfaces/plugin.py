"""What every plugin of every kind shares: its context, its declaration and its probe.

A plugin is an entry point in a group ``hardpoint.<kind>.v<major>`` that resolves to a *factory*::

    class Options(BaseModel):
        window: int = 8

    @plugin("scheduler", options=Options)
    def create(ctx: SchedulerContext, options: Options) -> Scheduler: ...

Nothing is registered at import: the process that needs the plugin calls the factory, once, with its context.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from hardpoint.roles import ProcessRole as ProcessRole

if TYPE_CHECKING:
    from hardpoint.interfaces.platform import Platform

_FactoryT = TypeVar("_FactoryT", bound=Callable[..., Any])

_DECLARATION = "__hardpoint_plugin__"


class ProbeStatus(enum.StrEnum):
    AVAILABLE = "available"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Answer of a probe. ``BROKEN`` means the hardware is there but cannot be used: never a silent fallback."""

    status: ProbeStatus
    reason: str
    details: Mapping[str, str] = field(default_factory=dict)


class NoOptions(BaseModel):
    """Options model of a plugin that has none: every key is unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What a factory may know about its surroundings. Kinds extend it with exactly what they need.

    ``api_version`` is the major version of the plugin's own kind. ``rank`` is the worker's global rank, or ``None``
    outside a worker. ``platform`` is ``None`` only for hooks and while the platform itself is being created.
    ``distribution`` is the one the plugin was installed with, by its canonical name; empty where nothing is installed
    (in tests).
    """

    name: str
    api_version: int
    roles: frozenset[ProcessRole]
    rank: int | None = None
    platform: Platform | None = None
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("hardpoint.plugin"))
    plugins: PluginAccess | None = None
    distribution: str = ""


class PluginAccess(Protocol):
    """How one plugin reaches others by kind and name, within this process's share of the plan."""

    def create(self, kind: str, name: str, context: PluginContext) -> Any:
        """Create the plugin ``name`` of ``kind``; ``context`` supplies the kind's extra fields.

        Raises ``PluginNotFoundError`` listing the installed names, ``PluginLoadError`` naming the cause.
        """

    def names(self, kind: str) -> tuple[str, ...]:
        """Names installed and admitted for ``kind``, without importing any of them."""

    def context(self, kind: str, name: str) -> PluginContext:
        """The plain context (roles, rank, platform, logger) from which a kind's own context is built."""

    def fingerprint(self) -> str:
        """Hex digest over the active plugins (kind, name, distribution, version), for cache keys."""

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call this process's implementations of ``hook``. Raises when a strict or named one fails."""


@dataclass(frozen=True, slots=True)
class PluginDeclaration:
    """What :func:`plugin` attaches to a factory.

    ``probe`` answers without initializing a device (platforms: without importing torch). ``capabilities`` are open
    string keys shown by ``plugins doctor`` and tested both ways by the conformance kit. ``roles`` narrows the processes
    that may create the plugin to some of its kind's, ``None`` to all of them.
    """

    kind: str
    options: type[BaseModel] = NoOptions
    probe: Callable[[], ProbeResult] | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    required_tasks: frozenset[str] = frozenset()
    roles: frozenset[ProcessRole] | None = None


def plugin(
    kind: str,
    *,
    options: type[BaseModel] = NoOptions,
    probe: Callable[[], ProbeResult] | None = None,
    capabilities: Mapping[str, Any] | None = None,
    required_tasks: frozenset[str] = frozenset(),
    roles: frozenset[ProcessRole] | None = None,
) -> Callable[[_FactoryT], _FactoryT]:
    """Declare a factory function or class as a plugin of ``kind``. Has no side effect beyond the attribute."""

    def mark(factory: _FactoryT) -> _FactoryT:
        declaration: PluginDeclaration = PluginDeclaration(
            kind, options, probe, dict(capabilities or {}), required_tasks, roles
        )
        setattr(factory, _DECLARATION, declaration)
        return factory

    return mark


def declaration_of(factory: object) -> PluginDeclaration | None:
    """The declaration attached by :func:`plugin`, or ``None`` for a bare callable."""
    return cast("PluginDeclaration | None", getattr(factory, _DECLARATION, None))
