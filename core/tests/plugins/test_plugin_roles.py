"""Which processes may load what: by the kind for every set of roles, and by what a plugin declares of itself."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import PluginError, PluginLoadError
from hardpoint.interfaces.plugin import declaration_of, plugin
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.report import PluginState
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole

if TYPE_CHECKING:
    from .conftest import Site

ROLE_SETS = [
    frozenset(roles) for count in range(len(ProcessRole) + 1) for roles in itertools.combinations(ProcessRole, count)
]
AS_DECLARED = ("logits_processor", "speculator", "structured_output", "eplb_policy")
"""Kinds of the engine or the worker or both, as each plugin says."""

SOURCE = """
from hardpoint.interfaces.plugin import ProcessRole, plugin
@plugin({kind!r}, roles={roles})
def create(ctx, options): return ctx
"""


def ids(roles: frozenset[ProcessRole]) -> str:
    return "+".join(sorted(roles)) or "none"


def runtime(site: Site, roles: frozenset[ProcessRole], **selection: Any) -> PluginRuntime:
    discovery = site.discover()
    return PluginRuntime(build_plan(discovery, PluginSelection(**selection)), roles, installed=discovery)


@pytest.mark.parametrize("roles", ROLE_SETS, ids=ids)
def test_every_set_of_roles_loads_its_kinds_and_no_other(site: Site, roles: frozenset[ProcessRole]) -> None:
    """R12.3: nothing of a refused kind is imported, whichever way it is asked for."""
    modules = {f"spy_{kind}": "def create(ctx, options): return ctx" for kind in KINDS}
    site.install("spies", {f"{kind}:spy": f"spy_{kind}:create" for kind in KINDS}, modules=modules)
    process = runtime(site, roles, endpoints=("spy",))
    for kind, spec in KINDS.items():
        permitted = bool(spec.roles & roles)
        for ask in (
            lambda kind=kind: process.load_factory(kind, "spy"),
            lambda kind=kind: process.create(kind, "spy", process.context(kind, "spy")),
            lambda kind=kind: process.create_all(kind),
        ):
            if permitted:
                ask()
                continue
            with pytest.raises(PluginError, match=f"{kind} plugins run only in processes with the role"):
                ask()
        assert (f"spy_{kind}" in sys.modules) is permitted
    states = {status.kind: status.state for status in process.report().plugins}
    assert {kind for kind, state in states.items() if state is PluginState.DISCOVERED} == {
        kind for kind, spec in KINDS.items() if not spec.roles & roles
    }


@pytest.mark.parametrize("kind", AS_DECLARED)
@pytest.mark.parametrize("declared", ["ENGINE", "WORKER"])
def test_a_plugin_may_narrow_its_kind_s_processes(site: Site, kind: str, declared: str) -> None:
    """R12.3, as declared: in the other process it is refused by name, with the role it was made for."""
    source = SOURCE.format(kind=kind, roles=f"{{ProcessRole.{declared}}}")
    site.install("acme-p", {f"{kind}:p": "acme_p:create"}, modules={"acme_p": source})
    mine = ProcessRole[declared]
    for roles in ROLE_SETS:
        process = runtime(site, roles)
        if mine in roles:
            assert process.create(kind, "p", process.context(kind, "p")).roles == roles
        elif roles & KINDS[kind].roles:
            text = rf"{kind}:p \(acme-p 1\.0\) may run only in processes with the role {mine}; this is process \d+"
            for _ in range(2):
                with pytest.raises(PluginError, match=text):
                    process.create(kind, "p", process.context(kind, "p"))


@pytest.mark.parametrize("roles", ["None", "{ProcessRole.ENGINE, ProcessRole.WORKER}"])
def test_without_a_word_it_runs_wherever_its_kind_does(site: Site, roles: str) -> None:
    source = SOURCE.format(kind="speculator", roles=roles)
    site.install("acme-p", {"speculator:p": "acme_p:create"}, modules={"acme_p": source})
    for role in (ProcessRole.ENGINE, ProcessRole.WORKER):
        process = runtime(site, frozenset({role}))
        assert process.create("speculator", "p", process.context("speculator", "p"))


def test_declaring_a_role_where_the_kind_never_runs_is_a_fault(site: Site) -> None:
    """A declaration without effect would be believed."""
    source = SOURCE.format(kind="speculator", roles="{ProcessRole.WORKER, ProcessRole.API}")
    site.install("acme-p", {"speculator:p": "acme_p:create"}, modules={"acme_p": source})
    with pytest.raises(PluginLoadError, match="declared for the role api, where no speculator plugin runs"):
        runtime(site, frozenset({ProcessRole.WORKER})).load_factory("speculator", "p")


def test_the_declaration_carries_the_roles() -> None:
    @plugin("speculator", roles=frozenset({ProcessRole.WORKER}))
    def narrow() -> None: ...

    @plugin("speculator")
    def plain() -> None: ...

    declared = [declaration_of(factory) for factory in (narrow, plain)]
    assert [None if one is None else one.roles for one in declared] == [frozenset({ProcessRole.WORKER}), None]
