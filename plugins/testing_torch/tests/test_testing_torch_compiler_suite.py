"""The suite for compilers passes a plain one, now and after a while, and every mutant fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hardpoint.interfaces.compiler import Compiler, LoweredRange, TokenRange
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch.compiler_suite import CompilerSuite
from hardpoint_torch_runtime.layers import DenseWeight, ParallelLinear


class RowByRow(LinearMethod):
    """Rounds other than plain torch does, and each row for itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.double()

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        raise RuntimeError("weights were loaded already")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).double()
        output = torch.stack([self.weight @ row for row in rows]).to(x.dtype).view(*x.shape[:-1], -1)
        return output if bias is None else output + bias


class Plain(Compiler):
    """Takes every dense linear layer over, in float32."""

    name = "plain"
    tokens = TokenRange(1, 512)

    def __init__(self, ctx: WorkerContext) -> None:
        assert ctx.config is not None
        self.dtype = ctx.config.dtype

    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return RowByRow(weight)

    def lower(self, model: Any) -> list[LoweredRange]:
        if self.dtype != "float32":
            return [LoweredRange((), None, f"it computes in float32, not in {self.dtype}")]
        names = []
        for layer in model.modules():
            if isinstance(layer, ParallelLinear) and isinstance(stored := layer.stored(), DenseWeight):
                layer.method = self.method(layer, stored.weight)
                names.append(layer.name)
        if not names:
            return [LoweredRange((), None, "it has no dense linear layer")]
        return [LoweredRange(tuple(names), self.tokens)]


class Later(Plain):
    """Resumes at the third time of asking."""

    waits_for = 3
    waiting: Any = None

    @property
    def is_waiting(self) -> bool:
        return self.waiting is not None

    def lower(self, model: Any) -> list[LoweredRange]:
        self.waiting = model
        return [LoweredRange((), None, "kernels are being made")]

    def resume(self) -> list[LoweredRange] | None:
        self.waits_for -= 1
        if self.waiting is None or self.waits_for > 0:
            return None
        model, self.waiting = self.waiting, None
        return super().lower(model)


def suite_of(compiler: Callable[[WorkerContext], Compiler]) -> type[CompilerSuite]:
    class Suite(CompilerSuite):
        max_wait_s = 0.5

        def create_compiler(self, ctx: WorkerContext) -> Compiler:
            return compiler(ctx)

    return Suite


class TestPlain(CompilerSuite):
    def create_compiler(self, ctx: WorkerContext) -> Compiler:
        return Plain(ctx)


@pytest.mark.slow
class TestLater(CompilerSuite):
    architectures = {"LlamaForCausalLM": {}}  # noqa: RUF012 (as an author would write it)

    def create_compiler(self, ctx: WorkerContext) -> Compiler:
        return Later(ctx)


class Off(RowByRow):
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x, bias) * 1.001


class WrongNumbers(Plain):
    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return Off(weight) if layer.name.endswith("layers.1.mlp.down_proj") else RowByRow(weight)


class OffWhere(RowByRow):
    """Wrong for steps of ``sizes``."""

    def __init__(self, weight: torch.Tensor, sizes: range) -> None:
        super().__init__(weight)
        self.sizes = sizes

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = super().apply(layer, x, bias)
        return output * 1.01 if len(x) in self.sizes else output


class WrongAlone(Plain):
    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return OffWhere(weight, range(1, 2))


class WrongInCrowds(Plain):
    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return OffWhere(weight, range(100, 1000))


class Stateful(RowByRow):
    last = 0.0

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = super().apply(layer, x, bias) + self.last * 1e-6
        self.last = float(x.sum())
        return output


class KeepsState(Plain):
    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return Stateful(weight)


class ByName(Plain):
    """Weights of layers of one name are taken for equal."""

    kept: dict[str, torch.Tensor]

    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return RowByRow(self.kept.setdefault(layer.name, weight))


class CouplesRows(RowByRow):
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x, bias) + 1e-7 * x.sum()


class DependsOnBatch(Plain):
    def method(self, layer: ParallelLinear, weight: torch.Tensor) -> LinearMethod:
        return CouplesRows(weight)


class ReplacesAClass(Plain):
    """Every model's layers compute with what was given to the last one's."""

    def lower(self, model: Any) -> list[LoweredRange]:
        plain = ParallelLinear.forward
        ParallelLinear.forward = lambda layer, x: plain(layer, x) * 1.0  # type: ignore[assignment, method-assign]
        return super().lower(model)


class SaysNothing(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        super().lower(model)
        return []


class InventsLayers(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        return [*super().lower(model), LoweredRange(("model.layers.77",), None, "too far")]


class GivesNoReason(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        return [*super().lower(model), LoweredRange(("lm_head",), None, " ")]


class NamesNoLayers(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        return [LoweredRange((), TokenRange(1, 2)) if one.tokens else one for one in super().lower(model)]


class LowersAndRefuses(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        return [LoweredRange(one.layer_names, TokenRange(1, 4), "perhaps") for one in super().lower(model)]


class ServesNoStep(Plain):
    tokens = TokenRange(8, 3)


class IgnoresDtype(Plain):
    """Says that it left the model alone, and did not."""

    def lower(self, model: Any) -> list[LoweredRange]:
        if self.dtype == "float32":
            return super().lower(model)
        for layer in model.modules():
            if isinstance(layer, ParallelLinear) and isinstance(stored := layer.stored(), DenseWeight):
                layer.method = RowByRow(stored.weight)
        return [LoweredRange((), None, f"it computes in float32, not in {self.dtype}")]


class KnowsOneFamily(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        model.model.layers[0].self_attn.qkv_proj  # noqa: B018 (the attribute is what is asked for)
        return super().lower(model)


class Idle(Plain):
    def lower(self, model: Any) -> list[LoweredRange]:
        return [LoweredRange((), None, "there are no kernels")]


class WaitsForEver(Later):
    waits_for = 10**9


class Nameless(Plain):
    name = ""


MUTANTS: dict[str, type[Plain]] = {
    "wrong numbers": WrongNumbers,
    "wrong alone": WrongAlone,
    "wrong in crowds": WrongInCrowds,
    "keeps state": KeepsState,
    "depends on the batch": DependsOnBatch,
    "says nothing": SaysNothing,
    "invents layers": InventsLayers,
    "gives no reason": GivesNoReason,
    "names no layers": NamesNoLayers,
    "lowers and refuses": LowersAndRefuses,
    "serves no step": ServesNoStep,
    "ignores the dtype": IgnoresDtype,
    "knows one family": KnowsOneFamily,
    "idle": Idle,
    "waits for ever": WaitsForEver,
    "nameless": Nameless,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str) -> None:
    assert run_suite(suite_of(MUTANTS[name]), first_failure=True).failed


def test_weights_shared_by_name_are_noticed() -> None:
    kept: dict[str, torch.Tensor] = {}

    def create(ctx: WorkerContext) -> Compiler:
        compiler = ByName(ctx)
        compiler.kept = kept
        return compiler

    assert "test_other_models_stay_as_they_are" in run_suite(suite_of(create), only="other_models").failed


def test_a_patched_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelLinear, "forward", ParallelLinear.forward)
    failed = run_suite(suite_of(ReplacesAClass), only="patches_nothing").failed
    assert "ParallelLinear.forward" in failed["test_lowering_patches_nothing"]


def test_an_idle_compiler_passes_where_that_is_its_intention() -> None:
    class Suite(suite_of(Idle)):  # type: ignore[misc]
        lowers_nothing = True

    outcome = run_suite(Suite)
    assert outcome.failed == {}
    assert "test_results_equal_eager_ones" in outcome.passed
