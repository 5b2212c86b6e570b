"""Rounding against its definition."""

from __future__ import annotations

import torch
from rtn_int8 import LARGEST, Options, RtnInt8, RtnInt8Linear

from hardpoint.interfaces import LinearShape


def quantized(weight: torch.Tensor) -> torch.nn.Module:
    layer, method = torch.nn.Module(), RtnInt8Linear(torch.device("cpu"))
    method.create_weights(layer, LinearShape(weight.shape[1], (weight.shape[0],), "float32"))
    layer.get_parameter("weight").copy_(weight)
    method.process_after_loading(layer)
    return layer


def test_no_weight_is_off_by_more_than_half_a_step() -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    layer = quantized(weight)
    restored = layer.get_parameter("weight").float() * layer.get_parameter("weight_scale")
    step = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    assert ((restored - weight).abs() <= step * 0.5001).all()


def test_a_row_of_zeros_stays_zero() -> None:
    layer = quantized(torch.zeros(2, 4))
    x = torch.ones(3, 4)
    assert RtnInt8Linear(torch.device("cpu")).apply(layer, x, None).tolist() == [[0.0, 0.0]] * 3


def test_an_outlier_costs_its_own_row_only() -> None:
    weight = torch.ones(2, 4)
    weight[0, 0] = 1000.0
    layer = quantized(weight)
    restored = layer.get_parameter("weight").float() * layer.get_parameter("weight_scale")
    assert torch.allclose(restored[1], weight[1])
    assert restored[0, 1] == 0.0


def test_named_layers_are_left_alone() -> None:
    method = RtnInt8(Options(skip=("lm_head", "layers.0.")), torch.device("cpu"))
    shape = LinearShape(4, (4,), "float32")
    assert method.linear_method("model.layers.0.mlp.down_proj", shape) is None
    assert method.linear_method("model.layers.10.mlp.down_proj", shape) is not None
