"""Runs hooks. pluggy validates and orders implementations; calling is our own, so that a failing one is isolated."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pluggy

from hardpoint.errors import PluginConflictError, PluginError, PluginLoadError
from hardpoint.interfaces.hooks import HOOK_NAMESPACE, HookSpecs

if TYPE_CHECKING:
    from hardpoint.plugins.runtime import PluginRuntime


_logger = logging.getLogger("hardpoint.plugins")
_Implementation = tuple[str, Callable[..., object], tuple[str, ...]]
FailurePolicy = Callable[[str, PluginError], None]
_of_process: dict[tuple[int, bool, bytes], tuple[HookRunner, PluginRuntime]] = {}
"""By process id, so that a forked child makes its own, each with the runtime that made it. Only tests take one out."""


class HookRunner:
    """The hook implementations of one process.

    ``on_failure(plugin, error)`` decides what a failing implementation means: it raises to stop the process, or
    returns to have the plugin removed. Without one, ``strict`` decides.
    """

    def __init__(self, *, strict: bool = False, on_failure: FailurePolicy | None = None) -> None:
        self.strict = strict
        self._on_failure = on_failure
        self._manager = pluggy.PluginManager(HOOK_NAMESPACE)
        self._manager.add_hookspecs(HookSpecs)
        self._distributions: dict[str, str] = {}
        self._calls: dict[str, tuple[_Implementation, ...]] = {}
        self._at_work: set[PluginRuntime] = set()

    @classmethod
    def from_runtime(cls, runtime: PluginRuntime) -> HookRunner:
        """This process's runner for the ``hooks`` plugins in the plan of ``runtime``.

        The first runtime to ask creates the plugins, under its failure policy, and has them told ``process_booting``;
        others of the same process with the same hooks in their plan share them.
        """
        key = (os.getpid(), runtime.plan.strict, msgspec.msgpack.encode(runtime.plan.of("hooks")))
        if key not in _of_process:
            made = cls(strict=runtime.plan.strict, on_failure=partial(runtime.quarantine, "hooks"))
            for name, instance in runtime.create_all("hooks").items():
                try:
                    made.register(name, instance, distribution=runtime.plan.find("hooks", name).distribution)
                except PluginError as error:
                    runtime.quarantine("hooks", name, error)
            made.call("process_booting", roles=runtime.roles, rank=runtime.rank, environ=os.environ)
            _of_process[key] = made, runtime
        runner, runtime.hooks_owner = _of_process[key]
        return runner

    def start(self, runtime: PluginRuntime) -> None:
        """``runtime`` begins its work: ``process_started``, unless another one of this process is at work already."""
        if not self._at_work:
            self.call("process_started", roles=runtime.roles, rank=runtime.rank)
        self._at_work.add(runtime)

    def stop(self, runtime: PluginRuntime) -> None:
        """``runtime`` has ended its work: ``process_stopping``, once nobody else is at work. Idempotent."""
        if runtime in self._at_work:
            self._at_work.remove(runtime)
            if not self._at_work:
                self.call("process_stopping")

    def register(self, plugin: str, instance: object, *, distribution: str = "") -> None:
        """Add a plugin's implementations.

        Raises ``PluginLoadError`` naming plugin, hook, signature and fault, ``PluginConflictError`` for a name in use.
        """
        if plugin in self._distributions:
            raise PluginConflictError(f"a hooks plugin named {plugin!r} is registered already")
        for name in dir(instance):
            fault = _fault(inspect.getattr_static(instance, name), name)
            if fault:
                raise PluginLoadError(f"hooks plugin {plugin!r}, {name}{fault}")
        try:
            self._manager.register(instance, plugin)
        except ValueError as error:
            raise PluginLoadError(f"hooks plugin {plugin!r}: its object is another plugin's too: {error}") from error
        self._distributions[plugin] = distribution
        self._calls.clear()

    def unregister(self, plugin: str) -> None:
        """Remove a plugin. Raises ``PluginError`` when there is none of that name."""
        if self._distributions.pop(plugin, None) is None:
            raise PluginError(f"no hooks plugin {plugin!r}; registered: {', '.join(self._distributions) or 'none'}")
        self._manager.unregister(name=plugin)
        self._calls.clear()

    def plugins(self) -> dict[str, str]:
        """Registered plugins by name, with their distributions."""
        return dict(self._distributions)

    def implementations(self, hook: str) -> tuple[str, ...]:
        """Names of the plugins that implement ``hook``, in calling order."""
        return tuple(plugin for plugin, _, _ in self._implementations(hook))

    def call(self, hook: str, *, only: str | None = None, **arguments: Any) -> bool:
        """Run every implementation of ``hook`` in order, or that of one plugin. Cheap when there is none.

        False when one failed and the failure policy lets the process go on; raises what the policy raises.
        """
        succeeded = True
        for plugin, function, names in self._implementations(hook):
            missing = [name for name in names if name not in arguments]
            if missing:
                raise TypeError(f"hook {hook} was called without {', '.join(missing)}")
            try:
                if only in (None, plugin):
                    function(*[arguments[name] for name in names])
            except (Exception, SystemExit) as error:
                self._failed(plugin, hook, error)
                succeeded = False
        return succeeded

    def _implementations(self, hook: str) -> tuple[_Implementation, ...]:
        cached = self._calls.get(hook)
        if cached is None:
            caller = getattr(self._manager.hook, hook, None)
            if caller is None:
                raise PluginError(f"there is no hook {hook!r}")
            # pluggy keeps implementations in reverse calling order.
            cached = tuple((i.plugin_name, i.function, tuple(i.argnames)) for i in reversed(caller.get_hookimpls()))
            self._calls[hook] = cached
        return cached

    def _failed(self, plugin: str, hook: str, error: BaseException) -> None:
        located = PluginError(f"hook {hook} of {plugin!r} raised {type(error).__name__}: {error}")
        located.__cause__ = error
        if self._on_failure is not None:
            self._on_failure(plugin, located)
        elif self.strict:
            raise PluginLoadError(str(located)) from error
        else:
            _logger.warning("%s; the plugin is left out from now on", located, exc_info=error)
        if plugin in self._distributions:
            self.unregister(plugin)


def _fault(method: object, name: str) -> str:
    """What makes an attribute unfit as an implementation; empty for sound ones and for what is no hook at all."""
    marks = getattr(method, f"{HOOK_NAMESPACE}_impl", None)
    specification = None if name.startswith("_") else vars(HookSpecs).get(name)
    if marks is None or not callable(method):
        is_hook = callable(method) and specification is not None
        return ": it is named like a hook but lacks @hookimpl, so it would never run" if is_hook else ""
    signature = inspect.signature(method)
    if specification is None:
        known = ", ".join(hook for hook in vars(HookSpecs) if not hook.startswith("_"))
        return f"{signature}: there is no such hook; known hooks: {known}"
    if marks["wrapper"] or marks["hookwrapper"] or inspect.iscoroutinefunction(method):
        return f"{signature}: wrappers are not supported, nor async methods; only plain implementations are"
    allowed = inspect.signature(specification).parameters
    unknown = [parameter for parameter in signature.parameters if parameter not in allowed]
    return f"{signature}: unknown arguments {', '.join(unknown)}; allowed: {', '.join(allowed)}" if unknown else ""
