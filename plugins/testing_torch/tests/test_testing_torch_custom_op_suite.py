"""The suite for custom operators passes correct ones, and every mutant of them fails it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator, CustomOps
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import SuiteOutcome, run_suite
from hardpoint_testing_torch.custom_op_suite import CustomOpSuite

NUMBERS = itertools.count()


def transposed_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[m, n] and [m, n] to [n, m] with the strides of the input's transpose."""
    return (x + y).t()


def fake_transposed_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).t()


def accumulate(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    out.add_(x, alpha=scale)


def fake_accumulate(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    del x, out, scale


def matrices(device: str) -> Iterable[tuple[Any, ...]]:
    return [(torch.randn(m, n, device=device), torch.randn(m, n, device=device)) for m, n in ((1, 3), (4, 2), (3, 5))]


def buffers(device: str) -> Iterable[tuple[Any, ...]]:
    return [(torch.randn(n, device=device), torch.randn(n, device=device), 0.5) for n in (1, 6)]


SUM = CustomOperator("transposed_sum", {"cpu": transposed_sum}, fake_transposed_sum, matrices)
ACCUMULATE = CustomOperator("accumulate", {ANY_DEVICE: accumulate}, fake_accumulate, buffers, mutates=("out",))


class TestCorrectOperators(CustomOpSuite):
    distribution = "acme-correct"

    def create_ops(self, ctx: WorkerContext) -> CustomOps:
        return CustomOps((SUM, ACCUMULATE))

    def reference(self, operator: str) -> Callable[..., Any] | None:
        return transposed_sum if operator == "transposed_sum" else accumulate


class TestOperatorsThatAreMissingHere(CustomOpSuite):
    """R10.30: a native library that is not installed keeps nobody from passing."""

    distribution = "acme-missing"

    def create_ops(self, ctx: WorkerContext) -> CustomOps:
        absent = ProbeResult(ProbeStatus.ABSENT, "libacme.so is not installed")
        return CustomOps((replace(SUM, probe=lambda: absent),))


def run(create: Callable[[], Any], *, only: str = "") -> SuiteOutcome:
    class Suite(CustomOpSuite):
        distribution = f"acme-mutant-{next(NUMBERS)}"

        def create_ops(self, ctx: WorkerContext) -> CustomOps:
            ops: CustomOps = create()
            return ops

    return run_suite(Suite, first_failure=not only, only=only)


def mutant(**changes: Any) -> Callable[[], CustomOps]:
    return lambda: CustomOps((replace(SUM, **changes),))


def wrong_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def wrong_dtype(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16).t()


def wrong_stride(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


def wrong_number(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x).t(), torch.empty_like(x).t()


def reads_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).t() if x.sum().item() > 0 else x.new_empty(x.shape).t()


def writes_undeclared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(y).t().clone(memory_format=torch.preserve_format)


def returns_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.t()


def never_writes(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    del x, out, scale


def raises(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise ValueError("not for these sizes")


def changes_its_mind() -> CustomOps:
    number = next(NUMBERS)
    return CustomOps((SUM, replace(SUM, name="other", schema=f"(Tensor x, Tensor y, int n={number}) -> Tensor")))


def defines_itself() -> CustomOps:
    number = next(NUMBERS)
    library = torch.library.Library(f"acme_rogue_{number}", "FRAGMENT")
    torch.library.define(f"acme_rogue_{number}::transposed_sum", "(Tensor x, Tensor y) -> Tensor", lib=library)
    KEPT.append(library)
    return CustomOps((SUM,), namespace=f"acme_rogue_{number}")


def defines_by_the_frameworks_decorator() -> Any:
    number = next(NUMBERS)
    return torch.library.custom_op(f"acme_rogue_{number}::transposed_sum", transposed_sum, mutates_args=())


KEPT: list[torch.library.Library] = []
ONE_SIZE = [(torch.ones(2, 3), torch.ones(2, 3))]

MUTANTS: dict[str, Callable[[], Any]] = {
    "no fake": mutant(fake=None),
    "no implementation": mutant(implementations={}),
    "wrong fake shape": mutant(fake=wrong_shape),
    "wrong fake dtype": mutant(fake=wrong_dtype),
    "wrong fake stride": mutant(fake=wrong_stride),
    "wrong number of outputs": mutant(fake=wrong_number),
    "the fake reads data": mutant(fake=reads_data),
    "undeclared mutation": mutant(implementations={"cpu": writes_undeclared}),
    "output aliases input": mutant(implementations={"cpu": returns_a_view}),
    "the schema hides a mutation": mutant(mutates=("x",), schema="(Tensor x, Tensor y) -> Tensor"),
    "declared but never written": lambda: CustomOps((replace(ACCUMULATE, implementations={"cpu": never_writes}),)),
    "raises": mutant(implementations={"cpu": raises}),
    "foreign namespace": lambda: CustomOps((SUM,), namespace="aten"),
    "not idempotent": changes_its_mind,
    "defines operators itself": defines_itself,
    "no description": defines_by_the_frameworks_decorator,
    "no operators": lambda: CustomOps(()),
    "no samples": mutant(samples=lambda device: []),
    "samples of one size": mutant(samples=lambda device: ONE_SIZE),
    "broken native part": mutant(probe=lambda: ProbeResult(ProbeStatus.BROKEN, "undefined symbol")),
    "absent without a reason": mutant(probe=lambda: ProbeResult(ProbeStatus.ABSENT, "")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str) -> None:
    assert run(MUTANTS[name]).failed


def test_wrong_numbers_fail_where_the_author_says_what_is_right() -> None:
    class Suite(CustomOpSuite):
        distribution = "acme-wrong-numbers"

        def create_ops(self, ctx: WorkerContext) -> CustomOps:
            return CustomOps((SUM,))

        def reference(self, operator: str) -> Callable[..., Any]:
            return lambda x, y: (x - y).t()

    assert set(run_suite(Suite).failed) == {"test_it_computes_what_it_should"}


def test_a_factory_that_patches_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.silu)

    def patches() -> CustomOps:
        torch.nn.functional.silu = transposed_sum  # type: ignore[assignment]
        return CustomOps((SUM,))

    failed = run(patches, only="registers_nothing_itself").failed
    assert "the factory replaced torch.nn.functional.silu" in failed["test_the_factory_registers_nothing_itself"]


BROKEN = ProbeResult(ProbeStatus.BROKEN, "undefined symbol")


@pytest.mark.parametrize(
    ("answers", "passes"),
    [
        ([ProbeResult(ProbeStatus.ABSENT, "no library")], True),
        ([ProbeResult(ProbeStatus.AVAILABLE, "built in")], True),
        ([BROKEN], False),
        ([ProbeResult(ProbeStatus.ABSENT, "")], False),
        ([True], False),
        ([ProbeResult(ProbeStatus.AVAILABLE, "built in"), BROKEN], False),
    ],
    ids=["absent", "available", "broken", "no reason", "no result", "moody"],
)
def test_what_the_plugins_own_probe_may_answer(answers: list[Any], passes: bool) -> None:
    given = itertools.cycle(answers)

    class Suite(CustomOpSuite):
        @pytest.fixture
        def declaration(self) -> PluginDeclaration:
            return PluginDeclaration("custom_op", probe=lambda: next(given))

    outcome = run_suite(Suite, only="its_probe_answers")
    assert (outcome.failed == {}) is passes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong fake shape", "output 0 has shape (3, 1), but the fake's has (1, 3)"),
        ("wrong fake dtype", "output 0 has dtype torch.float32, but the fake's has torch.bfloat16"),
        ("wrong fake stride", "but the fake's has ("),
        ("undeclared mutation", "it writes to 'x', which is not declared as mutated"),
        ("output aliases input", "output 0 shares memory with an argument"),
    ],
)
def test_the_fault_is_named(name: str, said: str) -> None:
    assert said in run(MUTANTS[name], only="real_and_fake").failed["test_real_and_fake_agree"]
