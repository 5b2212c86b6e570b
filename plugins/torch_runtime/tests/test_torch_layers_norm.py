"""Normalization and activations against Hugging Face modules, or against the formula."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hardpoint.errors import UnsupportedModelError
from hardpoint_torch_runtime.layers import ACTIVATIONS, Activation, GeluTanhAndMul, LayerNorm, RMSNorm, SiluAndMul

CPU = torch.device("cpu")


def norms(size: int = 24, eps: float = 1e-5, dtype: torch.dtype = torch.float32) -> tuple[RMSNorm, LlamaRMSNorm]:
    ours, theirs = RMSNorm(size, eps, dtype, CPU), LlamaRMSNorm(size, eps).to(dtype)
    weight = torch.randn(size).to(dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    return ours, theirs


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norm_equals_hugging_face(scale: float) -> None:
    ours, theirs = norms()
    x = torch.randn(7, 24) * scale
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


def test_norm_in_bfloat16_accumulates_in_float32() -> None:
    ours, theirs = norms(size=512, dtype=torch.bfloat16)
    x = torch.randn(4, 512).bfloat16()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1.6e-2, atol=1e-2)


def test_the_residual_form_adds_first_and_returns_the_sum() -> None:
    ours, theirs = norms()
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    total = x + residual
    normed, stream = ours.add(x, residual)
    torch.testing.assert_close(normed, theirs(total), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stream, total)
    assert stream is residual, "the stream is updated in place, without a new tensor per layer"


def test_the_first_layer_starts_the_stream() -> None:
    ours, theirs = norms()
    x = torch.randn(3, 24)
    normed, stream = ours.add(x, None)
    assert stream is x
    torch.testing.assert_close(normed, theirs(x), rtol=1e-5, atol=1e-6)


def test_the_gate_equals_hugging_face() -> None:
    mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=2))
    x = torch.randn(5, 8)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
    torch.testing.assert_close(mlp.down_proj(SiluAndMul()(gate_up)), mlp(x))


def test_the_other_gate_equals_hugging_face() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    mlp = Gemma3MLP(Gemma3TextConfig(**sizes))
    x = torch.randn(5, 8)
    gate_up = torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1)
    torch.testing.assert_close(mlp.down_proj(GeluTanhAndMul()(gate_up)), mlp(x))


@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16])
def test_weights_stored_as_deviations_from_one(stored_dtype: torch.dtype) -> None:
    """The offset is added in float32, so that deviations too small for bfloat16 beside one are kept."""
    ours, theirs = RMSNorm(24, 1e-5, torch.float32, CPU, weight_offset=1.0), Gemma3RMSNorm(24, 1e-5)
    stored = (torch.randn(24) * 1e-3).to(stored_dtype)
    placement = ours.place("weight", None)
    placement.target(ours.weight).copy_(placement.source(stored))
    theirs.weight.data.copy_(stored)
    x = torch.randn(7, 24)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_weights_without_an_offset_are_views_of_what_is_stored() -> None:
    stored = torch.randn(24)
    assert norms()[0].place("weight", None).source(stored).data_ptr() == stored.data_ptr()
    with pytest.raises(KeyError, match="only a whole 'weight'"):
        norms()[0].place("weight", "q")


@pytest.mark.parametrize("bias", [True, False])
def test_the_norm_around_the_mean(bias: bool) -> None:
    norm = LayerNorm(24, 1e-12, torch.float32, CPU, bias=bias)
    assert (norm.bias is not None) == bias
    for parameter in norm.parameters():
        parameter.data.normal_()
    x = torch.randn(7, 24) * 3 + 5
    exact = x.double()
    centered = exact - exact.mean(-1, keepdim=True)
    expected = centered / centered.square().mean(-1, keepdim=True).sqrt() * norm.weight.double()
    if norm.bias is not None:
        expected += norm.bias.double()
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-5, atol=1e-5)


def test_the_norm_around_the_mean_of_a_sum() -> None:
    """The stream is updated in place, as in the norm without the mean."""
    norm = LayerNorm(24, 1e-5, torch.float32, CPU)
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    total = x + residual
    normed, stream = norm.add(x, residual)
    torch.testing.assert_close(normed, norm(total))
    torch.testing.assert_close(stream, total)
    assert stream is residual


def test_a_stream_around_the_mean_starts_with_its_input() -> None:
    norm, x = LayerNorm(24, 1e-5, torch.float32, CPU), torch.randn(3, 24)
    normed, stream = norm.add(x, None)
    torch.testing.assert_close(normed, norm(x))
    assert stream is x


def test_a_layer_norm_has_two_whole_parameters() -> None:
    norm = LayerNorm(24, 1e-5, torch.float32, CPU)
    assert {norm.place(name, None).stored_shape for name in ("weight", "bias")} == {(24,)}
    for wrong in (("gamma", None), ("weight", "q")):
        with pytest.raises(KeyError, match="a whole 'weight' and perhaps a 'bias'"):
            norm.place(*wrong)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_plain_activations_equal_hugging_face(name: str) -> None:
    x = torch.randn(5, 16) * 3
    torch.testing.assert_close(Activation(name)(x), ACT2FN[name](x))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"activation 'swishy' is unknown; supported: gelu, .*silu"):
        Activation("swishy")
