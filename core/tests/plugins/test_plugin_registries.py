"""Kinds as registries: empty, filled by several distributions at once, open to any name, nothing chosen unasked."""

from __future__ import annotations

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
    """R12.5: what is named is created, whoever else has plugins of this and of every other kind."""
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
