"""Every method keeps the rules of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from hardpoint.interfaces.model_source import ModelInfo, WeightTensor
from hardpoint.interfaces.quantization import QuantizationMethod
from hardpoint_testing_torch import QuantizationSuite
from hardpoint_testing_torch.state_dict_loader import weight_tensor

pytestmark = pytest.mark.slow


class TestInt8(QuantizationSuite):
    plugin: ClassVar[str | None] = "int8"
    max_relative_error: ClassVar[float] = 0.015
    max_bytes_per_weight: ClassVar[float | None] = 1.05


class TestInt4(QuantizationSuite):
    """Random weights are the worst case: nothing in them is alike, and logits are nearly so."""

    plugin: ClassVar[str | None] = "int4"
    max_relative_error: ClassVar[float] = 0.12
    max_bytes_per_weight: ClassVar[float | None] = 0.75
    min_agreement: ClassVar[float] = 0.35


class TestGGUF(QuantizationSuite):
    """Files hold what fills blocks on both of two ranks in Q8_0, and the rest as float32."""

    plugin: ClassVar[str | None] = "gguf"
    max_relative_error: ClassVar[float] = 0.015
    max_bytes_per_weight: ClassVar[float | None] = 34 / 32

    def method_for(self, info: ModelInfo, dtype: str = "float32") -> QuantizationMethod:
        return super().method_for(msgspec.structs.replace(info, loader="gguf"), dtype)

    def store(self, name: str, weight: torch.Tensor) -> Sequence[WeightTensor]:
        if weight.shape[1] % 64:
            return [weight_tensor(f"{name}.weight", weight)]
        packed = quantize(weight.numpy(), GGMLQuantizationType.Q8_0)

        def unpacked() -> np.ndarray:
            return dequantize(packed, GGMLQuantizationType.Q8_0)

        return [WeightTensor(f"{name}.weight", "gguf.q8_0", tuple(weight.shape), packed, unpacked)]
