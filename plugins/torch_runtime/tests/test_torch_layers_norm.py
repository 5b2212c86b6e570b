"""Normalization and gated activation against Hugging Face modules."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hardpoint_torch_runtime.layers import RMSNorm, SiluAndMul

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
