"""The kit for quantization methods also judges checkpoints that are stored quantized, with tensors of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from hardpoint.interfaces.model_source import ModelInfo, WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import QuantizationSuite, weight_tensor


class StoredLinear(LinearMethod):
    """INT8 weight and one float32 scale for each output, as the checkpoint has them."""

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        weight = torch.zeros(shape.output_size, shape.input_size, dtype=torch.int8)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        scale = torch.zeros(shape.output_size)
        layer.register_parameter("weight_scale", torch.nn.Parameter(scale, requires_grad=False))

    def place(self, layer: torch.nn.Module, parameter: str, shard: str | None, weight: Any) -> Any:
        """Scales follow the outputs; where inputs are split, every rank needs all of them."""
        if parameter == "weight":
            return weight
        outputs = weight.stored_shape[:1]
        return type(weight).whole(outputs) if weight.dim == 1 else replace(weight, stored_shape=outputs)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = F.linear(x.float(), layer.weight.float()) * layer.weight_scale
        return (product if bias is None else product + bias).to(x.dtype)


class Stored(QuantizationMethod):
    name = "stored"
    linear: type[StoredLinear] = StoredLinear

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        return None

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return None if layer_name == "lm_head" else self.linear()


class StoredSuite(QuantizationSuite):
    max_relative_error: ClassVar[float] = 0.015
    max_bytes_per_weight: ClassVar[float | None] = 1.2
    method_class: ClassVar[type[Stored]] = Stored

    def create_method(self, ctx: WorkerContext) -> QuantizationMethod:
        return self.method_class()

    def store(self, name: str, weight: torch.Tensor) -> Sequence[WeightTensor]:
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12)
        packed = (weight / scale[:, None]).round().to(torch.int8)
        return [weight_tensor(f"{name}.weight", packed), weight_tensor(f"{name}.weight_scale", scale)]


class TestStored(StoredSuite):
    pass


@pytest.mark.slow
def test_scales_that_are_cut_like_inputs_fail() -> None:
    class CutsScales(StoredLinear):
        def place(self, layer: torch.nn.Module, parameter: str, shard: str | None, weight: Any) -> Any:
            return replace(weight, stored_shape=weight.stored_shape[:1], dim=0) if parameter != "weight" else weight

    class Mutant(Stored):
        linear = CutsScales

    class Mutated(StoredSuite):
        method_class: ClassVar[type[Stored]] = Mutant

    rule = "test_each_of_two_ranks_gets_its_share"
    assert rule in run_suite(Mutated, only=rule).failed


@pytest.mark.slow
def test_a_forgotten_place_fails() -> None:
    class Unplaced(LinearMethod):
        create_weights = StoredLinear.create_weights
        apply = StoredLinear.apply

    class Mutant(Stored):
        linear = Unplaced  # type: ignore[assignment]

    class Mutated(StoredSuite):
        method_class: ClassVar[type[Stored]] = Mutant

    assert "test_products_are_near" in run_suite(Mutated, only="test_products_are_near", first_failure=True).failed
