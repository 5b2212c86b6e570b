"""Kinds as registries: empty, filled by several distributions at once, open to any name, nothing chosen unasked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import PluginConflictError, PluginNotFoundError
from hardpoint.plugins.kinds import KINDS, Cardinality, Trust
from hardpoint.plugins.plan import PluginPlan, SelectedBy
from hardpoint.plugins.records import DiscoveredPlugin, Discovery
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole

if TYPE_CHECKING:
    from .conftest import Site

SOURCE = "def create(ctx, options): return (__name__, ctx.name)\n"
KEYED = sorted(kind for kind, spec in KINDS.items() if spec.cardinality is Cardinality.KEYED)
MANY = sorted(kind for kind, spec in KINDS.items() if spec.cardinality is Cardinality.MANY)
SEEDS = ("acme", "rivet")


def fill(site: Site) -> None:
    """Two distributions, each with a plugin of its own for every kind."""
    for owner in SEEDS:
        plugins = {f"{kind}:{owner}_{kind}": f"{owner}_parts:create" for kind in KINDS}
        site.install(f"{owner}-parts", plugins, modules={f"{owner}_parts": SOURCE})


def start(site: Site, **selection: Any) -> PluginRuntime:
    discovery = site.discover()
    plan = build_plan(discovery, PluginSelection(**selection))
    return PluginRuntime(plan, frozenset(ProcessRole), installed=discovery)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kind_nobody_provides_is_empty(site: Site, kind: str) -> None:
    """R12.6: an empty answer, whether the names are asked for or all plugins; no error and nothing said."""
    runtime = start(site)
    assert runtime.names(kind) == runtime.candidates(kind) == ()
    assert runtime.create_all(kind) == {}
    assert runtime.plan.notices == ()


@pytest.mark.parametrize("kind", KEYED)
def test_distributions_fill_a_registry_side_by_side(site: Site, kind: str) -> None:
    """R12.5, R12.45: what is named is created, whoever else has plugins of this and of every other kind."""
    fill(site)
    runtime = start(site)
    assert runtime.names(kind) == (f"acme_{kind}", f"rivet_{kind}")
    made = runtime.create(kind, f"rivet_{kind}", runtime.context(kind, f"rivet_{kind}"))
    assert made == ("rivet_parts", f"rivet_{kind}")
    assert "acme_parts" not in sys.modules, "the neighbor was not asked for"
    made = runtime.create(kind, f"acme_{kind}", runtime.context(kind, f"acme_{kind}"))
    assert made == ("acme_parts", f"acme_{kind}")


@pytest.mark.parametrize("kind", MANY)
def test_observers_of_several_distributions_act_together(site: Site, kind: str) -> None:
    """R12.5, R12.11: all of them, in the order in which they were found."""
    fill(site)
    listed = tuple(f"{owner}_{kind}" for owner in SEEDS) if KINDS[kind].trust is Trust.ALLOW_LIST else None
    assert list(start(site, endpoints=listed).create_all(kind)) == [f"{owner}_{kind}" for owner in SEEDS]


def test_each_plugin_of_a_package_is_judged_alone(site: Site) -> None:
    """R12.4: one fails at import, one in its factory, one is for another core; the others of the package work."""
    points = {
        "hooks:torn": "mixed_torn:create",
        "hooks:refusing": "mixed_good:refuse",
        "hardpoint.hooks.v99|later": "mixed_good:create",
        "hooks:good": "mixed_good:create",
        "tokenizer:good": "mixed_good:create",
    }
    good = SOURCE + "def refuse(ctx, options): raise OSError('no luck')\n"
    site.install("mixed", points, modules={"mixed_torn": "import hardpoint_absent_module", "mixed_good": good})
    runtime = start(site)
    assert list(runtime.create_all("hooks")) == ["good"]
    assert runtime.create("tokenizer", "good", runtime.context("tokenizer", "good")) == ("mixed_good", "good")
    states = {f"{status.kind}:{status.name}": str(status.state) for status in runtime.report().plugins}
    assert states == {
        "hooks:torn": "failed",
        "hooks:refusing": "failed",
        "hooks:later": "refused",
        "hooks:good": "created",
        "tokenizer:good": "created",
    }


@pytest.mark.parametrize(
    ("tasks", "active"),
    [(("generate",), ["chat"]), (("embed",), ["vectors"]), (("embed", "generate"), ["chat", "vectors"]), (None, [])],
)
def test_one_package_serves_each_task_with_its_endpoint(
    site: Site, tasks: tuple[str, ...] | None, active: list[str]
) -> None:
    """R12.55, R12.53: both are listed; which of them act is decided by what the server offers."""
    source = "from hardpoint.interfaces.plugin import plugin\n" + "".join(
        f"@plugin('endpoint', required_tasks=frozenset({{'{task}'}}))\ndef {name}(ctx, options): return ctx.name\n"
        for name, task in (("chat", "generate"), ("vectors", "embed"))
    )
    points = {f"endpoint:{name}": f"acme_routes:{name}" for name in ("chat", "vectors")}
    site.install("acme-routes", points, modules={"acme_routes": source})
    runtime = start(site, endpoints=("chat", "vectors"), tasks=tasks)
    assert list(runtime.create_all("endpoint")) == active


REGISTER = """
import json, sys
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole

runtimes = [PluginRuntime(PluginPlan.from_bytes(bytes.fromhex(sys.argv[1])), set(ProcessRole)) for _ in range(2)]
for _ in range(int(sys.argv[2])):
    for runtime in runtimes:
        for planned in runtime.plan.plugins:
            if planned.active:
                runtime.create_all(planned.kind)
            else:
                runtime.create(planned.kind, planned.name, runtime.context(planned.kind, planned.name))
rows = [[[s.kind, s.name, s.distribution, s.state] for s in runtime.report().plugins] for runtime in runtimes]
assert rows[0] == rows[1]
print(json.dumps([rows[0], {kind: list(runtimes[0].create_all(kind)) for kind in ("hooks", "stat_logger", "endpoint")},
                  sys.modules["acme_parts"].imported, runtimes[0].fingerprint()]))
"""


def test_any_number_of_loads_in_any_process_gives_equal_registries(site: Site) -> None:
    """I12.3, P12.4: how often a process loads, and which process it is, shows in nothing."""
    fill(site)
    counting = SOURCE + "imported = globals().get('imported', 0) + 1\n"
    for owner in SEEDS:
        site.write_module(f"{owner}_parts", counting)
    plan = build_plan(site.discover(), PluginSelection(endpoints=tuple(f"{owner}_endpoint" for owner in SEEDS)))
    told = set()
    for times in (1, 2, 3):
        done = subprocess.run(
            [sys.executable, "-c", REGISTER, plan.to_bytes().hex(), str(times)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site.root), *sys.path])},
        )
        assert done.returncode == 0, done.stderr
        told.add(done.stdout)
    (line,) = told
    rows, groups, imported, _ = json.loads(line)
    assert {row[3] for row in rows} == {"created"}
    assert len(rows) == 2 * len(KINDS)
    assert groups["hooks"] == ["acme_hooks", "rivet_hooks"]
    assert imported == 1


@pytest.mark.parametrize("kind", ["compiler", "graph_backend", "communicator", "kernel_override", "memory"])
def test_two_of_a_keyed_kind_wait_for_a_name(site: Site, kind: str) -> None:
    """L12.19: of two compilers none is active until one is named, and then only that one."""
    fill(site)
    assert start(site).create_all(kind) == {}
    assert not any(planned.active for planned in start(site).plan.of(kind))
    named = start(site, choices={kind: f"rivet_{kind}"}).plan.of(kind)
    assert [(planned.name, planned.active) for planned in named] == [(f"acme_{kind}", False), (f"rivet_{kind}", True)]


@pytest.mark.parametrize("kind", ["platform", "executor", "scheduler"])
def test_two_of_a_choose_one_kind_conflict(site: Site, kind: str) -> None:
    """L12.19: asking for the one active plugin tells of both."""
    fill(site)
    with pytest.raises(PluginConflictError, match=f"acme_{kind}.*rivet_{kind}.*name one with"):
        start(site).plan.selected(kind)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Z")), min_size=1, max_size=30)


def installed(kind: str, name: str) -> Discovery:
    return Discovery((DiscoveredPlugin(kind, name, 1, "acme", "1.0", "acme_parts:create", "/acme"),))


@given(st.sampled_from(sorted(KINDS)), NAMES)
def test_any_name_is_a_name(kind: str, name: str) -> None:
    """L12.17: registries are open: every text an entry point can be called is planned, found and shipped as it is."""
    plan = build_plan(installed(kind, name), PluginSelection(endpoints=(name,) if kind == "endpoint" else None))
    assert plan.find(kind, name).name == name
    again = PluginPlan.from_bytes(plan.choose(kind, name, SelectedBy.NAMED, "asked for").to_bytes())
    assert again.find(kind, name).selected_by is SelectedBy.NAMED


@given(st.sampled_from(sorted(KINDS)), NAMES, NAMES)
def test_only_that_name_is_the_name(kind: str, name: str, other: str) -> None:
    """R12.8, L12.17: compared exactly; what is not installed is an error that lists what is."""
    plan = build_plan(installed(kind, name), PluginSelection(endpoints=(name,) if kind == "endpoint" else None))
    if other != name:
        with pytest.raises(PluginNotFoundError) as caught:
            plan.find(kind, other)
        assert name in str(caught.value)
