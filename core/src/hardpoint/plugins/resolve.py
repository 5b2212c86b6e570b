"""From what is installed and what the operator asked for to the plan. Imports no plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.errors import ConfigError, HardpointError, PluginConflictError, PluginNotFoundError
from hardpoint.plugins.kinds import KINDS, Cardinality, KindSpec, Trust
from hardpoint.plugins.manifest import PluginManifest, load_manifest
from hardpoint.plugins.messages import missing_plugin
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan, SelectedBy
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin
from hardpoint.plugins.selection import ALLOW_VARIABLE, PluginSelection
from hardpoint.plugins.suggest import did_you_mean
from hardpoint.version import __version__

__all__ = ["ENDPOINT_SETTING", "build_plan", "resolve_plan", "unknown_options"]

ENDPOINT_SETTING = "server.endpoints"
ManifestReader = Callable[[DiscoveredPlugin], PluginManifest | None]


def build_plan(
    discovery: Discovery, selection: PluginSelection, *, read_manifest: ManifestReader = load_manifest
) -> PluginPlan:
    """The plan, or the first of its problems' types with all of their messages."""
    plan, problems = resolve_plan(discovery, selection, read_manifest=read_manifest)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise type(problems[0])("\n".join(str(problem) for problem in problems)) from problems[0]
    return plan


def resolve_plan(
    discovery: Discovery, selection: PluginSelection, *, read_manifest: ManifestReader = load_manifest
) -> tuple[PluginPlan, tuple[HardpointError, ...]]:
    """The plan as far as it can be made, and everything that is wrong with what was asked for."""
    draft = _Draft(discovery, selection, read_manifest)
    draft.check_names()
    plugins = draft.without_duplicates()
    for plugin in plugins:
        draft.admit(plugin)
    for spec in KINDS.values():
        draft.choose(spec)
    if selection.endpoints is None and any(KINDS[plugin.kind].trust is Trust.ALLOW_LIST for plugin in plugins):
        names = ", ".join(plugin.name for plugin in plugins if KINDS[plugin.kind].trust is Trust.ALLOW_LIST)
        draft.notices.append(f"endpoint plugins are denied unless {ENDPOINT_SETTING} lists them; installed: {names}")
    plan = PluginPlan(
        core_version=__version__,
        plugins=tuple(draft.planned),
        refused=tuple(draft.refused),
        notices=tuple(draft.notices),
        strict=selection.strict,
        tasks=selection.tasks,
    )
    return plan, tuple(draft.problems)


def unknown_options(kind: str, name: str, given: dict[str, Any], known: list[str]) -> list[str]:
    """One message for each key of ``given`` that the plugin does not know."""
    return [
        f"unknown option plugins.{kind}.{name}.{key}{did_you_mean(key, known)}; "
        f"{kind} plugin {name!r} knows: {', '.join(sorted(known)) or 'no options'}"
        for key in given
        if key not in known
    ]


@dataclass(slots=True)
class _Draft:
    """A plan in the making: inputs, what was decided so far, and the problems met."""

    discovery: Discovery
    selection: PluginSelection
    read_manifest: ManifestReader
    planned: list[PlannedPlugin] = field(default_factory=list)
    refused: list[RefusedPlugin] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[HardpointError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.refused.extend(self.discovery.refused)

    def check_names(self) -> None:
        """Every name the operator wrote must mean something that is installed."""
        known = {plugin.name for plugin in self.discovery.plugins}
        for name in self.selection.allow or ():
            if name not in known:
                why = [entry.reason for entry in self.refused if entry.name == name]
                fault = f"is refused: {why[0]}" if why else f"is not installed{did_you_mean(name, known)}"
                self.problems.append(PluginNotFoundError(f"plugin {name!r} on the list {ALLOW_VARIABLE} {fault}"))
        wanted = {(kind, name) for kind in self.selection.choices for name in self.selection.named(kind)}
        wanted |= set(self.selection.defaults.items())
        wanted |= {("endpoint", name) for name in self.selection.endpoints or ()}
        for kind, name in sorted(wanted):
            self._require(kind, name)
        for kind, by_name in self.selection.options.items():
            for name in by_name:
                self._require(kind, name, f" (options are set under plugins.{kind}.{name})")

    def _require(self, kind: str, name: str, where: str = "") -> None:
        if kind not in KINDS:
            self.problems.append(ConfigError(f"unknown plugin kind {kind!r}{did_you_mean(kind, KINDS)}{where}"))
            return
        installed = [plugin.name for plugin in self.discovery.of(kind)]
        if name not in installed:
            why = [entry.reason for entry in self.refused if (entry.kind, entry.name) == (kind, name)]
            error = missing_plugin(kind, name, installed, why[0] if why else "")
            self.problems.append(PluginNotFoundError(f"{error}{where}"))

    def without_duplicates(self) -> list[DiscoveredPlugin]:
        """One plugin per kind and name: the only one, the pinned one, or (with a problem noted) the first."""
        claims: dict[tuple[str, str], list[DiscoveredPlugin]] = {}
        for plugin in self.discovery.plugins:
            claims.setdefault((plugin.kind, plugin.name), []).append(plugin)
        for pin in self.selection.pins:
            kind, _, name = pin.partition(":")
            if (kind, name) not in claims:
                installed = [plugin.name for plugin in self.discovery.of(kind)]
                self.problems.append(missing_plugin(kind, name, installed))
        return [self._settle(rivals) for rivals in claims.values()]

    def _settle(self, rivals: list[DiscoveredPlugin]) -> DiscoveredPlugin:
        key = f"{rivals[0].kind}:{rivals[0].name}"
        pin = self.selection.pins.get(key)
        if pin is None and len(rivals) == 1:
            return rivals[0]
        pinned = [plugin for plugin in rivals if plugin.distribution == pin]
        if len(pinned) != 1:
            owners = ", ".join(f"{plugin.distribution} {plugin.version} at {plugin.path}" for plugin in rivals)
            if pin is not None and not pinned:
                fault = PluginNotFoundError(f"pin {key}={pin}: that distribution has no such plugin, only {owners}")
                self.problems.append(fault)
            else:
                advice = f"pin one with {key}=DISTRIBUTION or uninstall the other"
                self.problems.append(PluginConflictError(f"several plugins claim {key}: {owners}; {advice}"))
            return rivals[0]
        for plugin in rivals:
            if plugin is not pinned[0]:
                self._refuse(plugin, f"{key} is pinned to {pin}")
        return pinned[0]

    def admit(self, plugin: DiscoveredPlugin) -> None:
        """Judge one plugin by trust, allow-list and task, and plan or refuse it."""
        spec = KINDS[plugin.kind]
        named = plugin.name in self.selection.named(plugin.kind)
        allowed = self.selection.allows(plugin.name)
        selected_by = SelectedBy.NAMED if named else SelectedBy.INSTALLED
        reason = "named by the operator" if named else "installed"
        active = named
        if spec.trust is Trust.ALLOW_LIST:
            denial = self._denial(plugin)
            if denial:
                self._refuse(plugin, denial)
                return
            active, selected_by, reason = True, SelectedBy.NAMED, f"listed in {ENDPOINT_SETTING}"
        elif spec.cardinality is Cardinality.MANY:
            if not (allowed or named):
                self._refuse(plugin, f"not on the list {ALLOW_VARIABLE}")
                return
            active = True
        elif not named:
            reason = "installed; imported only when asked for" if allowed else "installed; only when named"
        options = self._options(plugin)
        self.planned.append(
            PlannedPlugin(
                kind=plugin.kind,
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                entry_point=plugin.entry_point,
                selected_by=selected_by,
                reason=reason,
                active=active,
                automatic=allowed,
                options=options,
            )
        )

    def _denial(self, plugin: DiscoveredPlugin) -> str | None:
        if plugin.name not in (self.selection.endpoints or ()):
            return f"not listed in {ENDPOINT_SETTING}"
        manifest = self._manifest(plugin)
        tasks = set(self.selection.tasks or ())
        if manifest is not None and manifest.required_tasks and not tasks & set(manifest.required_tasks):
            return f"it serves {', '.join(manifest.required_tasks)}; this server offers {', '.join(tasks) or 'none'}"
        return None

    def _options(self, plugin: DiscoveredPlugin) -> dict[str, Any]:
        given = self.selection.options.get(plugin.kind, {}).get(plugin.name, {})
        if not given:
            return {}
        manifest = self._manifest(plugin)
        if manifest is not None and manifest.options is not None:
            known = list(manifest.options.get("properties", {}))
            self.problems += map(ConfigError, unknown_options(plugin.kind, plugin.name, given, known))
        try:
            # The launcher keeps what a child will decode, so every process sees equal options.
            plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(given))
        except (TypeError, OverflowError) as error:
            self.problems.append(ConfigError(f"plugins.{plugin.kind}.{plugin.name} is not plain data: {error}"))
            return {}
        return plain

    def _manifest(self, plugin: DiscoveredPlugin) -> PluginManifest | None:
        try:
            return self.read_manifest(plugin)
        except HardpointError as error:
            self.problems.append(error)
            return None

    def _refuse(self, plugin: DiscoveredPlugin, reason: str) -> None:
        self.refused.append(RefusedPlugin(plugin.kind, plugin.name, plugin.distribution, reason))

    def choose(self, spec: KindSpec) -> None:
        """Settle a kind that has a default, or a choose-one kind nobody named."""
        named = self.selection.named(spec.name)
        if spec.chosen and len(named) > 1:
            problem = f"{len(named)} {spec.name} plugins were named ({', '.join(named)}); only one can be active"
            self.problems.append(PluginConflictError(problem))
        default = self.selection.defaults.get(spec.name)
        candidates = [plugin for plugin in self.planned if plugin.kind == spec.name]
        automatic = [plugin for plugin in candidates if plugin.automatic]
        if named:
            return
        if default is not None:
            choice, by, reason = [p for p in candidates if p.name == default], SelectedBy.DEFAULT, "the default"
        elif spec.cardinality is Cardinality.ONE and len(automatic) == 1:
            choice, by, reason = automatic, SelectedBy.INSTALLED, "the only candidate"
        else:
            return
        for plugin in choice:
            self.planned[self.planned.index(plugin)] = msgspec.structs.replace(
                plugin, active=True, selected_by=by, reason=reason
            )
