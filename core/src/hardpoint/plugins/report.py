"""What one process made of its share of the plan."""

from __future__ import annotations

import enum

import msgspec


class PluginState(enum.StrEnum):
    """How far a plugin came in a process. ``DISCOVERED`` ones belong to other processes' roles."""

    DISCOVERED = "discovered"
    REFUSED = "refused"
    ALLOWED = "allowed"
    LOADED = "loaded"
    CREATED = "created"
    FAILED = "failed"


class PluginStatus(msgspec.Struct, frozen=True):
    """One plugin in one process. ``load_seconds`` is the time its import took, ``None`` before that."""

    kind: str
    name: str
    distribution: str
    version: str
    state: PluginState
    reason: str = ""
    load_seconds: float | None = None


class LoadReport(msgspec.Struct, frozen=True):
    """Statuses of all planned and refused plugins, as one process sees them."""

    process: str
    pid: int
    roles: tuple[str, ...]
    rank: int | None
    core_version: str
    plugins: tuple[PluginStatus, ...]

    def of(self, state: PluginState) -> tuple[PluginStatus, ...]:
        return tuple(status for status in self.plugins if status.state is state)

    def summary(self) -> str:
        """One line: counts per state, then each failure with its reason."""
        counts = ", ".join(f"{len(self.of(state))} {state}" for state in PluginState if self.of(state))
        failures = "; ".join(f"{s.kind}:{s.name} ({s.distribution}): {s.reason}" for s in self.of(PluginState.FAILED))
        return f"plugins in {self.process}: {counts or 'none'}" + (f" [failed: {failures}]" if failures else "")
