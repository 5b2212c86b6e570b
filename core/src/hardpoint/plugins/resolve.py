"""From what is installed and what the operator asked for to the plan. Imports no plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hardpoint.errors import ConfigError, HardpointError, PluginConflictError, PluginNotFoundError
from hardpoint.plugins.kinds import KINDS, Cardinality, KindSpec, Trust, missing_plugin
from hardpoint.plugins.manifest import UNCHECKED, PluginManifest, load_manifest
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan, SelectedBy
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin
from hardpoint.plugins.selection import ALLOW_VARIABLE, ENDPOINT_SETTING, PluginSelection
from hardpoint.plugins.suggest import did_you_mean
from hardpoint.version import __version__


def build_plan(discovery: Discovery, selection: PluginSelection) -> PluginPlan:
    """The plan. Raises the first problem's type, with the messages of all."""
    plan, problems = resolve_plan(discovery, selection)
    if problems:
        raise type(problems[0])("\n".join(str(problem) for problem in problems))
    return plan


def resolve_plan(discovery: Discovery, selection: PluginSelection) -> tuple[PluginPlan, tuple[HardpointError, ...]]:
    """The plan as far as it can be made, and everything that is wrong with what was asked for."""
    draft = _Draft(discovery, selection)
    draft.check_names()
    for plugin in draft.without_duplicates():
        draft.admit(plugin)
    for spec in KINDS.values():
        draft.choose(spec)
    plan = PluginPlan(
        core_version=__version__,
        plugins=tuple(draft.planned),
        refused=(*discovery.refused, *draft.refused),
        notices=tuple(_notices(discovery, selection)),
        strict=selection.strict,
        tasks=selection.tasks,
    )
    return plan, tuple(draft.problems)


def _option_faults(plugin: DiscoveredPlugin, manifest: PluginManifest, given: dict[str, Any]) -> list[str]:
    """What is certain to be refused where the plugin loads."""
    known = manifest.options_object
    if manifest.options is None or known.get(UNCHECKED) or not (given or known.get("required")):
        return []
    # Deferred: brings pydantic along, which lists and reports do without.
    from hardpoint.plugins.options import schema_faults, unknown_options

    stale = f" (says its manifest; is it out of date? `hardpoint plugins manifest {plugin.distribution} --check`)"
    unknown = [told + stale for told in unknown_options(plugin.kind, plugin.name, given, manifest.option_schemas)]
    return unknown or schema_faults(plugin.kind, plugin.name, manifest.options, given)


def unmet_tasks(required: Iterable[str], offered: Iterable[str] | None) -> str:
    """Why a plugin that requires one of some tasks has no place here; empty when it has."""
    required, offered = sorted(required), sorted(offered or ())
    if not required or set(required) & set(offered):
        return ""
    return f"it serves {', '.join(required)}; this server offers {', '.join(offered) or 'none'}"


def _notices(discovery: Discovery, selection: PluginSelection) -> Iterable[str]:
    denied = [plugin.name for plugin in discovery.plugins if KINDS[plugin.kind].trust is Trust.ALLOW_LIST]
    if denied and selection.endpoints is None:
        yield f"endpoint plugins are denied unless {ENDPOINT_SETTING} lists them; installed: {', '.join(denied)}"
    yield from (double.fault for double in discovery.shadowed if double.same_folder)


class _Draft:
    """A plan in the making: inputs, what was decided so far, and the problems met."""

    def __init__(self, discovery: Discovery, selection: PluginSelection) -> None:
        self.discovery = discovery
        self.selection = selection
        self.planned: list[PlannedPlugin] = []
        self.refused: list[RefusedPlugin] = []
        self.problems: list[HardpointError] = []

    def check_names(self) -> None:
        """Every name the operator wrote must mean something that is installed."""
        chosen = self.selection
        known = {plugin.name for plugin in self.discovery.plugins}
        for name in chosen.allow or ():
            if name not in known:
                why = [entry.reason for entry in self.discovery.refused if entry.name == name]
                missing = f"is not installed{did_you_mean(name, known)}; install its distribution or take it off"
                fault = f"is refused: {why[0]}" if why else missing
                self.problems.append(PluginNotFoundError(f"plugin {name!r} on the list {ALLOW_VARIABLE} {fault}"))
        wanted = {(kind, name) for kind in chosen.choices for name in chosen.named(kind)}
        wanted |= {*chosen.defaults.items(), *(("endpoint", name) for name in chosen.endpoints or ())}
        for kind, name in sorted(wanted):
            self._require(kind, name)
        for pin in chosen.pins:
            self._require(pin.partition(":")[0], pin.partition(":")[2], where=" (it is pinned)")
        for kind, by_name in chosen.options.items():
            for name in by_name:
                self._require(kind, name, where=f" (options are set under plugins.{kind}.{name})")

    def _require(self, kind: str, name: str, where: str = "") -> None:
        if kind not in KINDS:
            self.problems.append(ConfigError(f"unknown plugin kind {kind!r}{did_you_mean(kind, KINDS)}{where}"))
            return
        installed = [plugin.name for plugin in self.discovery.of(kind)]
        if name not in installed:
            why = [entry.reason for entry in self.discovery.refused if (entry.kind, entry.name) == (kind, name)]
            error = missing_plugin(kind, name, installed, *why[:1])
            self.problems.append(PluginNotFoundError(f"{error}{where}"))

    def without_duplicates(self) -> list[DiscoveredPlugin]:
        """One plugin per kind and name: the only one, the pinned one, or (with a problem noted) the first."""
        claims: dict[str, list[DiscoveredPlugin]] = {}
        for plugin in self.discovery.plugins:
            claims.setdefault(f"{plugin.kind}:{plugin.name}", []).append(plugin)
        return [self._settle(key, rivals) for key, rivals in claims.items()]

    def _settle(self, key: str, rivals: list[DiscoveredPlugin]) -> DiscoveredPlugin:
        pin = self.selection.pins.get(key)
        if pin is None and len(rivals) == 1:
            return rivals[0]
        pinned = [plugin for plugin in rivals if plugin.distribution == pin]
        if len(pinned) == 1:
            losers = [plugin for plugin in rivals if plugin is not pinned[0]]
            self.refused += [RefusedPlugin(p.kind, p.name, p.distribution, f"{key} is pinned to {pin}") for p in losers]
            return pinned[0]
        owners = ", ".join(f"{plugin.distribution} {plugin.version} at {plugin.path}" for plugin in rivals)
        if pin is not None and not pinned:
            fault = f"pin {key}={pin}: that distribution has no such plugin, only {owners}"
            self.problems.append(PluginNotFoundError(fault))
        else:
            advice = f"pin one with {key}=DISTRIBUTION, or of one distribution's folders remove all but one"
            self.problems.append(PluginConflictError(f"several plugins claim {key}: {owners}; {advice}"))
        return rivals[0]

    def admit(self, plugin: DiscoveredPlugin) -> None:
        """Judge one plugin by trust, allow-list and task, and plan or refuse it."""
        spec = KINDS[plugin.kind]
        named = plugin.name in self.selection.named(plugin.kind)
        if spec.trust is Trust.LOAD and spec.cardinality is Cardinality.MANY:
            # Nobody sets options of a plugin without wanting it: a typing error in them must not just drop it.
            named = named or plugin.name in self.selection.options.get(plugin.kind, {})
        allowed = self.selection.allow is None or plugin.name in self.selection.allow
        denial = self._denial(plugin, spec, named or allowed)
        if denial:
            self.refused.append(RefusedPlugin(plugin.kind, plugin.name, plugin.distribution, denial))
            return
        reason = "named by the operator" if named else "installed"
        if spec.trust is Trust.ALLOW_LIST:
            named, reason = True, f"listed in {ENDPOINT_SETTING}"
        elif not named and spec.cardinality is not Cardinality.MANY:
            reason = "installed; imported only when asked for" if allowed else "installed; only when named"
        facts = msgspec.structs.asdict(plugin)
        self.planned.append(
            PlannedPlugin(
                **{name: fact for name, fact in facts.items() if name in PlannedPlugin.__struct_fields__},
                selected_by=SelectedBy.NAMED if named else SelectedBy.INSTALLED,
                reason=reason,
                active=named or spec.cardinality is Cardinality.MANY,
                automatic=allowed,
                options=self._options(plugin, named),
            )
        )

    def _denial(self, plugin: DiscoveredPlugin, spec: KindSpec, permitted: bool) -> str:
        if spec.trust is Trust.ALLOW_LIST:
            if plugin.name not in (self.selection.endpoints or ()):
                return f"not listed in {ENDPOINT_SETTING}"
            manifest = self._manifest(plugin)
            if manifest is None or self.selection.tasks is None:  # Judged where the model is known.
                return ""
            return unmet_tasks(manifest.required_tasks, self.selection.tasks)
        return f"not on the list {ALLOW_VARIABLE}" if spec.cardinality is Cardinality.MANY and not permitted else ""

    def _options(self, plugin: DiscoveredPlugin, named: bool) -> dict[str, Any]:
        given = self.selection.options.get(plugin.kind, {}).get(plugin.name, {})
        try:
            # The launcher keeps what a child will decode, so every process sees equal options.
            plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(given))
        except (TypeError, OverflowError) as error:
            self.problems.append(ConfigError(f"plugins.{plugin.kind}.{plugin.name} is not plain data: {error}"))
            return {}
        # A named plugin is going to load, so what it requires must be there even when no option is given at all.
        manifest = self._manifest(plugin) if given or named else None
        if manifest is not None:
            self.problems += map(ConfigError, _option_faults(plugin, manifest, plain))
        return plain

    def _manifest(self, plugin: DiscoveredPlugin) -> PluginManifest | None:
        try:
            return load_manifest(plugin)
        except HardpointError as error:
            if str(error) not in map(str, self.problems):
                self.problems.append(error)
            return None

    def choose(self, spec: KindSpec) -> None:
        """Settle a kind that has a default, or a choose-one kind nobody named."""
        named = self.selection.named(spec.name)
        if spec.chosen and len(named) > 1:
            problem = f"{len(named)} {spec.name} plugins were named ({', '.join(named)}); only one can be active"
            self.problems.append(PluginConflictError(problem))
        if named:
            return
        default = self.selection.defaults.get(spec.name)
        mine = [plugin for plugin in self.planned if plugin.kind == spec.name]
        automatic = [plugin for plugin in mine if plugin.automatic]
        by, reason = SelectedBy.DEFAULT, "the default"
        if default is not None:
            choice = [plugin for plugin in mine if plugin.name == default]
        elif spec.cardinality is Cardinality.ONE and len(automatic) == 1:
            choice, by, reason = automatic, SelectedBy.INSTALLED, "the only candidate"
        else:
            return
        for plugin in choice:
            self.planned[self.planned.index(plugin)] = msgspec.structs.replace(
                plugin, active=True, selected_by=by, reason=reason
            )
