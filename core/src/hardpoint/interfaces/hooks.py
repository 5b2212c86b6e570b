"""Hooks: observers of a process's life and of requests. The kind ``hooks``; its factory returns any object.

An implementation is a method named like a hook and marked with :data:`hookimpl`. It may leave out arguments it does
not need. ``hookimpl(tryfirst=True)`` and ``trylast=True`` order implementations; wrappers are refused: an observer
may not stand between the engine and another observer. Return values are ignored::

    class Audit:
        @hookimpl
        def request_finished(self, output): ...

Hooks run on the process's main loop, so they must return at once. An exception quarantines its plugin, or stops the
process if the plugin is strict (``--strict-plugins``) or was named.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pluggy

from hardpoint.roles import ProcessRole

__all__ = ["HOOK_NAMESPACE", "HookSpecs", "hookimpl"]

HOOK_NAMESPACE = "hardpoint"

hookspec = pluggy.HookspecMarker(HOOK_NAMESPACE)
hookimpl = pluggy.HookimplMarker(HOOK_NAMESPACE)


class HookSpecs:
    """Every hook, with its full arguments and the process that calls it."""

    @hookspec
    def process_started(self, roles: Set[ProcessRole], rank: int | None) -> None:
        """All processes, before any work. ``rank`` is the worker's global rank, ``None`` outside a worker."""

    @hookspec
    def process_stopping(self) -> None:
        """All processes, once, when an orderly end begins."""

    @hookspec
    def configure(self, config: Any) -> None:
        """Launcher, before the configuration is checked and frozen. ``config`` is edited in place."""

    @hookspec
    def request_added(self, request: Any) -> None:
        """Engine: the ``EngineRequest`` was accepted and waits for the scheduler."""

    @hookspec
    def request_finished(self, output: Any) -> None:
        """Engine: the terminal output of a request, exactly once per request, whatever its fate."""

    @hookspec
    def step_finished(self, stats: Any) -> None:
        """Engine: after every step, with that step's scheduler statistics."""

    @hookspec
    def model_loaded(self, model_name: str, rank: int, load_seconds: float) -> None:
        """Worker: the weights are in place. ``load_seconds`` is wall-clock time."""
