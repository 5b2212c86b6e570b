"""Hooks: validation at registration, order, and what an exception means."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import PluginConflictError, PluginError, PluginLoadError
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.plugins import HookRunner, PluginRuntime, PluginSelection, PluginState, build_plan
from hardpoint.roles import ProcessRole

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


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (bad_unknown_hook, r"'p', request_aded\(self, request.*there is no such hook; known hooks: process_booting,"),
        (bad_argument, r"'p', request_added\(self, reqest.*unknown arguments reqest; allowed: .*request"),
        (bad_unmarked, "'p', step_finished: it is named like a hook but lacks @hookimpl"),
        (bad_wrapper, r"'p', step_finished\(self, stats.*wrappers are not supported"),
    ],
)
def test_a_faulty_implementation_is_refused_at_registration(make: Any, fault: str) -> None:
    """Lesson: methods that exist but have no effect. The message names plugin, hook, signature and fault."""
    runner = HookRunner()
    with pytest.raises(PluginLoadError, match=fault):
        runner.register("p", make())
    assert runner.plugins() == {}


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
