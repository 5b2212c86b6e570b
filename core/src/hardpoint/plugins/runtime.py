"""One process's share of the plan: imports what its roles permit, creates plugins, and reports."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hardpoint.errors import HardpointError, PluginError, PluginLoadError, PluginMismatchError
from hardpoint.interfaces.plugin import PluginContext, PluginDeclaration, declaration_of
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.kinds import KINDS, Cardinality, kind_spec
from hardpoint.plugins.options import validate_options
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan, SelectedBy
from hardpoint.plugins.records import Discovery
from hardpoint.plugins.report import LoadReport, PluginState, PluginStatus
from hardpoint.plugins.resolve import unmet_tasks
from hardpoint.roles import ProcessRole
from hardpoint.version import __version__

if TYPE_CHECKING:
    from hardpoint.interfaces.platform import Platform


_logger = logging.getLogger("hardpoint.plugins")
_COMPUTING_ROLES = frozenset({ProcessRole.ENGINE, ProcessRole.WORKER})
Key = tuple[str, str]


class PluginFactoryRecord(NamedTuple):
    """A loaded factory, with what it declared of itself."""

    planned: PlannedPlugin
    factory: Callable[..., Any]
    declaration: PluginDeclaration


@dataclass(slots=True)
class _Activation:
    """What one process id has done so far. A forked child starts with a fresh one."""

    pid: int
    statuses: dict[Key, PluginStatus] = field(default_factory=dict)
    factories: dict[Key, PluginFactoryRecord] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)


class PluginRuntime:
    """Implements ``PluginAccess`` for a process that holds ``roles``.

    ``rank`` is the worker's global rank. ``installed`` is a scan to verify the plan against, where the caller has
    just made one; by default the process scans for itself. ``platform`` is to be set once it was created, and is part
    of every later context. Raises ``PluginMismatchError`` when the process has other
    plugins than the plan says.
    """

    def __init__(
        self,
        plan: PluginPlan,
        roles: Iterable[ProcessRole],
        rank: int | None = None,
        *,
        installed: Discovery | None = None,
    ) -> None:
        self.plan = plan
        self.roles = frozenset(roles)
        self.rank = rank
        self.platform: Platform | None = None
        self.hooks_owner: PluginRuntime | None = None
        self._current = _Activation(os.getpid())
        self.verify(installed)

    @property
    def process(self) -> str:
        """How messages name this process."""
        roles = "+".join(role for role in ProcessRole if role in self.roles) or "no role"
        return f"process {os.getpid()} ({roles}{'' if self.rank is None else f', rank {self.rank}'})"

    def verify(self, installed: Discovery | None = None) -> None:
        """Compare this process's share of the plan with what is installed here.

        Raises ``PluginMismatchError`` naming the process, each differing plugin and both versions.
        """
        faults = []
        if self.plan.core_version != __version__:
            faults.append(f"the core is {__version__}, the plan was made by {self.plan.core_version}")
        mine = [planned for planned in self.plan.plugins if planned.distribution and self._permits(planned.kind)]
        found = (installed or discover()).plugins if mine else ()
        here = {(plugin.kind, plugin.name, plugin.distribution): plugin for plugin in found}
        for planned in mine:
            plugin = here.get((planned.kind, planned.name, planned.distribution))
            if plugin is None:
                faults.append(f"{planned.label} is not installed here")
            elif plugin.version != planned.version:
                faults.append(f"{planned.label}: version {plugin.version} is installed here")
            elif plugin.entry_point != planned.entry_point:
                faults.append(f"{planned.label} is {plugin.entry_point} here, {planned.entry_point} in the plan")
        if faults:
            advice = "install the same distributions for every process of the instance"
            raise PluginMismatchError(f"{self.process} differs from the plan: {'; '.join(faults)}; {advice}")

    def names(self, kind: str) -> tuple[str, ...]:
        """Names installed and admitted for ``kind``, whatever this process's roles."""
        return tuple(planned.name for planned in self.plan.of(kind))

    def candidates(self, kind: str) -> tuple[str, ...]:
        """The names that may be chosen without anyone naming them."""
        return tuple(planned.name for planned in self.plan.of(kind) if planned.automatic or planned.active)

    def context(
        self, kind: str, name: str, context_class: Callable[..., PluginContext] = PluginContext, **fields: Any
    ) -> PluginContext:
        """The plain context, or that of a kind with its own ``fields``."""
        return context_class(
            name=name,
            api_version=kind_spec(kind).api_version,
            roles=self.roles,
            rank=self.rank,
            platform=self.platform,
            logger=logging.getLogger(f"hardpoint.plugin.{kind}.{name}"),
            plugins=self,
            distribution=next((planned.distribution for planned in self.plan.of(kind) if planned.name == name), ""),
            **fields,
        )

    def make(self, kind: str, name: str, context: Callable[..., PluginContext] = PluginContext, **fields: Any) -> Any:
        """:meth:`create` with a context of the kind's own, which has ``fields``."""
        return self.create(kind, name, self.context(kind, name, context, **fields))

    def make_selected(self, kind: str, context: Callable[..., PluginContext] = PluginContext, **fields: Any) -> Any:
        """:meth:`make` the one plugin of ``kind`` that is active in the plan."""
        return self.make(kind, self.plan.selected(kind).name, context, **fields)

    def fingerprint(self) -> str:
        """Hex digest over all plugins that can take part in computing, for cache keys.

        It covers the active and the keyed plugins of the engine's and worker's kinds, with their options: equal in
        every process of an instance, and rather too wide than too narrow.
        """
        relevant = [
            (planned.kind, planned.name, planned.distribution, planned.version, planned.options)
            for planned in self.plan.plugins
            if KINDS[planned.kind].roles & _COMPUTING_ROLES
            and (planned.active or KINDS[planned.kind].cardinality is Cardinality.KEYED)
        ]
        return sha256(msgspec.json.encode(sorted(relevant, key=lambda row: row[:3]), order="sorted")).hexdigest()

    def notify(self, hook: str, **arguments: Any) -> None:
        HookRunner.from_runtime(self).call(hook, **arguments)

    def load_factory(self, kind: str, name: str) -> PluginFactoryRecord:
        """Import the plugin, once per process.

        Raises ``PluginError`` when the kind is none of this process's, ``PluginNotFoundError``, ``PluginLoadError``.
        """
        self._require_role(kind)
        planned = self.plan.find(kind, name)
        activation = self._activation()
        record = activation.factories.get((kind, name))
        if record is None:
            started = time.perf_counter()
            try:
                record = _import_factory(planned)
            except (Exception, SystemExit) as error:
                raise self._failure(planned, "loading", error) from error
            self._note(planned, PluginState.LOADED, seconds=time.perf_counter() - started)
            activation.factories[kind, name] = record
        self._require_role(kind, record.declaration.roles, f"{planned.label} may")
        return record

    def create(self, kind: str, name: str, context: PluginContext) -> Any:
        """A new instance of the plugin. Whoever asks by name depends on it, so every failure is raised.

        Errors a plugin raises on purpose (``HardpointError``) pass unchanged, others become ``PluginLoadError``.
        """
        planned, factory, declaration = self.load_factory(kind, name)
        try:
            instance = factory(context, validate_options(kind, name, declaration.options, planned.options))
            if instance is None or inspect.iscoroutine(instance):
                raise TypeError(f"the factory returned {instance!r} instead of an instance")
        except HardpointError as error:
            self._note(planned, PluginState.FAILED, str(error))
            raise
        except (Exception, SystemExit) as error:
            raise self._failure(planned, "creating", error) from error
        self._note(planned, PluginState.CREATED)
        return instance

    def create_all(
        self, kind: str, context: Callable[..., PluginContext] = PluginContext, **fields: Any
    ) -> dict[str, Any]:
        """Every active plugin of ``kind`` by name, in discovery order, made once per process id as by :meth:`make`.

        A named plugin that fails is raised (any, when strict). A merely installed one is quarantined: the others
        go on, and one warning lists the failures. Plugins that need tasks this server lacks are left out.
        """
        self._require_role(kind)
        group = self._activation().groups
        if kind not in group:
            group[kind] = self._create_group(kind, lambda name: self.make(kind, name, context, **fields))
        return dict(group[kind])

    def _create_group(self, kind: str, make: Callable[[str], Any]) -> dict[str, Any]:
        created: dict[str, Any] = {}
        failures: list[str] = []
        for planned in self.plan.of(kind):
            if not planned.active:
                continue
            try:
                if self._serves_tasks(planned):
                    created[planned.name] = make(planned.name)
            except HardpointError as error:
                if self.is_essential(planned):
                    raise
                failures.append(str(error))
        if failures:
            _logger.warning(
                "%d of the installed %s plugins failed in %s and are left out: %s (see `hardpoint plugins doctor`)",
                *(len(failures), kind, self.process, "; ".join(failures)),
            )
        return created

    def _serves_tasks(self, planned: PlannedPlugin) -> bool:
        required = self.load_factory(planned.kind, planned.name).declaration.required_tasks
        reason = unmet_tasks(required, self.plan.tasks)
        if reason:
            self._note(planned, PluginState.REFUSED, reason)
            _logger.info("%s is left out: %s", planned.label, reason)
        return not reason

    def is_essential(self, planned: PlannedPlugin) -> bool:
        """Whether the failure of ``planned`` must stop the start."""
        return self.plan.strict or planned.selected_by is not SelectedBy.INSTALLED

    def quarantine(self, kind: str, name: str, error: Exception) -> None:
        """Apply the failure policy to a plugin that failed after its creation.

        Raises ``PluginLoadError`` from ``error`` when the plugin is essential; otherwise it is marked as failed.
        """
        planned = self.plan.find(kind, name)
        failure = self._failure(planned, "using", error)
        if self.is_essential(planned):
            raise failure from error
        self._activation().groups.get(kind, {}).pop(name, None)
        _logger.warning("%s (see `hardpoint plugins doctor`)", failure)

    def report(self) -> LoadReport:
        """The state of every planned and refused plugin in this process."""
        done = dict(self._activation().statuses)
        if self.hooks_owner is not None:
            done.update(row for row in self.hooks_owner._activation().statuses.items() if row[0][0] == "hooks")
        rows = [done.get((planned.kind, planned.name)) or self._untouched(planned) for planned in self.plan.plugins]
        rows += [
            PluginStatus(entry.kind, entry.name, entry.distribution, "", PluginState.REFUSED, entry.reason)
            for entry in self.plan.refused
        ]
        roles = tuple(str(role) for role in ProcessRole if role in self.roles)
        return LoadReport(self.process, os.getpid(), roles, self.rank, __version__, tuple(rows))

    def _untouched(self, planned: PlannedPlugin) -> PluginStatus:
        if self._permits(planned.kind):
            return _status(planned, PluginState.ALLOWED, planned.reason)
        return _status(planned, PluginState.DISCOVERED, "belongs to other processes")

    def _activation(self) -> _Activation:
        if self._current.pid != os.getpid():
            self._current = _Activation(os.getpid())
        return self._current

    def _permits(self, kind: str) -> bool:
        return bool(kind_spec(kind).roles & self.roles)

    def _require_role(self, kind: str, declared: frozenset[ProcessRole] | None = None, what: str = "") -> None:
        allowed = kind_spec(kind).roles if declared is None else declared
        if not allowed & self.roles:
            owners, what = ", ".join(sorted(allowed)), what or f"{kind} plugins"
            raise PluginError(f"{what} run only in processes with the role {owners}; this is {self.process}")

    def _note(self, planned: PlannedPlugin, state: PluginState, reason: str = "", seconds: float | None = None) -> None:
        statuses, key = self._activation().statuses, (planned.kind, planned.name)
        if seconds is None and key in statuses:
            seconds = statuses[key].load_seconds
        statuses[key] = _status(planned, state, reason, seconds)

    def _failure(self, planned: PlannedPlugin, doing: str, error: BaseException) -> PluginLoadError:
        cause = f"{type(error).__name__}: {error}" if not isinstance(error, PluginError) else str(error)
        self._note(planned, PluginState.FAILED, cause)
        _logger.debug("%s %s failed in %s", doing, planned.label, self.process, exc_info=error)
        return PluginLoadError(f"{doing} {planned.label} failed in {self.process}: {cause}")


def _status(planned: PlannedPlugin, state: PluginState, reason: str, seconds: float | None = None) -> PluginStatus:
    return PluginStatus(planned.kind, planned.name, planned.distribution, planned.version, state, reason, seconds)


def _import_factory(planned: PlannedPlugin) -> PluginFactoryRecord:
    module, _, attribute = planned.entry_point.partition(":")
    factory = attrgetter(attribute)(importlib.import_module(module))
    if not callable(factory) or inspect.iscoroutinefunction(factory):
        raise TypeError(f"{planned.entry_point} is a {type(factory).__name__}, not a plain (not async) factory")
    declaration: PluginDeclaration = declaration_of(factory) or PluginDeclaration(planned.kind)
    if declaration.kind != planned.kind:
        raise TypeError(
            f"{planned.entry_point} is declared as a {declaration.kind} plugin, but its entry point says {planned.kind}"
        )
    if declaration.roles is not None and not declaration.roles <= kind_spec(planned.kind).roles:
        alien = ", ".join(sorted(declaration.roles - kind_spec(planned.kind).roles))
        raise TypeError(f"{planned.entry_point} is declared for the role {alien}, where no {planned.kind} plugin runs")
    return PluginFactoryRecord(planned, factory, declaration)
