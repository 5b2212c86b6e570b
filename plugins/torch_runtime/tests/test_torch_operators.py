"""The operator registry: who owns a namespace, what is refused, and that registering twice is registering once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import PluginConflictError, PluginError, PluginNotFoundError
from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator, CustomOps
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus
from hardpoint_torch_runtime.ops import OPERATORS, OperatorRegistry, check_operator, load_custom_ops, namespace_of


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fake_doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def add_into(x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    out.add_(x, alpha=scale)


def fake_add_into(x: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    del x, out, scale


def vectors(device: str) -> Iterable[tuple[Any, ...]]:
    return [(torch.randn(size, device=device),) for size in (0, 1, 5)]


def pairs(device: str) -> Iterable[tuple[Any, ...]]:
    return [(torch.randn(size, device=device), torch.randn(size, device=device), 0.5) for size in (1, 5)]


DOUBLED = CustomOperator("doubled", {"cpu": doubled}, fake_doubled, vectors)
ADD_INTO = CustomOperator("add_into", {ANY_DEVICE: add_into}, fake_add_into, pairs, mutates=("out",))


@pytest.fixture
def distribution(request: pytest.FixtureRequest) -> str:
    """A name of its own for every test: what the framework once knows, it knows for the rest of the process."""
    return "acme-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower()).strip("-")


@pytest.fixture
def registry() -> OperatorRegistry:
    return OperatorRegistry()


def test_an_operator_is_called_under_the_distributions_name(registry: OperatorRegistry, distribution: str) -> None:
    ops = registry.register(CustomOps((DOUBLED, ADD_INTO)), distribution)
    assert ops.namespace == distribution.replace("-", "_")
    assert ops["doubled"](torch.tensor([1.0, 2.0])).tolist() == [2.0, 4.0]
    out = torch.ones(2)
    assert ops["add_into"](torch.tensor([1.0, 2.0]), out, 0.5) is None
    assert out.tolist() == [1.5, 2.0]
    assert getattr(torch.ops, ops.namespace).doubled(torch.ones(1)).item() == 2.0
    assert registry.owner(ops.namespace) == distribution


def test_the_schema_comes_from_the_annotations_or_is_given(registry: OperatorRegistry, distribution: str) -> None:
    spelled = replace(ADD_INTO, name="spelled", schema="(Tensor x, Tensor(a!) out, float scale=1.0) -> ()")
    ops = registry.register(CustomOps((ADD_INTO, spelled)), distribution)
    schemas = [str(ops[name]._schema) for name in ("add_into", "spelled")]  # type: ignore[attr-defined]
    assert "Tensor x, Tensor(a0!) out, float scale=1." in schemas[0].replace("a1!", "a0!")
    assert "Tensor(a!) out" in schemas[1]


def test_what_is_registered_can_be_traced(registry: OperatorRegistry, distribution: str) -> None:
    ops = registry.register(CustomOps((DOUBLED, ADD_INTO)), distribution)
    assert check_operator(ops["doubled"], vectors("cpu")) == []
    assert check_operator(ops["add_into"], pairs("cpu"), ("out",)) == []
    assert ops["doubled"](torch.empty(3, 4, device="meta")).shape == (3, 4)


# -- once and again


def fresh_ops() -> CustomOps:
    """What a factory does: functions made anew at every call."""

    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    return CustomOps((CustomOperator("halved", {"cpu": halved}, lambda x: torch.empty_like(x), vectors), DOUBLED))


def test_registering_again_changes_nothing(registry: OperatorRegistry, distribution: str) -> None:
    """R12.13, L12.26: once or twice in a process is the same."""
    first = registry.register(fresh_ops(), distribution)
    again = registry.register(fresh_ops(), distribution)
    assert first.operators == again.operators
    assert again["halved"](torch.tensor([4.0])).item() == 2.0


def test_a_forked_child_may_register_again(registry: OperatorRegistry, distribution: str) -> None:
    """L12.6: fork inherits the loaded flag. The child inherits the registrations with it, so both agree."""
    registry.register(fresh_ops(), distribution)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            later = CustomOps((replace(DOUBLED, name="later"),))
            found = registry.register(fresh_ops(), distribution), registry.register(later, distribution)
            status = 0 if found[0]["halved"](torch.ones(1)).item() == 0.5 and found[1]["later"] is not None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["a", "b", "c", "d"]), unique=True), max_size=5), st.integers(0, 10**12))
def test_any_order_of_registrations_gives_the_same_operators(calls: list[list[str]], number: int) -> None:
    """I12.3."""
    registry, distribution = OperatorRegistry(), f"acme-order-{number}"
    for names in calls:
        ops = CustomOps(tuple(replace(DOUBLED, name=name) for name in names))
        assert set(registry.register(ops, distribution).operators) == set(names)
    everything = CustomOps(tuple(replace(DOUBLED, name=name) for name in "abcd"))
    assert set(registry.register(everything, distribution).operators) == set("abcd")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "(Tensor x) -> Tensor[]"}, r"\(Tensor x\) -> Tensor\[\] instead of \(Tensor x\) -> Tensor"),
        ({"implementations": {"cpu": tripled}}, "for cpu, .*test_torch_operators.py:"),
        ({"implementations": {"cpu": doubled, "cuda": doubled}}, "for cpu, cuda instead of cpu"),
        ({"fake": lambda x: x.new_empty(x.shape)}, "the fake, .*test_torch_operators.py:"),
    ],
    ids=["schema", "implementation", "devices", "fake"],
)
def test_another_operator_of_the_same_name_is_refused(
    registry: OperatorRegistry, distribution: str, change: dict[str, Any], said: str
) -> None:
    """Equal registration is silent, a conflict names both sides."""
    registry.register(CustomOps((DOUBLED,)), distribution)
    with pytest.raises(PluginConflictError, match=f"{distribution} defines .*::doubled again, and differently: {said}"):
        registry.register(CustomOps((replace(DOUBLED, **change),)), distribution)


def test_an_operator_named_twice_in_one_description_is_held_against_itself(
    registry: OperatorRegistry, distribution: str
) -> None:
    with pytest.raises(PluginConflictError, match="differently"):
        registry.register(CustomOps((DOUBLED, replace(DOUBLED, implementations={"cpu": tripled}))), distribution)
    assert registry.owner(namespace_of(distribution)) is None


# -- owners


def test_a_foreign_namespace_names_its_owner(registry: OperatorRegistry, distribution: str) -> None:
    """L12.26: duplicate operator registration; a foreign redefinition names its owner."""
    registry.register(CustomOps((DOUBLED,)), f"{distribution}-fast")
    with pytest.raises(PluginConflictError, match=f"which is the namespace of {distribution}-fast"):
        registry.register(CustomOps((DOUBLED,), namespace=namespace_of(f"{distribution}-fast")), distribution)


def test_a_namespace_begins_with_the_distributions_name(registry: OperatorRegistry, distribution: str) -> None:
    own = namespace_of(distribution)
    assert registry.register(CustomOps((DOUBLED,), namespace=f"{own}_quick"), distribution).namespace == f"{own}_quick"
    for name in ("aten", "hardpoint", f"{own}x", f"{own}_Fast", f"x{own}"):
        with pytest.raises(PluginError, match=f"wants the operator namespace '{name}'; allowed: '{own}'"):
            registry.register(CustomOps((DOUBLED,), namespace=name), distribution)


@pytest.mark.parametrize(
    ("given_name", "namespace"), [("acme", "acme"), ("Acme.Kernels--2", "acme_kernels_2"), ("a_b", "a_b")]
)
def test_the_namespace_of_a_distribution(given_name: str, namespace: str) -> None:
    assert namespace_of(given_name) == namespace


@pytest.mark.parametrize("nameless", ["", "7zip"])
def test_operators_without_an_owner_are_refused(registry: OperatorRegistry, nameless: str) -> None:
    with pytest.raises(PluginError, match="need an installed distribution as their owner"):
        registry.register(CustomOps((DOUBLED,)), nameless)


def test_an_operator_from_elsewhere_is_refused_with_its_origin(registry: OperatorRegistry, distribution: str) -> None:
    """Somebody went to the framework directly, past the registry."""
    name = f"{namespace_of(distribution)}::doubled"
    library = torch.library.Library(namespace_of(distribution), "FRAGMENT")
    torch.library.define(name, "(Tensor x) -> Tensor", lib=library)
    with pytest.raises(PluginConflictError, match=f"{name}, which exists already: registered at .*test_torch_operat"):
        registry.register(CustomOps((DOUBLED,)), distribution)
    library._destroy()


@pytest.mark.filterwarnings("ignore:.*other operators may also be overridden")
def test_a_replaced_implementation_names_the_owner_and_the_culprit(
    registry: OperatorRegistry, distribution: str
) -> None:
    """The framework itself lets the last registration win, with a warning."""
    registry.register(CustomOps((DOUBLED, ADD_INTO)), distribution)
    registry.verify()
    name = f"{namespace_of(distribution)}::doubled"
    library = torch.library.Library(namespace_of(distribution), "FRAGMENT")
    torch.library.impl(name, "cpu", tripled, lib=library)
    with pytest.raises(PluginConflictError, match=f"^{name} belongs to {distribution}, but CPU registered at .*test_t"):
        registry.verify()
    library._destroy()
    registry.verify()


# -- the contract


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fake": None}, "has no fake implementation; give it 'fake'"),
        ({"implementations": {}}, "has no implementation; name at least one device type, or 'any'"),
        ({"implementations": {"cpu": "kernel.so"}}, "the implementation for cpu is a str"),
        ({"name": "Doubled"}, "must be lower-case"),
        ({"name": "a.b"}, "must be lower-case"),
        ({"schema": "(Tenso x) -> Tensor"}, "the schema cannot be read: unknown type"),
        ({"schema": "Tensor -> "}, "the schema cannot be read"),
        ({"implementations": {"cpu": lambda x: x}}, "the schema cannot be read: .*type annotation"),
        ({"mutates": ("x",), "schema": "(Tensor x) -> Tensor"}, "says that nothing is written, 'mutates' says x"),
        ({"schema": "(Tensor(a!) x) -> Tensor"}, "says that x is written, 'mutates' says nothing"),
        ({"schema": "(Tensor(a) x) -> Tensor(a)"}, "outputs may not alias arguments"),
    ],
)
def test_a_breach_of_the_contract_is_refused(
    registry: OperatorRegistry, distribution: str, change: dict[str, Any], said: str
) -> None:
    """R10.30, R10.40."""
    name = change.get("name", "doubled")
    with pytest.raises(PluginError, match=f"operator acme_.*::{name}.*{said}"):
        registry.register(CustomOps((replace(DOUBLED, **change),)), distribution)


def test_all_operators_are_defined_or_none(registry: OperatorRegistry, distribution: str) -> None:
    broken = replace(ADD_INTO, mutates=())
    broken = replace(broken, schema="(Tensor x, Tensor(a!) out, float scale) -> ()")
    with pytest.raises(PluginError, match="add_into"):
        registry.register(CustomOps((DOUBLED, broken)), distribution)
    assert not hasattr(getattr(torch.ops, namespace_of(distribution)), "doubled")
    assert registry.register(CustomOps((DOUBLED, ADD_INTO)), distribution)["doubled"] is not None


def test_something_else_than_operators_is_refused(registry: OperatorRegistry, distribution: str) -> None:
    with pytest.raises(PluginError, match="returned a tuple for its operators"):
        registry.register((DOUBLED,), distribution)  # type: ignore[arg-type]


# -- operators that are not there


def answer(status: ProbeStatus, reason: str) -> Callable[[], ProbeResult]:
    return lambda: ProbeResult(status, reason)


def test_a_missing_native_part_is_named_when_the_operator_is_called(
    registry: OperatorRegistry, distribution: str
) -> None:
    """R10.30, R10.31, P10.7: loading succeeds without any native library."""
    absent = replace(DOUBLED, name="native", probe=answer(ProbeStatus.ABSENT, "libacme.so is not installed"))
    there = replace(DOUBLED, probe=answer(ProbeStatus.AVAILABLE, "built in"))
    ops = registry.register(CustomOps((absent, there)), distribution)
    assert ops["doubled"](torch.ones(1)).item() == 2.0
    assert not hasattr(getattr(torch.ops, ops.namespace), "native"), "no fake without the operator"
    call = ops["native"]
    with pytest.raises(PluginError, match=f"{ops.namespace}::native is not available on this platform: libacme.so is"):
        call(torch.ones(1))


def test_a_broken_native_part_stops(registry: OperatorRegistry, distribution: str) -> None:
    broken = replace(DOUBLED, probe=answer(ProbeStatus.BROKEN, "undefined symbol"))
    with pytest.raises(PluginError, match="native part of operator .*::doubled is broken: undefined symbol"):
        registry.register(CustomOps((broken,)), distribution)


def test_an_unknown_operator_lists_the_known_ones(registry: OperatorRegistry, distribution: str) -> None:
    ops = registry.register(CustomOps((DOUBLED, ADD_INTO)), distribution)
    with pytest.raises(PluginNotFoundError, match="has no operator 'dubled'; it has: add_into, doubled"):
        ops["dubled"]


# -- through the worker


def test_the_worker_registers_what_its_options_name(world: Any, worker_options: Any) -> None:
    made: list[Any] = []

    def create_ops(ctx: Any) -> CustomOps:
        made.append(ctx)
        return CustomOps((replace(DOUBLED, name="at_start"),))

    world.plugins.factories["custom_op", "starters"] = create_ops
    model = world.plugins.factories["model", "TinyForCausalLM"]

    def create_model(ctx: Any) -> Any:
        assert torch.ops.tiny_distribution.at_start(torch.ones(1)).item() == 2.0, "operators come before the model"
        return model(ctx)

    world.plugins.factories["model", "TinyForCausalLM"] = create_model
    world.start(worker_options(custom_ops=("starters",)))
    world.start(worker_options(custom_ops=("starters",)))
    assert [ctx.device for ctx in made] == [torch.device("cpu")] * 2
    assert made[0].config is not None
    assert OPERATORS.owner("tiny_distribution") == "tiny-distribution"


def test_the_worker_stops_for_operators_that_nobody_provides(world: Any, worker_options: Any) -> None:
    with pytest.raises(PluginNotFoundError, match="custom_op plugin 'absent'"):
        world.start(worker_options(custom_ops=("absent",)))


def test_a_model_gets_its_operators_by_name(world: Any) -> None:
    elsewhere = CustomOperator("elsewhere", {"cuda": doubled}, fake_doubled, vectors)
    world.plugins.factories["custom_op", "mine"] = lambda ctx: CustomOps((replace(DOUBLED, name="mine"), elsewhere))
    ops = load_custom_ops(world.plugins, "mine", device=torch.device("cpu"))
    assert ops["mine"](torch.ones(1)).item() == 2.0
    with pytest.raises(PluginError, match="tiny_distribution::elsewhere is not available .*: it runs on cuda, not"):
        ops["elsewhere"](torch.ones(1))
    assert set(load_custom_ops(world.plugins, "mine").operators) == {"mine", "elsewhere"}
