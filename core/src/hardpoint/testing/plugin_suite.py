"""What the conformance classes of all kinds share: the plugin under test, and the rules that hold for every plugin."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from abc import ABC
from collections.abc import Mapping
from functools import cache
from typing import IO, Any, ClassVar, TypeVar

import msgspec
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.plugin import PluginContext, PluginDeclaration
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS, Trust
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection

__all__ = ["PluginSuite"]

ContextT = TypeVar("ContextT", bound=PluginContext)

_IMPORT_IT = """
import importlib, json, os, signal, sys, threading
import hardpoint, hardpoint.interfaces, hardpoint.config, hardpoint.plugins, hardpoint.launch
from hardpoint.plugins.runtime import PluginRuntime

def picture():
    modules = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "hardpoint" and m is not None]
    # A class or function is what it holds: a method that was replaced counts as well.
    seen = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            seen[module.__name__, name] = id(value)
            if isinstance(value, type) and value.__module__.partition(".")[0] == "hardpoint":
                seen.update({(module.__name__, f"{name}.{key}"): id(entry) for key, entry in list(vars(value).items())
                             if not key.startswith("_abc_") and key not in ("__abstractmethods__", "__weakref__")})
    return seen

before, variables, threads = picture(), dict(os.environ), threading.active_count()
folder, handlers = os.getcwd(), [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
module, _, attribute = sys.argv[1].partition(":")
importlib.import_module(module)
after = picture()
faults = [f"it replaced {'.'.join(key)}" for key, value in before.items() if after.get(key) != value]
faults += [f"it changed the environment variable {n}" for n in sorted({*variables, *os.environ})
           if variables.get(n) != os.environ.get(n) and n not in sys.argv[2].split(",")]
faults += ["it started a thread"] if threading.active_count() != threads and "torch" not in sys.modules else []
faults += ["it changed the working folder"] if os.getcwd() != folder else []
now = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
faults += ["it changed a signal handler"] if now != handlers else []
print(json.dumps({"faults": faults, "frameworks": [n for n in ("torch", "transformers") if n in sys.modules]}))
"""
_SET_BY_FRAMEWORKS = (
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)


class PluginSuite(ABC):  # noqa: B024 (kinds whose material only the author has add abstract methods)
    """The base of every kind's conformance class.

    A plugin is put under test in one of two ways: by ``plugin``, its entry-point name in this environment, with
    ``options`` for it; or by overriding the kind's own ``create_...`` method. The rules for all plugins need the
    former, since they judge what is installed; they are skipped without it.
    """

    kind: ClassVar[str] = ""
    plugin: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    torch_free: ClassVar[bool] = False
    """Whether importing a plugin of the kind must load no framework; set by the kinds that front ends import."""

    def runtime(self) -> PluginRuntime:
        """This environment's plugins, for a process that may load every one of the kind under test."""
        return PluginRuntime(_plan(self.kind, self._name(), msgspec.json.encode(self.options)), KINDS[self.kind].roles)

    def create_plugin(self, ctx: PluginContext) -> Any:
        """The installed plugin under test, as its process would create it."""
        return self.runtime().create(self.kind, self._name(), ctx)

    def context(self, context_class: type[ContextT] = PluginContext, **fields: Any) -> ContextT:  # type: ignore[assignment]
        """A context as a process with the kind's roles would make it; ``fields`` are the kind's own."""
        kind = KINDS[self.kind]
        common: dict[str, Any] = {"name": self.plugin or "under-test", "api_version": kind.api_version}
        common["roles"] = kind.roles
        if self.plugin is not None:
            common["plugins"] = self.runtime()
        return context_class(**{**common, **fields})

    def _name(self) -> str:
        if self.plugin is None:
            raise TypeError(
                f"{type(self).__name__} does not say what is under test: set 'plugin' to the name of an installed "
                f"{self.kind} plugin, or override the method that creates it"
            )
        return self.plugin

    @pytest.fixture
    def planned(self) -> PlannedPlugin:
        if self.plugin is None:
            pytest.skip("the plugin under test is not an installed one")
        return self.runtime().plan.find(self.kind, self.plugin)

    @pytest.fixture
    def declaration(self, planned: PlannedPlugin) -> PluginDeclaration:
        return self.runtime().load_factory(planned.kind, planned.name).declaration

    def test_importing_it_changes_nothing(self, planned: PlannedPlugin) -> None:
        """R12.13, P12.4: no side effects at import, no patch of the core, no framework where none belongs."""
        # First of all tests: once the plugin is imported here as well, the child would inherit what it changed.
        # Files, not pipes: a child that the plugin leaves behind would keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                [sys.executable, "-c", _IMPORT_IT, planned.entry_point, ",".join(_SET_BY_FRAMEWORKS)],
                stdout=out,
                stderr=errors,
                timeout=120,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            said, told = (_text(stream) for stream in (out, errors))
        assert done.returncode == 0, told
        assert said, f"its import ended the process\n{told}"
        found = msgspec.json.decode(said.splitlines()[-1])
        assert found["faults"] == []
        if self.torch_free:
            assert found["frameworks"] == [], f"{self.kind} plugins are imported where no framework may be"

    def test_its_options_explain_themselves(self, declaration: PluginDeclaration) -> None:
        """Every option has a description, since ``--help=plugins`` and the manifest show nothing else."""
        mute = [name for name, field in declaration.options.model_fields.items() if not field.description]
        assert mute == [], f"options without a description: {', '.join(mute)}"

    def test_unknown_options_are_refused(self, planned: PlannedPlugin) -> None:
        """A misspelt option is never dropped silently."""
        from hardpoint.plugins.options import validate_options

        model = self.runtime().load_factory(planned.kind, planned.name).declaration.options
        with pytest.raises(ConfigError, match="no_such_option"):
            validate_options(planned.kind, planned.name, model, {**self.options, "no_such_option": 1})

    def test_its_distribution_says_which_core_it_needs(self, planned: PlannedPlugin) -> None:
        """The range of core versions stands in the metadata, so that a mismatch is found before the import."""
        (found,) = [p for p in discover().of(planned.kind) if (p.name, p.distribution) == _identity(planned)]
        assert found.requires, f"{found.distribution} states no requirement on hardpoint-core"


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _identity(planned: PlannedPlugin) -> tuple[str, str]:
    return planned.name, planned.distribution


@cache
def _plan(kind: str, name: str, options: bytes) -> PluginPlan:
    given: dict[str, Any] = msgspec.json.decode(options)
    endpoints = (name,) if KINDS[kind].trust is Trust.ALLOW_LIST else ()
    selection = PluginSelection(endpoints=endpoints, options={kind: {name: given}} if given else {})
    return build_plan(discover(), selection)
