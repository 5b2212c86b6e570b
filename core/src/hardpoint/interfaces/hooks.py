"""Hooks: observers of a process's life and of requests. The kind ``hooks``; its factory returns any object.

An implementation is a method named like a hook and marked with :data:`hookimpl`. It may leave out arguments it does
not need. ``hookimpl(tryfirst=True)`` and ``trylast=True`` order implementations; wrappers are refused: an observer
may not stand between the engine and another observer. Return values are ignored::

    class Audit:
        @hookimpl
        def request_finished(self, output): ...

Hooks run on the process's main loop, so they must return at once. An exception quarantines its plugin, or stops the
process if the plugin is strict (``--strict-plugins``) or was named.

A process creates its hooks before anything else and keeps them to its end, however many engines it starts and stops:
``ctx.platform`` is ``None``, and where an instance is launched ``ctx.roles`` holds the launcher alone and
``ctx.plugins`` knows hooks only. A forked process creates its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence, Set
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
    def process_booting(self, roles: Set[ProcessRole], rank: int | None, environ: MutableMapping[str, str]) -> None:
        """All processes, once, before a platform is imported and before any framework is.

        ``environ`` is the process's environment: what is set there, such as ``OMP_NUM_THREADS``, is seen by all that
        comes later, and inherited by processes started from here. ``roles`` is the launcher's alone where an instance
        is launched, since what else that process will be is settled later; ``rank`` as in :meth:`process_started`.
        """

    @hookspec
    def configure(self, config: dict[str, Any]) -> None:
        """Launcher, after ``process_booting``: the settings as they were given, to be edited in place.

        ``config`` is a nested dict as in a configuration file, with ``engines`` by served name, ``server``, ``plugins``
        and so on; it holds what command line, environment and file set, not the defaults, and was not validated yet.
        Of a hook that raises no edit is kept. The keys that were set are not in it.

        Which plugins may act and who may ask the server is for the operator alone to say, so nothing may be changed
        under ``plugin_policy`` and ``plugins.hooks``, nor ``endpoints``, ``host``, ``allow_anonymous``,
        ``allowed_hosts``, ``api_key``, ``api_key_file``, ``admin_key`` and ``admin_key_file`` of ``server``.
        """

    @hookspec
    def process_started(self, roles: Set[ProcessRole], rank: int | None) -> None:
        """All processes, before any work. ``rank`` is the global rank of a worker's own process, ``None`` elsewhere.

        Where several engines live in one process, once for all that overlap.
        """

    @hookspec
    def process_stopping(self) -> None:
        """All processes, once after each ``process_started``: the last act of an orderly end."""

    @hookspec
    def request_added(self, request: Any) -> None:
        """Engine: the ``EngineRequest`` was accepted and waits for the scheduler."""

    @hookspec
    def request_finished(self, output: Any) -> None:
        """Engine: the terminal output of a request, exactly once per request, whatever its fate."""

    @hookspec
    def step_finished(self, stats: Any, outputs: Sequence[Any]) -> None:
        """Engine: after every step, with that step's scheduler statistics and the ``EngineOutput`` that it brought."""

    @hookspec
    def startup_phase(self, phase: str) -> None:
        """The engine's process, while an engine starts: ``phase`` begins, one of ``weights``, ``kv_cache``,
        ``warm_up``, and ``ready`` at the end. A worker in the same process may tell of further ones in between."""

    @hookspec
    def model_loaded(self, model_name: str, rank: int, load_seconds: float) -> None:
        """Each worker: the weights are in place. ``model_name`` is the model as it was asked for, before any served
        name; ``load_seconds`` is wall-clock time."""
