"""Spec registry (spec 01 section 1.4)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AttentionSpec,
    FullAttentionSpec,
    HashContext,
    KVCacheSpec,
    KVSpecRegistration,
    MixedSizeSpec,
    NoOptions,
    PluginContext,
    SchedulerContext,
)
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.full_attention import FullAttentionManager, create
from hardpoint_scheduling.kv_cache.hashing import create_sha256
from hardpoint_scheduling.kv_cache.registry import SpecRegistry, load_registry
from hardpoint_scheduling.schedulers.factories import BatchOptions
from hardpoint_scheduling.schedulers.factories import create_fcfs as create_scheduler
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from sched_support import kv_config, limits, spec


class Compressed(FullAttentionSpec, frozen=True, kw_only=True):
    """Registered nowhere."""


class State(KVCacheSpec, frozen=True, kw_only=True):
    """Not an attention spec, registered nowhere."""

    kind = "state"
    heads: ClassVar[int] = 1
    tokens_per_state: ClassVar[int] = 0
    content_bytes: ClassVar[int] = 24


class StateManager(FullAttentionManager):
    """Another manager."""


CONTEXT = PluginContext(name="full_attention", api_version=1, roles=frozenset({ProcessRole.ENGINE}))


class FakePlugins:
    """Access to the given registrations by kind name."""

    def __init__(self, **registrations: KVSpecRegistration) -> None:
        self.registrations = registrations
        self.asked: list[tuple[str, str]] = []

    def create(self, kind: str, name: str, context: PluginContext) -> Any:
        self.asked.append((kind, name))
        if kind == "hash":
            assert isinstance(context, HashContext)
            return create_sha256(context, NoOptions())
        return self.registrations[name]

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(self.registrations)

    def context(self, kind: str, name: str) -> PluginContext:
        return CONTEXT

    def fingerprint(self) -> str:
        return "0"

    def notify(self, hook: str, **arguments: object) -> None:
        del hook, arguments


def test_the_first_query_sees_the_built_ins() -> None:
    """R1.65."""
    calls = []

    def builtins() -> tuple[KVSpecRegistration, ...]:
        calls.append(1)
        return (create(CONTEXT, NoOptions()),)

    registry = SpecRegistry(builtins)
    assert not calls
    assert registry.manager_for(FullAttentionSpec) is FullAttentionManager
    assert registry.classes() == {"full_attention": FullAttentionSpec}
    assert calls == [1]


def test_a_subclass_needs_no_registration() -> None:
    """R1.61."""
    registry = SpecRegistry()
    assert registry.manager_for(Compressed) is FullAttentionManager
    assert registry.grouping_base(Compressed) is FullAttentionSpec


def test_only_what_differs_is_registered() -> None:
    """R1.60, R1.61: a class leads to its manager and its grouping base."""
    registry = SpecRegistry()
    registry.register(KVSpecRegistration(Compressed, StateManager, grouping_base=AttentionSpec))
    assert registry.manager_for(Compressed) is StateManager
    assert registry.grouping_base(Compressed) is AttentionSpec
    assert registry.manager_for(FullAttentionSpec) is FullAttentionManager


def test_the_role_of_a_group_wins_over_its_class() -> None:
    """R1.62."""
    registry = SpecRegistry()
    registry.register_role("draft", StateManager)
    registry.register_role("draft", StateManager)
    assert registry.manager_for(FullAttentionSpec, role="draft") is StateManager
    assert registry.manager_for(FullAttentionSpec, role="target") is FullAttentionManager
    with pytest.raises(ConfigError, match="'draft' already has the manager StateManager"):
        registry.register_role("draft", FullAttentionManager)


def test_a_plugin_may_bring_the_manager_of_a_role() -> None:
    """R1.60, R1.62: the second map, filled by the same registration."""
    draft = KVSpecRegistration(State, StateManager, roles=("draft",))
    registry = load_registry(
        FakePlugins(state=draft, full_attention=create(CONTEXT, NoOptions())), ["full_attention", "state"]
    )
    assert registry.manager_for(FullAttentionSpec, role="draft") is StateManager
    assert registry.manager_for(FullAttentionSpec, role="") is FullAttentionManager
    with pytest.raises(ConfigError, match="'draft' already has the manager StateManager"):
        registry.register(KVSpecRegistration(Compressed, FullAttentionManager, roles=("draft",)))


def test_layers_of_mixed_size_get_the_manager_of_their_kind() -> None:
    """R1.36, R1.61: the wrapper is no kind of its own; what it wraps decides, and is checked."""
    registry = SpecRegistry()
    mixed = MixedSizeSpec.of([spec(), spec(num_kv_heads=3)])
    registry.check({"group": mixed})
    manager = registry.manager_for(type(mixed))(BlockPool(9), 0, mixed)
    assert isinstance(manager, FullAttentionManager)
    assert len(manager.allocate("a", 9)) == 3
    with pytest.raises(ConfigError, match="layer 'group': KV cache spec type State has no manager"):
        registry.check({"group": MixedSizeSpec.of([State(block_size=4), State(block_size=4)])})


def test_a_manager_serves_its_role_in_the_scheduler() -> None:
    """R1.62: whatever the group's spec."""
    plan = kv_config(9, 4, 4)
    groups = tuple(msgspec.structs.replace(g, role=role) for g, role in zip(plan.groups, ("", "draft"), strict=True))
    registry = SpecRegistry()
    registry.register_role("draft", StateManager)
    kv = KVCoordinator(msgspec.structs.replace(plan, groups=groups), registry, max_model_len=8)
    assert [type(group.manager) for group in kv._groups] == [FullAttentionManager, StateManager]


def test_equal_registration_is_silent_and_a_conflict_names_both_sides() -> None:
    """R1.63, R12.13."""
    registry = SpecRegistry()
    registry.register(KVSpecRegistration(FullAttentionSpec, FullAttentionManager))
    registry.register(KVSpecRegistration(FullAttentionSpec, FullAttentionManager, FullAttentionSpec))
    with pytest.raises(ConfigError, match="FullAttentionManager and manager StateManager"):
        registry.register(KVSpecRegistration(FullAttentionSpec, StateManager))
    with pytest.raises(ConfigError, match="registered twice"):
        registry.register(KVSpecRegistration(FullAttentionSpec, FullAttentionManager, AttentionSpec))


def test_the_grouping_base_is_an_ancestor() -> None:
    """R1.63."""
    with pytest.raises(ConfigError, match="grouping base State is not one of its ancestors"):
        SpecRegistry().register(KVSpecRegistration(FullAttentionSpec, FullAttentionManager, State))


def test_the_start_up_check_names_layer_and_type() -> None:
    """R1.64."""
    registry = SpecRegistry()
    registry.check({"a": spec(), "b": Compressed(block_size=4, num_kv_heads=1, head_size=1, dtype="int8")})
    with pytest.raises(ConfigError, match=r"layer 'mixer\.0': KV cache spec type State has no manager"):
        registry.check({"a": spec(), "mixer.0": State(block_size=4)})
    for query in (registry.manager_for, registry.grouping_base):
        with pytest.raises(ConfigError, match="State"):
            query(State)


_CHECK = """
from hardpoint.errors import ConfigError
from hardpoint.interfaces import KVCacheSpec, KVPlanRequest
from hardpoint_scheduling.kv_cache.layouts import LayerOutermostLayout
class Unknown(KVCacheSpec, frozen=True, kw_only=True):
    heads = tokens_per_state = content_bytes = 1
assert False, "assertions are on"
try:
    LayerOutermostLayout().plan(KVPlanRequest({"odd": Unknown(block_size=4)}, 1 << 40, 8, 8))
except ConfigError as error:
    print("refused:", error)
"""


def test_the_check_fires_without_assertions() -> None:
    """R1.64, P1.1: under -O, and before any memory is planned."""
    run = subprocess.run([sys.executable, "-O", "-c", _CHECK], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("refused: layer 'odd': KV cache spec type Unknown")


def test_a_stranger_adds_a_spec_and_its_manager_through_the_plugin() -> None:
    """R1.66."""
    access = FakePlugins(state=KVSpecRegistration(State, StateManager), full_attention=create(CONTEXT, NoOptions()))
    registry = load_registry(access, ["state", "full_attention"])
    assert registry.manager_for(State) is StateManager
    assert registry.classes() == {"full_attention": FullAttentionSpec, "state": State}
    assert load_registry(None, ["state"]).registration_for(State) is None


def test_a_pinned_replacement_of_a_first_party_spec_wins() -> None:
    access = FakePlugins(full_attention=KVSpecRegistration(FullAttentionSpec, StateManager))
    assert load_registry(access, ["full_attention"]).manager_for(FullAttentionSpec) is StateManager


def test_the_scheduler_gets_managers_and_hash_through_plugin_access() -> None:
    access = FakePlugins(full_attention=KVSpecRegistration(FullAttentionSpec, StateManager))
    context = SchedulerContext(
        name="fcfs",
        api_version=1,
        roles=frozenset({ProcessRole.ENGINE}),
        plugins=access,
        limits=limits(),
        kv_cache=kv_config(9),
    )
    scheduler = create_scheduler(context, BatchOptions())
    assert isinstance(scheduler, BatchScheduler)
    assert type(scheduler._state.kv._groups[0].manager) is StateManager
    assert access.asked == [("kv_cache_spec", "full_attention"), ("hash", "sha256")]


def _subclass(name: str, parents: list[type[KVCacheSpec]]) -> type[KVCacheSpec] | None:
    """None where the parents' orders contradict each other."""
    try:
        made = msgspec.defstruct(name, [], bases=tuple(parents), frozen=True, kw_only=True)
    except TypeError:
        return None
    assert issubclass(made, KVCacheSpec)
    return made


@given(st.data())
def test_lookup_finds_the_nearest_registered_ancestor(data: st.DataObject) -> None:
    """I1.7 over random hierarchies, diamonds among them."""
    check_nearest(data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_lookup_finds_the_nearest_registered_ancestor_in_many_hierarchies(data: st.DataObject) -> None:
    """I1.7."""
    check_nearest(data)


def check_nearest(data: st.DataObject) -> None:
    """A random hierarchy, some of whose classes are registered; every class asks for its manager."""
    classes: list[type[KVCacheSpec]] = [KVCacheSpec]
    for i in range(data.draw(st.integers(1, 8))):
        parents = data.draw(st.lists(st.sampled_from(classes), min_size=1, max_size=3, unique=True))
        made = _subclass(f"Spec{i}", parents)
        if made is not None:
            classes.append(made)
    registered = data.draw(st.lists(st.sampled_from(classes[1:]), unique=True))
    registry = SpecRegistry(lambda: ())
    managers = {}
    for spec_class in registered:
        managers[spec_class] = type(f"Manager{spec_class.__name__}", (FullAttentionManager,), {})
        registry.register(KVSpecRegistration(spec_class, managers[spec_class]))
    for spec_class in classes:
        nearest = next((c for c in spec_class.__mro__ if c in managers), None)
        if nearest is None:
            assert registry.registration_for(spec_class) is None
        else:
            assert registry.manager_for(spec_class) is managers[nearest]
