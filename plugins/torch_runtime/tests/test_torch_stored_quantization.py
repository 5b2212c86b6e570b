"""Checkpoints whose weights are stored quantized are refused by the name of their method, before a model is built."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers.utils.quantization_config import QuantizationMethod as KnownMethod

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint_torch_runtime.stored_quantization import require_dense_weights, stored_method

METHODS = sorted({method.value for method in KnownMethod} | {"modelopt", "modelopt_fp4", "ptpc_fp8", "of nobody"})
"""All that ``transformers`` knows, and others that checkpoints name."""


class Built(Exception):
    """A model would have been built."""


def start(world: Any, **config: Any) -> None:
    info = world.config().model
    model = msgspec.structs.replace(info, config={**info.config, **config})

    def build(ctx: object) -> object:
        raise Built

    world.plugins.factories["model", "TinyForCausalLM"] = build
    world.start(model=model)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_named_before_anything_is_built(world: Any, method: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        start(world, quantization_config={"quant_method": method, "bits": 4})
    for part in (f"'tiny' are stored quantized by '{method}'", "'quantization_config'", "use a dense checkpoint"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("config", "method", "field"),
    [
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes", "quantization_config"),
        ({"quantization_config": {"_load_in_4bit": True}}, "bitsandbytes", "quantization_config"),
        ({"quantization_config": {"config_groups": {}, "format": "x"}}, "compressed-tensors", "quantization_config"),
        ({"compression_config": {"quant_method": "sparseml"}}, "sparseml", "compression_config"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx", "quantization"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8", "text_config.quantization_config"),
    ],
)
def test_it_may_be_said_in_other_places_and_words(world: Any, config: dict[str, Any], method: str, field: str) -> None:
    assert stored_method(config) == (method, field)
    with pytest.raises(UnsupportedModelError, match=f"quantized by '{method}' .field '{field}'"):
        start(world, **config)


@pytest.mark.parametrize("told", [None, {}, False, ""])
def test_dense_checkpoints_may_say_so(world: Any, told: Any) -> None:
    with pytest.raises(Built):
        start(world, quantization_config=told)


@pytest.mark.parametrize("told", ["awq", ["awq"], 4, True, {"bits": 4}, {"quant_method": 7}])
def test_what_says_nothing_clear_is_damaged(world: Any, told: Any) -> None:
    with pytest.raises(ModelFormatError, match="'quantization_config'"):
        start(world, quantization_config=told)


def test_a_long_name_is_cut(world: Any) -> None:
    info = world.config().model
    odd = msgspec.structs.replace(info, config={"quantization_config": {"quant_method": "x" * 5000}})
    with pytest.raises(UnsupportedModelError) as caught:
        require_dense_weights(odd)
    assert len(str(caught.value)) < 600


class Reader(QuantizationMethod):
    """Takes whatever is stored."""

    name = "reader"

    def refuse(self, info: object, device_type: str) -> str | None:
        del info, device_type
        return None

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        del layer_name, shape
        return None


def test_a_method_that_was_chosen_judges_itself(world: Any) -> None:
    world.plugins.factories["quantization", "reader"] = lambda ctx: Reader()
    info = world.config().model
    config = {**info.config, "quantization_config": {"quant_method": "awq"}}
    world.start(model=msgspec.structs.replace(info, config=config), quantization="reader")


def test_made_up_weights_are_dense_whatever_the_file_says(world: Any) -> None:
    """For benchmarks of published configurations."""
    plain = world.plugins.factories["weight_loader", "tiny"](None)

    class Inventor(type(plain)):  # type: ignore[misc]
        def invent(self, wanted: object) -> list[WeightTensor]:
            del wanted
            return list(plain.tensors(None))

    world.plugins.factories["weight_loader", "tiny"] = lambda ctx: Inventor()
    info = world.config().model
    config = {**info.config, "quantization_config": {"quant_method": "fp8"}}
    world.start(model=msgspec.structs.replace(info, config=config))
