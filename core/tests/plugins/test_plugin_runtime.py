"""What a process does with its share of the plan."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.errors import (
    ConfigError,
    ModelFormatError,
    PluginError,
    PluginLoadError,
    PluginMismatchError,
    PluginNotFoundError,
)
from hardpoint.interfaces.plugin import PluginAccess, PluginContext
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan, SelectedBy
from hardpoint.plugins.records import Discovery
from hardpoint.plugins.report import PluginState
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.version import __version__

if TYPE_CHECKING:
    from .conftest import Site

GOOD = """
from pydantic import BaseModel
from hardpoint.interfaces.plugin import plugin
created = []
class Options(BaseModel):
    window: int = 8
    depth: int = 1
@plugin("{kind}", options=Options)
def create(ctx, options):
    created.append(ctx.name)
    return (ctx, options)
"""
BAD_IMPORT = "import hardpoint_absent_module"
BAD_FACTORY = "def create(ctx, options): raise RuntimeError('no luck')"
ALL_ROLES = frozenset(ProcessRole)


def start(
    site: Site, roles: Iterable[ProcessRole] = ALL_ROLES, rank: int | None = None, **selection: Any
) -> PluginRuntime:
    discovery = site.discover()
    plan = build_plan(discovery, PluginSelection(**selection))
    return PluginRuntime(plan, roles, rank, installed=discovery)


def install(site: Site, distribution: str, kind: str, name: str, source: str) -> None:
    module = distribution.replace("-", "_")
    site.install(distribution, {f"{kind}:{name}": f"{module}:create"}, modules={module: source.replace("{kind}", kind)})


# -- creating


def test_create_passes_context_and_options(site: Site) -> None:
    """L12.15."""
    install(site, "acme-good", "scheduler", "sjf", GOOD)
    runtime = start(site, {ProcessRole.ENGINE, ProcessRole.WORKER}, 3, options={"scheduler": {"sjf": {"window": "4"}}})
    access: PluginAccess = runtime
    assert "acme_good" not in sys.modules
    context, options = access.create("scheduler", "sjf", access.context("scheduler", "sjf"))
    assert (context.name, context.api_version, context.rank, context.plugins) == ("sjf", 1, 3, runtime)
    assert context.roles == {ProcessRole.ENGINE, ProcessRole.WORKER}
    assert context.logger.name == "hardpoint.plugin.scheduler.sjf"
    assert (options.window, options.depth) == (4, 1)


def test_each_create_gives_a_new_instance_of_one_import(site: Site) -> None:
    install(site, "acme-good", "tokenizer", "t", GOOD)
    runtime = start(site)
    first, second = (runtime.create("tokenizer", "t", runtime.context("tokenizer", "t")) for _ in range(2))
    assert first is not second
    assert runtime.load_factory("tokenizer", "t") is runtime.load_factory("tokenizer", "t")


def test_a_bare_callable_is_a_plugin_without_options(site: Site) -> None:
    install(
        site, "acme-bare", "hash", "h", "class create:\n    def __init__(self, ctx, options): self.options = options"
    )
    created = start(site).create("hash", "h", PluginContext("h", 1, ALL_ROLES))
    assert created.options.model_dump() == {}
    with pytest.raises(ConfigError, match="knows: no options"):
        start(site, options={"hash": {"h": {"a": 1}}}).create("hash", "h", PluginContext("h", 1, ALL_ROLES))


def test_options_are_checked_where_the_plugin_loads(site: Site) -> None:
    install(site, "acme-good", "scheduler", "sjf", GOOD)
    runtime = start(site, options={"scheduler": {"sjf": {"windwo": 4}}})
    with pytest.raises(ConfigError, match=r"plugins\.scheduler\.sjf\.windwo .did you mean 'window'.*depth, window"):
        runtime.create("scheduler", "sjf", runtime.context("scheduler", "sjf"))
    runtime = start(site, options={"scheduler": {"sjf": {"window": "wide"}}})
    with pytest.raises(ConfigError, match=r"plugins\.scheduler\.sjf\.window: .*integer.*given: 'wide'"):
        runtime.create("scheduler", "sjf", runtime.context("scheduler", "sjf"))
    assert runtime.report().of(PluginState.FAILED)[0].name == "sjf"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (BAD_IMPORT, "loading .*No module named 'hardpoint_absent_module'"),
        ("raise SystemExit(3)", "loading .*SystemExit: 3"),
        ("x = 1", "loading .*has no attribute 'create'"),
        ("create = 5", "loading .*is a int, not a plain .not async. factory"),
        (BAD_FACTORY, "creating .*RuntimeError: no luck"),
        ("def create(ctx, options): return None", "creating .*returned None"),
        ("async def create(ctx, options): return 1", "loading .*is a function, not a plain .not async. factory"),
        ("def create(): return 1", "creating .*TypeError"),
        (GOOD.replace("{kind}", "executor"), "loading .*declared as a executor plugin"),
    ],
)
def test_a_failure_names_plugin_distribution_process_and_cause(site: Site, source: str, cause: str) -> None:
    """L12.4."""
    install(site, "acme-bad", "scheduler", "sjf", source)
    runtime = start(site, {ProcessRole.ENGINE})
    for _ in range(2):  # P12.3: a second attempt meets the same failure, not a half-loaded plugin
        with pytest.raises(PluginLoadError, match=cause) as caught:
            runtime.create("scheduler", "sjf", runtime.context("scheduler", "sjf"))
        assert "scheduler:sjf (acme-bad 1.0)" in str(caught.value)
        assert f"process {os.getpid()} (engine)" in str(caught.value)
    assert runtime.report().of(PluginState.FAILED)[0].reason


def test_errors_raised_on_purpose_pass_unchanged(site: Site) -> None:
    source = "from hardpoint.errors import ModelFormatError\ndef create(c, o): raise ModelFormatError('x.gguf is torn')"
    install(site, "acme-torn", "weight_loader", "w", source)
    runtime = start(site)
    with pytest.raises(ModelFormatError, match=r"^x\.gguf is torn$"):
        runtime.create("weight_loader", "w", runtime.context("weight_loader", "w"))


# -- process policy


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("role", list(ProcessRole))
def test_no_kind_loads_outside_its_processes(site: Site, kind: str, role: ProcessRole) -> None:
    """R12.3"""
    install(site, "acme-spy", kind, "spy", GOOD)
    runtime = start(site, {role}, endpoints=("spy",) if kind == "endpoint" else None)
    if role in KINDS[kind].roles:
        runtime.create(kind, "spy", runtime.context(kind, "spy"))
        assert sys.modules["acme_spy"].created == ["spy"]
        return
    with pytest.raises(PluginError, match=f"{kind} plugins run only in processes with the role"):
        runtime.create(kind, "spy", runtime.context(kind, "spy"))
    with pytest.raises(PluginError):
        runtime.create_all(kind)
    assert "acme_spy" not in sys.modules
    assert runtime.report().plugins[0].state is PluginState.DISCOVERED


def test_policy_is_judged_against_the_set_of_roles(site: Site) -> None:
    install(site, "acme-spy", "worker", "w", GOOD)
    runtime = start(site, {ProcessRole.ENGINE, ProcessRole.WORKER}, 0)
    assert runtime.create("worker", "w", runtime.context("worker", "w"))
    assert runtime.process.endswith("(engine+worker, rank 0)")


def test_unknown_names_list_the_installed_ones(site: Site) -> None:
    install(site, "acme-a", "model", "LlamaForCausalLM", GOOD)
    runtime = start(site)
    with pytest.raises(PluginNotFoundError, match=r"'Llama'.*installed: LlamaForCausalLM; install a distribution"):
        runtime.create("model", "Llama", runtime.context("model", "Llama"))
    assert runtime.names("model") == ("LlamaForCausalLM",)
    assert runtime.names("worker") == ()


def test_names_and_candidates(site: Site) -> None:
    install(site, "acme-a", "attention_backend", "a", GOOD)
    install(site, "acme-b", "attention_backend", "b", GOOD)
    runtime = start(site, allow=("b",))
    assert runtime.names("attention_backend") == ("a", "b")
    assert runtime.candidates("attention_backend") == ("b",)


# -- the plan and what is installed


def test_a_differing_version_stops_the_process(site: Site) -> None:
    """L12.5: each differing plugin is named with the process and both versions, before anything is imported."""
    install(site, "acme-a", "worker", "w", GOOD)
    discovery = site.discover()
    plan = build_plan(discovery, PluginSelection())
    newer = msgspec.structs.replace(discovery.plugins[0], version="2.0")
    with pytest.raises(PluginMismatchError, match=r"\(worker, rank 1\).*worker:w .acme-a 1\.0.: version 2\.0 is inst"):
        PluginRuntime(plan, {ProcessRole.WORKER}, 1, installed=Discovery((newer,)))
    with pytest.raises(PluginMismatchError, match=r"worker:w .acme-a 1\.0. is not installed here"):
        PluginRuntime(plan, {ProcessRole.WORKER}, 1, installed=Discovery())
    moved = msgspec.structs.replace(discovery.plugins[0], entry_point="other:create")
    with pytest.raises(PluginMismatchError, match="is other:create here, acme_a:create in the plan"):
        PluginRuntime(plan, {ProcessRole.WORKER}, 1, installed=Discovery((moved,)))
    assert "acme_a" not in sys.modules


def test_only_the_process_s_own_share_must_be_installed(site: Site) -> None:
    install(site, "acme-a", "worker", "w", GOOD)
    PluginRuntime(site.plan(), {ProcessRole.API}, installed=Discovery())


def test_another_core_version_is_a_mismatch() -> None:
    with pytest.raises(PluginMismatchError, match=r"the core is .*, the plan was made by 0\.0"):
        PluginRuntime(PluginPlan(core_version="0.0"), {ProcessRole.API})


def test_a_process_scans_for_itself_by_default(site: Site) -> None:
    install(site, "acme-a", "worker", "w", GOOD)
    plan = site.plan()
    PluginRuntime(plan, {ProcessRole.WORKER})
    (site.root / "acme_a-1.0.dist-info").rename(site.root / "acme_a-1.1.dist-info")
    metadata = site.root / "acme_a-1.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    with pytest.raises(PluginMismatchError, match=r"1\.1"):
        PluginRuntime(plan, {ProcessRole.WORKER})


# -- kinds with many


def test_create_all_quarantines_the_merely_installed_and_says_so(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """R12.10, R12.14, R12.16, P12.1, P12.2, L12.4: others go on, and one visible line tells of the failures."""
    install(site, "acme-1", "hooks", "one", GOOD)
    install(site, "acme-2", "hooks", "two", BAD_IMPORT)
    install(site, "acme-3", "hooks", "three", BAD_FACTORY)
    install(site, "acme-4", "hooks", "four", GOOD)
    runtime = start(site)
    with caplog.at_level(logging.WARNING):
        assert list(runtime.create_all("hooks")) == ["one", "four"]
    assert len(caplog.records) == 1
    for part in ("2 of the installed hooks", "acme-2 1.0", "acme-3 1.0", "no luck"):
        assert part in caplog.text
    assert {s.name: s.state for s in runtime.report().plugins} == {
        "one": PluginState.CREATED,
        "two": PluginState.FAILED,
        "three": PluginState.FAILED,
        "four": PluginState.CREATED,
    }
    summary = runtime.report().summary()
    assert "2 created, 2 failed" in summary
    assert "hooks:three (acme-3): RuntimeError: no luck" in summary


@pytest.mark.parametrize("selection", [{"strict": True}, {"choices": {"hooks": ("two",)}}])
def test_strict_or_named_failures_stop_the_start(site: Site, selection: dict[str, Any]) -> None:
    """R12.15, L12.4"""
    install(site, "acme-1", "hooks", "one", GOOD)
    install(site, "acme-2", "hooks", "two", BAD_IMPORT)
    with pytest.raises(PluginLoadError, match="hooks:two"):
        start(site, **selection).create_all("hooks")


def test_create_all_runs_once_per_process(site: Site) -> None:
    """R12.12, R12.13, I12.3"""
    install(site, "acme-1", "hooks", "one", GOOD)
    runtime = start(site)
    assert runtime.create_all("hooks")["one"] is runtime.create_all("hooks")["one"]
    assert sys.modules["acme_1"].created == ["one"]


def test_a_fork_activates_again(site: Site) -> None:
    """L12.6: fork inherits the loaded flag, so per-process initialization never runs."""
    install(site, "acme-1", "hooks", "one", GOOD + "import os\npids = []\n")
    runtime = start(site)
    parent = runtime.create_all("hooks")["one"]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        fresh = runtime.report().plugins[0].state is PluginState.ALLOWED
        again = runtime.create_all("hooks")["one"] is not parent
        os.write(write, b"ok" if fresh and again and runtime.report().pid == os.getpid() else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 2) == b"ok"
    os.close(read)
    os.close(write)
    assert runtime.create_all("hooks")["one"] is parent


def test_contexts_for_many_come_from_the_caller(site: Site) -> None:
    install(site, "acme-1", "stat_logger", "one", GOOD)
    runtime = start(site, {ProcessRole.API})

    def tagged(tag: str, **facts: Any) -> PluginContext:
        return PluginContext(**facts | {"distribution": tag})

    context = runtime.create_all("stat_logger", tagged, tag="x")["one"][0]
    assert (context.name, context.distribution) == ("one", "x")


@pytest.mark.parametrize(("tasks", "loaded"), [(("generate",), True), (("embed",), False), (None, False)])
def test_declared_tasks_decide_without_a_manifest(site: Site, tasks: tuple[str, ...] | None, loaded: bool) -> None:
    """R12.49, R12.52, R12.53"""
    source = GOOD.replace("options=Options", "options=Options, required_tasks=frozenset({'generate'})")
    install(site, "acme-e", "endpoint", "chat", source)
    runtime = start(site, {ProcessRole.API}, endpoints=("chat",), tasks=tasks)
    assert bool(runtime.create_all("endpoint")) is loaded
    if not loaded:
        status = runtime.report().plugins[0]
        assert (status.state, "it serves generate" in status.reason) == (PluginState.REFUSED, True)


@pytest.mark.parametrize(("tasks", "loaded"), [(("generate", "embed"), True), (("embed",), False)])
def test_a_plan_from_before_the_model_is_known_turns_no_endpoint_away(
    site: Site, tasks: tuple[str, ...], loaded: bool
) -> None:
    """R12.49: the launcher reads manifests first and learns of the model's tasks later."""
    source = GOOD.replace("options=Options", "options=Options, required_tasks=frozenset({'generate'})")
    manifest = {"plugins": {"endpoint": {"chat": {"required_tasks": ["generate"]}}}}
    modules = {"acme_e.mod": source.replace("{kind}", "endpoint")}
    site.install("acme-e", {"endpoint:chat": "acme_e.mod:create"}, modules=modules, manifest=manifest)
    runtime = start(site, {ProcessRole.API}, endpoints=("chat",))
    runtime.plan = msgspec.structs.replace(runtime.plan, tasks=tasks)
    assert bool(runtime.create_all("endpoint")) is loaded


def test_a_failing_endpoint_stops_the_start(site: Site) -> None:
    """R12.52: a listed endpoint was asked for, so its routes may not be missing silently."""
    install(site, "acme-e", "endpoint", "chat", BAD_FACTORY)
    with pytest.raises(PluginLoadError, match="no luck"):
        start(site, endpoints=("chat",)).create_all("endpoint")


@pytest.mark.parametrize("endpoints", [None, ()])
def test_no_endpoint_code_is_imported_unless_listed(site: Site, endpoints: tuple[str, ...] | None) -> None:
    """I12.2"""
    install(site, "acme-e", "endpoint", "chat", GOOD)
    assert start(site, endpoints=endpoints).create_all("endpoint") == {}
    assert "acme_e" not in sys.modules


def test_quarantine_follows_the_policy(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """L12.4."""
    install(site, "acme-1", "hooks", "one", GOOD)
    runtime = start(site)
    runtime.create_all("hooks")
    runtime.quarantine("hooks", "one", ValueError("late"))
    assert runtime.create_all("hooks") == {}
    assert runtime.report().plugins[0].reason == "ValueError: late"
    assert "late" in caplog.text
    with pytest.raises(PluginLoadError, match="late"):
        start(site, strict=True).quarantine("hooks", "one", ValueError("late"))


_site_numbers = itertools.count()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["hooks", "stat_logger", "endpoint"]), st.booleans()), max_size=6), st.data())
def test_loaded_is_installed_and_listed_whatever_fails(
    site: Site, plugins: list[tuple[str, bool]], data: st.DataObject
) -> None:
    """I12.1: loaded set = discovered and listed, in discovery order, whatever subset fails."""
    scratch = type(site)(site.root.parent / f"examples-{next(_site_numbers)}")
    sys.path.insert(0, str(scratch.root))
    try:
        for number, (kind, works) in enumerate(plugins):
            name = f"m{next(_site_numbers)}_{number}"
            source = GOOD if works or kind == "endpoint" else BAD_FACTORY
            scratch.install(
                f"d{number}", {f"{kind}:p{number}": f"{name}:create"}, modules={name: source.replace("{kind}", kind)}
            )
        known = [f"p{number}" for number in range(len(plugins))]
        allow = data.draw(st.none() | st.lists(st.sampled_from(known), unique=True).map(tuple) if known else st.none())
        of_kind = [f"p{number}" for number, (kind, _) in enumerate(plugins) if kind == "endpoint"]
        listed = data.draw(st.lists(st.sampled_from(of_kind), unique=True).map(tuple) if of_kind else st.just(()))
        runtime = start(scratch, allow=allow, endpoints=listed)
        for kind in ("hooks", "stat_logger", "endpoint"):
            wanted = [
                f"p{number}"
                for number, (owner, works) in enumerate(plugins)
                if owner == kind
                and (
                    f"p{number}" in listed if kind == "endpoint" else works and (allow is None or f"p{number}" in allow)
                )
            ]
            assert list(runtime.create_all(kind)) == wanted
    finally:
        sys.path.remove(str(scratch.root))


# -- fingerprint


def planned(kind: str, name: str, **changes: Any) -> PlannedPlugin:
    return msgspec.structs.replace(
        PlannedPlugin(kind, name, "acme", "1.0", "acme:create", SelectedBy.INSTALLED, ""), **changes
    )


def digest(*plugins: PlannedPlugin) -> str:
    return PluginRuntime(PluginPlan(__version__, plugins), ()).fingerprint()


def test_the_fingerprint_covers_what_computes() -> None:
    """L12.22: the compile cache key ignores plugin kernels."""
    base = planned("attention_backend", "a")
    assert digest(base) == digest(base)
    assert digest(base) == digest(base, planned("tool_parser", "t"), planned("scheduler", "unchosen"))
    assert digest(base, planned("worker", "w")) == digest(planned("worker", "w"), base)
    for change in ({"version": "1.1"}, {"distribution": "other"}, {"name": "b"}, {"options": {"x": 1}}):
        assert digest(base) != digest(msgspec.structs.replace(base, **change))
    assert digest(base) != digest(base, planned("scheduler", "s", active=True))


def test_naming_another_kernel_changes_the_fingerprint(site: Site) -> None:
    """L12.22: two engines with different overrides or operators may share no cache."""
    for kind, name in (("worker", "w"), ("kernel_override", "a"), ("kernel_override", "b"), ("custom_op", "ops")):
        install(site, f"acme-{kind}-{name}", kind, name, GOOD)
    choices: list[dict[str, Any]] = [
        {},
        {"kernel_overrides": {"linear": "a"}},
        {"kernel_overrides": {"linear": "b"}},
        {"custom_ops": ["ops"]},
    ]
    found = [start(site, options={"worker": {"w": chosen}}).fingerprint() for chosen in choices]
    assert len(set(found)) == len(choices)
    assert found[1] == start(site, options={"worker": {"w": choices[1]}}).fingerprint()


def test_a_plugin_learns_its_distribution(site: Site) -> None:
    install(site, "Acme.Kernels", "custom_op", "ops", GOOD)
    runtime = start(site)
    assert runtime.context("custom_op", "ops").distribution == runtime.plan.find("custom_op", "ops").distribution
    assert runtime.context("custom_op", "ops").distribution in ("acme-kernels", "Acme.Kernels")
    assert runtime.context("custom_op", "absent").distribution == ""
