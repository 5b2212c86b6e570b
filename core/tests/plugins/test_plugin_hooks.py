"""Hooks: validation at registration, order, and what an exception means."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import PluginConflictError, PluginError, PluginLoadError
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.plugins import hooks
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.report import PluginState
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.process import announce_stop, starting
from hardpoint.roles import ProcessRole
from hardpoint.testing.hooks_reset import forget_hooks

if TYPE_CHECKING:
    from .conftest import Site


class Recorder:
    def __init__(self, log: list[Any], tag: str = "r") -> None:
        self.log = log
        self.tag = tag

    @hookimpl
    def request_added(self, request: Any) -> None:
        self.log.append((self.tag, request))

    @hookimpl
    def process_started(self) -> None:
        self.log.append((self.tag, "started"))

    def helper(self, anything: int) -> int:
        return anything


class First(Recorder):
    @hookimpl(tryfirst=True)
    def request_added(self, request: Any) -> None:
        self.log.append((self.tag, request))


class Last(Recorder):
    @hookimpl(trylast=True)
    def request_added(self, request: Any) -> None:
        self.log.append((self.tag, request))


class Failing(Recorder):
    @hookimpl
    def request_added(self, request: Any) -> None:
        raise ValueError(f"cannot take {request}")


def test_implementations_may_take_fewer_arguments() -> None:
    log: list[Any] = []
    runner = HookRunner()
    runner.register("r", Recorder(log), distribution="acme")
    runner.call("process_started", roles=frozenset({ProcessRole.API}), rank=None)
    runner.call("request_added", request=1)
    runner.call("process_stopping")
    assert log == [("r", "started"), ("r", 1)]
    assert runner.plugins() == {"r": "acme"}


def test_order_follows_tryfirst_and_trylast() -> None:
    log: list[Any] = []
    runner = HookRunner()
    for plugin, kind in (("last", Last), ("a", Recorder), ("first", First), ("b", Recorder)):
        runner.register(plugin, kind(log, plugin))
    runner.call("request_added", request=0)
    called = [tag for tag, _ in log]
    assert called == list(runner.implementations("request_added"))
    assert (called[0], called[-1], set(called[1:3])) == ("first", "last", {"a", "b"})


def bad_unknown_hook() -> object:
    class Plugin:
        @hookimpl
        def request_aded(self, request: Any) -> None: ...

    return Plugin()


def bad_argument() -> object:
    class Plugin:
        @hookimpl
        def request_added(self, reqest: Any) -> None: ...

    return Plugin()


def bad_unmarked() -> object:
    class Plugin:
        def step_finished(self, stats: Any) -> None: ...

    return Plugin()


def bad_wrapper() -> object:
    class Plugin:
        @hookimpl(wrapper=True)
        def step_finished(self, stats: Any) -> Any:
            return (yield)

    return Plugin()


def bad_async() -> object:
    class Plugin:
        @hookimpl
        async def process_started(self) -> None: ...

    return Plugin()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (bad_unknown_hook, r"'p', request_aded\(self, request.*there is no such hook; known hooks: process_booting,"),
        (bad_argument, r"'p', request_added\(self, reqest.*unknown arguments reqest; allowed: .*request"),
        (bad_unmarked, "'p', step_finished: it is named like a hook but lacks @hookimpl"),
        (bad_wrapper, r"'p', step_finished\(self, stats.*wrappers are not supported"),
        (bad_async, r"'p', process_started\(self\).*nor async methods"),
    ],
)
def test_a_faulty_implementation_is_refused_at_registration(make: Any, fault: str) -> None:
    """L12.14: methods that exist but have no effect. The message names plugin, hook, signature and fault."""
    runner = HookRunner()
    with pytest.raises(PluginLoadError, match=fault):
        runner.register("p", make())
    assert runner.plugins() == {}


def test_an_exit_in_a_hook_is_a_failure_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    class Exiting:
        @hookimpl
        def request_added(self) -> None:
            raise SystemExit(0)

    log: list[Any] = []
    runner = HookRunner()
    runner.register("exiting", Exiting())
    runner.register("r", Recorder(log))
    assert not runner.call("request_added", request=1)
    assert (list(runner.plugins()), log) == (["r"], [("r", 1)])
    assert "hook request_added of 'exiting' raised SystemExit: 0" in caplog.text
    strict = HookRunner(strict=True)
    strict.register("exiting", Exiting())
    with pytest.raises(PluginLoadError, match="'exiting' raised SystemExit: 0"):
        strict.call("request_added", request=1)


def test_lenient_failures_quarantine_the_plugin_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    log: list[Any] = []
    runner = HookRunner()
    runner.register("a", Recorder(log, "a"))
    runner.register("bad", Failing(log))
    runner.register("z", Recorder(log, "z"))
    with caplog.at_level(logging.WARNING):
        runner.call("request_added", request=1)
        runner.call("request_added", request=2)
    assert sorted(log) == [("a", 1), ("a", 2), ("z", 1), ("z", 2)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "hook request_added of 'bad' raised ValueError: cannot take 1" in caplog.text
    assert set(runner.plugins()) == {"a", "z"}


def test_strict_failures_are_raised() -> None:
    runner = HookRunner(strict=True)
    runner.register("bad", Failing([]))
    with pytest.raises(PluginLoadError, match="hook request_added of 'bad' raised ValueError") as caught:
        runner.call("request_added", request=1)
    assert isinstance(caught.value.__cause__, ValueError)


def test_names_are_unique_and_plugins_can_be_removed() -> None:
    log: list[Any] = []
    runner = HookRunner()
    runner.register("r", Recorder(log))
    with pytest.raises(PluginConflictError, match="'r' is registered already"):
        runner.register("r", Recorder(log))
    runner.unregister("r")
    runner.call("request_added", request=1)
    assert log == []
    with pytest.raises(PluginError, match="no hooks plugin 'r'; registered: none"):
        runner.unregister("r")


def test_one_object_cannot_be_two_plugins() -> None:
    runner, shared = HookRunner(), Recorder([])
    runner.register("a", shared)
    with pytest.raises(PluginLoadError, match="'b': its object is another plugin's too"):
        runner.register("b", shared)
    assert runner.plugins() == {"a": ""}


def test_an_unknown_hook_and_missing_arguments_are_the_caller_s_faults() -> None:
    runner = HookRunner()
    with pytest.raises(PluginError, match="no hook 'request_aded'"):
        runner.call("request_aded", request=1)
    runner.register("r", Recorder([]))
    with pytest.raises(TypeError, match="request_added was called without request"):
        runner.call("request_added")
    assert runner.plugins()


SOURCE = """
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import plugin
seen = []
class Plugin:
    @hookimpl
    def {hook}:
        seen.append(1)
        {body}
@plugin("hooks")
def create(ctx, options): return Plugin()
"""


def runner_for(site: Site, **selection: Any) -> tuple[PluginRuntime, HookRunner]:
    discovery = site.discover()
    runtime = PluginRuntime(build_plan(discovery, PluginSelection(**selection)), {ProcessRole.API}, installed=discovery)
    return runtime, HookRunner.from_runtime(runtime)


def install(site: Site, name: str, hook: str, body: str = "pass") -> None:
    source = SOURCE.format(hook=hook, body=body)
    site.install(f"acme-{name}", {f"hooks:{name}": f"acme_{name}:create"}, modules={f"acme_{name}": source})


def test_installed_hooks_run_under_the_runtime_s_policy(site: Site) -> None:
    install(site, "good", "process_stopping(self)")
    install(site, "faulty", "process_stopping(self, extra)")
    install(site, "fails", "process_stopping(self)", "raise ValueError('late')")
    runtime, runner = runner_for(site)
    assert runner.plugins() == {"good": "acme-good", "fails": "acme-fails"}
    runner.call("process_stopping")
    assert runner.plugins() == {"good": "acme-good"}
    states = {status.name: (status.state, status.reason) for status in runtime.report().plugins}
    assert states["good"][0] is PluginState.CREATED
    assert states["faulty"][0] is PluginState.FAILED
    assert "unknown arguments extra" in states["faulty"][1]
    assert "ValueError: late" in states["fails"][1]


@pytest.mark.parametrize("selection", [{"strict": True}, {"choices": {"hooks": ("faulty",)}}])
def test_a_strict_or_named_faulty_hook_stops_the_start(site: Site, selection: dict[str, Any]) -> None:
    install(site, "faulty", "process_stopping(self, extra)")
    with pytest.raises(PluginLoadError, match=r"hooks:faulty .acme-faulty 1\.0.*unknown arguments extra"):
        runner_for(site, **selection)


# -- the hooks of a process

OBSERVER = """
import os
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import plugin
seen = []
class Plugin:
    @hookimpl
    def process_booting(self, roles, rank, environ):
        seen.append(("booting", sorted(roles), rank, environ is os.environ))
    @hookimpl
    def process_started(self, roles, rank):
        seen.append(("started", sorted(roles), rank))
    @hookimpl
    def process_stopping(self):
        seen.append("stopping")
    @hookimpl
    def model_loaded(self, model_name):
        seen.append(model_name)
@plugin("hooks")
def create(ctx, options):
    seen.append("created")
    return Plugin()
"""


@pytest.fixture
def seen(site: Site) -> list[Any]:
    site.install("acme-o", {"hooks:o": "acme_o:create"}, modules={"acme_o": OBSERVER})
    log: list[Any] = importlib.import_module("acme_o").seen
    return log


def runtime_for(site: Site, *roles: ProcessRole, **selection: Any) -> PluginRuntime:
    discovery = site.discover()
    return PluginRuntime(build_plan(discovery, PluginSelection(**selection)), roles, installed=discovery)


def test_one_process_has_one_set_of_hooks_however_often_it_boots(site: Site, seen: list[Any]) -> None:
    """R12.12, R12.13: the effect of once."""
    first, second = runtime_for(site, ProcessRole.LAUNCHER), runtime_for(site, ProcessRole.API, ProcessRole.WORKER)
    assert HookRunner.from_runtime(first) is HookRunner.from_runtime(second) is HookRunner.from_runtime(first)
    assert seen == ["created", ("booting", ["launcher"], None, True)]
    second.notify("model_loaded", model_name="m", rank=0, load_seconds=0.1)
    assert seen[2:] == ["m"]
    # Each of them reports what became of the plugins, whoever created them.
    for runtime in (first, second):
        assert [status.state for status in runtime.report().plugins] == [PluginState.CREATED]
    first.quarantine("hooks", "o", ValueError("late"))
    assert [status.reason for status in second.report().plugins] == ["ValueError: late"]


@pytest.mark.parametrize("changed", [{"strict": True}, {"choices": {"hooks": ("o",)}}])
def test_another_choice_of_hooks_is_another_set(site: Site, seen: list[Any], changed: dict[str, Any]) -> None:
    plain = HookRunner.from_runtime(runtime_for(site, ProcessRole.API))
    assert HookRunner.from_runtime(runtime_for(site, ProcessRole.API, **changed)) is not plain
    assert seen.count("created") == 2


def test_started_and_stopping_alternate(site: Site, seen: list[Any]) -> None:
    one, other = runtime_for(site, ProcessRole.API), runtime_for(site, ProcessRole.ENGINE)
    announce_stop(other)  # Nothing is at work yet.
    for _ in range(2):
        del seen[:]
        with starting(one), starting(other), starting(one):
            assert seen == [("started", ["api"], None)]
        announce_stop(one)
        announce_stop(one)
        assert len(seen) == 1
        announce_stop(other)
        assert seen[1:] == ["stopping"]


def test_a_start_that_fails_ends_what_it_began(site: Site, seen: list[Any]) -> None:
    one, other = runtime_for(site, ProcessRole.API), runtime_for(site, ProcessRole.ENGINE)
    with starting(one):
        with pytest.raises(ValueError, match="no"), starting(other):
            raise ValueError("no")
        assert seen[2:] == [("started", ["api"], None)]
    with pytest.raises(KeyboardInterrupt), starting(one):
        raise KeyboardInterrupt
    assert seen[3:] == ["stopping"]


def test_a_forked_child_boots_its_own_hooks(site: Site, seen: list[Any]) -> None:
    """L12.6: fork inherits the loaded flag, so per-process initialization never runs."""
    runtime = runtime_for(site, ProcessRole.WORKER)
    parents = HookRunner.from_runtime(runtime)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        fresh = HookRunner.from_runtime(runtime) is not parents and HookRunner.from_runtime(runtime).plugins()
        counts = [seen.count("created"), len([entry for entry in seen if entry[0] == "booting"])]
        os.write(write, b"ok" if fresh and counts == [2, 2] else repr(seen).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 1000) == b"ok"
    os.close(read)
    assert HookRunner.from_runtime(runtime) is parents
    assert seen.count("created") == 1


def test_a_hook_that_fails_to_boot_follows_the_policy(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """R12.14, R12.15; a failed start may be tried again."""
    install(site, "torn", "process_booting(self)", "raise OSError('torn')")
    runtime = runtime_for(site, ProcessRole.API)
    assert HookRunner.from_runtime(runtime).plugins() == {}
    assert "hook process_booting of 'torn' raised OSError: torn" in caplog.text
    assert [status.state for status in runtime.report().plugins] == [PluginState.FAILED]
    for _ in range(2):
        with pytest.raises(PluginLoadError, match="torn"):
            HookRunner.from_runtime(runtime_for(site, ProcessRole.API, strict=True))


def test_only_the_test_kit_makes_a_process_forget(site: Site, seen: list[Any]) -> None:
    """R12.18: the reset is for tests; nothing else in the core takes anything out."""
    runtime = runtime_for(site, ProcessRole.API)
    HookRunner.from_runtime(runtime)
    forget_hooks()
    HookRunner.from_runtime(runtime_for(site, ProcessRole.API))
    assert seen.count("created") == 2
    source = Path(hooks.__file__).parents[1]
    uses = {path.relative_to(source).as_posix(): path.read_text().count("_of_process") for path in source.rglob("*.py")}
    assert {path for path, count in uses.items() if count} == {"plugins/hooks.py", "testing/hooks_reset.py"}
    text = Path(hooks.__file__).read_text()
    assert not [word for word in ("_of_process.pop", "_of_process.clear", "del _of_process") if word in text]


def test_one_plugin_s_implementation_can_be_called_alone() -> None:
    log: list[Any] = []
    runner = HookRunner()
    for name, kind in (("a", Recorder), ("bad", Failing), ("z", Recorder)):
        runner.register(name, kind(log, name))
    assert runner.call("request_added", only="a", request=1)
    assert not runner.call("request_added", only="bad", request=2)
    assert log == [("a", 1)]
    assert set(runner.plugins()) == {"a", "z"}
    assert runner.call("step_finished", stats=None)
