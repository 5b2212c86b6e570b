"""The frozen plan: which plugins an instance uses and why. The launcher makes it, every process receives its bytes."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from hardpoint.errors import PluginConflictError, PluginNotFoundError
from hardpoint.plugins.kinds import kind_spec, missing_plugin, no_candidate
from hardpoint.plugins.records import RefusedPlugin


class SelectedBy(enum.StrEnum):
    """Why a plugin is there. The failure of one that is merely ``INSTALLED`` stops nothing unless strict."""

    NAMED = "named"
    DEFAULT = "default"
    INSTALLED = "installed"


class PlannedPlugin(msgspec.Struct, frozen=True):
    """One admitted plugin.

    ``active``: chosen for its kind, or of a kind that loads all that is admitted. Others are imported only when a
    model, request or setting names them. ``automatic``: may be chosen without being named.
    """

    kind: str
    name: str
    distribution: str
    version: str
    entry_point: str
    selected_by: SelectedBy
    reason: str
    active: bool = False
    automatic: bool = True
    options: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """How messages name the plugin and where it comes from."""
        return f"{self.kind}:{self.name} ({f'{self.distribution} {self.version}'.strip()})"


class PluginPlan(msgspec.Struct, frozen=True):
    """What every process of an instance agrees on. ``notices`` are for the operator's eyes, one line each."""

    core_version: str
    plugins: tuple[PlannedPlugin, ...] = ()
    refused: tuple[RefusedPlugin, ...] = ()
    notices: tuple[str, ...] = ()
    strict: bool = False
    tasks: tuple[str, ...] | None = None

    def of(self, kind: str) -> tuple[PlannedPlugin, ...]:
        """The admitted plugins of ``kind`` in discovery order."""
        kind_spec(kind)
        return tuple(plugin for plugin in self.plugins if plugin.kind == kind)

    def find(self, kind: str, name: str) -> PlannedPlugin:
        """Raises ``PluginNotFoundError`` that lists the alternatives and says what to install."""
        admitted = {plugin.name: plugin for plugin in self.of(kind)}
        if name not in admitted:
            why = [entry.reason for entry in self.refused if (entry.kind, entry.name) == (kind, name)]
            raise missing_plugin(kind, name, admitted, *why[:1])
        return admitted[name]

    def selected(self, kind: str) -> PlannedPlugin:
        """The one active plugin of a choose-one kind.

        Raises ``PluginConflictError`` when several candidates wait for a choice, ``PluginNotFoundError`` when there
        is none.
        """
        candidates = [plugin for plugin in self.of(kind) if plugin.active or plugin.automatic]
        active = [plugin for plugin in candidates if plugin.active]
        if len(active) == 1:
            return active[0]
        if not candidates:
            raise PluginNotFoundError(no_candidate(kind))
        raise PluginConflictError(
            f"{len(candidates)} {kind} plugins are installed and none was chosen: "
            f"{', '.join(plugin.label for plugin in candidates)}; name one with --{kind.replace('_', '-')}"
        )

    def choose(self, kind: str, name: str, selected_by: SelectedBy, reason: str) -> PluginPlan:
        """A plan in which ``name`` is active; for choose-one kinds every other candidate ceases to be.

        Raises ``PluginNotFoundError`` for a name that is not admitted.
        """
        chosen = self.find(kind, name)
        alone = kind_spec(kind).chosen

        def revised(plugin: PlannedPlugin) -> PlannedPlugin:
            if plugin is chosen:
                return msgspec.structs.replace(plugin, active=True, selected_by=selected_by, reason=reason)
            if alone and plugin.kind == kind and plugin.active:
                return msgspec.structs.replace(plugin, active=False, reason=f"{name!r} was chosen instead")
            return plugin

        return msgspec.structs.replace(self, plugins=tuple(revised(plugin) for plugin in self.plugins))

    def to_bytes(self) -> bytes:
        """MessagePack form for child processes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PluginPlan:
        """Inverse of :meth:`to_bytes`. Raises ``msgspec.DecodeError`` for anything else."""
        return msgspec.msgpack.decode(data, type=cls)
