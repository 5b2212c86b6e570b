"""A sound quantization method passes its suite, and a faulty one fails the rule that it breaks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import LinearBench, QuantizationSuite, relative_norm
from hardpoint_testing_torch.linear_bench import SIZES, make_weights


class RoundedLinear(LinearMethod):
    """INT8, one scale for each output, rounded to nearest while the model loads."""

    levels = 127

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        weight = torch.empty(shape.output_size, shape.input_size, dtype=self.dtype)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        weight: Any = layer.weight
        if weight.dtype == torch.int8:
            return
        scale = self.scales(weight.float())
        packed = (weight.float() / scale[:, None]).round().to(torch.int8)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        layer.register_buffer("scale", scale)

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight.abs().amax(dim=1) / self.levels).clamp_min(1e-12)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = F.linear(x.float(), layer.weight.float()) * layer.scale
        return (product if bias is None else product + bias).to(x.dtype)


class Rounded(QuantizationMethod):
    name = "rounded"
    linear: type[RoundedLinear] = RoundedLinear

    def __init__(self, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        return None if device_type == "cpu" else f"runs on the CPU only, not on {device_type}"

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return None if "lm_head" in layer_name else self.linear(self.dtype)


class RoundedSuite(QuantizationSuite):
    max_relative_error: ClassVar[float] = 0.015
    max_bytes_per_weight: ClassVar[float | None] = 1.2
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    method_class: ClassVar[type[Rounded]] = Rounded

    def create_method(self, ctx: WorkerContext) -> QuantizationMethod:
        assert ctx.config is not None
        return self.method_class(ctx.config.dtype)


class TestRounded(RoundedSuite):
    pass


class OneScale(RoundedLinear):
    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        return super().scales(weight).amax().expand(len(weight)).clone()


class TwoBits(RoundedLinear):
    levels = 2


class DividesByZero(RoundedLinear):
    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        peak = weight.abs().amax(dim=1)
        return peak * (peak / peak) / self.levels


class NoBias(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x, None)


class OtherDtype(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x, bias).float()


class KeepsTheFloats(RoundedLinear):
    def process_after_loading(self, layer: torch.nn.Module) -> None:
        original: Any = layer.weight
        super().process_after_loading(layer)
        layer.original = original


class PacksTwice(RoundedLinear):
    def process_after_loading(self, layer: torch.nn.Module) -> None:
        weight, scale = layer.weight, getattr(layer, "scale", None)
        if weight.dtype == torch.int8 and isinstance(scale, torch.Tensor):
            layer.scale = scale * 2
        super().process_after_loading(layer)


class OneScaleForAllTokens(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = x.abs().amax() / 127 if x.numel() else x.new_ones(())
        return super().apply(layer, (x / step.clamp_min(1e-12)).round() * step, bias)


class WritesIntoItsInput(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = super().apply(layer, x, bias)
        x.mul_(2)
        return output


class TakesAnyInputForContiguous(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        strides = [int(np.prod(x.shape[axis + 1 :])) for axis in range(x.dim())]
        return super().apply(layer, torch.as_strided(x, x.shape, strides), bias)


class NeedsAToken(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x.max()
        return super().apply(layer, x, bias)


class Flattens(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x, bias).flatten(0, -2)


class RoundsAtRandom(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(layer, x, bias) * (1 + 1e-5 * torch.rand(()))


class Trains(RoundedLinear):
    def process_after_loading(self, layer: torch.nn.Module) -> None:
        super().process_after_loading(layer)
        scale: Any = layer.scale
        del layer.scale
        layer.scale = torch.nn.Parameter(scale)


class WaitsForWhatIsNotStored(RoundedLinear):
    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        super().create_weights(layer, shape)
        layer.register_parameter("zero", torch.nn.Parameter(torch.zeros(shape.output_size), requires_grad=False))


class SwapsFusedParts(RoundedLinear):
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts = super().apply(layer, x, bias).split(layer.shape.output_sizes, -1)
        return torch.cat((*parts[:-2], *parts[:-3:-1]), dim=-1) if len(parts) > 1 else parts[0]


LINEAR_FAULTS = {
    OneScale: "test_parts_of_a_fused_layer_do_not_blur_each_other",
    TwoBits: "test_products_are_near",
    DividesByZero: "test_zeros_stay_zeros",
    NoBias: "test_biases_are_added",
    OtherDtype: "test_dtypes",
    KeepsTheFloats: "test_memory_is_what_it_promises",
    PacksTwice: "test_processing_twice_changes_nothing",
    OneScaleForAllTokens: "test_a_token_does_not_depend_on_its_neighbors",
    WritesIntoItsInput: "test_products_are_near",
    TakesAnyInputForContiguous: "test_inputs_need_not_be_contiguous",
    NeedsAToken: "test_products_are_near",
    Flattens: "test_products_are_near",
    RoundsAtRandom: "test_equal_inputs_give_equal_bits",
    Trains: "test_parameters_are_not_trained",
    WaitsForWhatIsNotStored: "test_products_are_near",
    SwapsFusedParts: "test_each_of_two_ranks_gets_its_share",
}


class Raises(Rounded):
    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        if "quantization_config" in info.config:
            raise KeyError("version")
        return None


class SaysTrue(Rounded):
    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        return None if device_type == "cpu" else True  # type: ignore[return-value]


class QuantizesNothing(Rounded):
    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return None


class Nameless(Rounded):
    name = ""


class RuinsTheModel(Rounded):
    """Sound where the benches look, wrong by the layer's name."""

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return (TwoBits if "layers.1." in layer_name else RoundedLinear)(self.dtype)


METHOD_FAULTS = {
    Raises: "test_refusing_is_an_answer",
    SaysTrue: "test_refusing_is_an_answer",
    QuantizesNothing: "test_it_quantizes_something",
    Nameless: "test_it_describes_itself",
    RuinsTheModel: "test_a_tiny_model_still_says_the_same",
}


def failures(mutant: type[Rounded], rule: str) -> dict[str, str]:
    class Mutated(RoundedSuite):
        method_class: ClassVar[type[Rounded]] = mutant

    return run_suite(Mutated, only=rule, first_failure=True).failed


@pytest.mark.parametrize("mutant", LINEAR_FAULTS, ids=lambda mutant: mutant.__name__)
def test_faulty_arithmetic_fails(mutant: type[RoundedLinear]) -> None:
    class Mutated(Rounded):
        linear = mutant

    rule = LINEAR_FAULTS[mutant]
    assert rule in failures(Mutated, rule)


@pytest.mark.parametrize("mutant", METHOD_FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_method_fails(mutant: type[Rounded]) -> None:
    rule = METHOD_FAULTS[mutant]
    assert rule in failures(mutant, rule)


@pytest.mark.slow
def test_a_method_that_refuses_is_skipped_with_its_reason() -> None:
    class Refuses(Rounded):
        def refuse(self, info: ModelInfo, device_type: str) -> str | None:
            return "the tensors would have to be aligned to 128"

    class Mutated(RoundedSuite):
        method_class: ClassVar[type[Rounded]] = Refuses

    assert "aligned to 128" in run_suite(Mutated, only="test_dtypes").skipped["test_dtypes"]


def test_the_bench_is_exact_without_a_method() -> None:
    sizes = SIZES["odd"]
    weights = make_weights(sizes)
    bench = LinearBench(None, sizes, weights).load(QuantizationSuite().store)
    x = torch.randn(4, sizes.hidden)
    for name in ("qkv_proj", "gate_up_proj"):
        assert relative_norm(bench.layer(name)(x), bench.expected(name, x)) < 1e-6
    assert bench.num_bytes("qkv_proj") == 4 * bench.num_weights("qkv_proj")
