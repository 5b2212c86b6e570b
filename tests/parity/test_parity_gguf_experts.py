"""Mixtures of experts out of GGUF files, written by the ``gguf`` package, beside Hugging Face on the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gguf_experts import FAMILIES, Family, write_experts
from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch import (
    ParityHarness,
    TinyModel,
    check_parity,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
)


@pytest.fixture
def backend() -> AttentionBackend:
    return installed_backend("torch_reference")


def tiny_model(family: Family, folder: Path) -> TinyModel:
    return make_tiny_model(family.architecture, folder, num_hidden_layers=2, **family.config)


@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.gguf_name)
def test_experts_of_a_file_compute_what_they_were_written_from(
    family: Family, apart: bool, backend: AttentionBackend, tmp_path: Path
) -> None:
    """The old layout holds a tensor for each expert, the new one a stack of all."""
    tiny = write_experts(tiny_model(family, tmp_path), family, tmp_path / "tiny.gguf", apart=apart)
    loader = installed_loader("gguf")
    info = loader.describe(tiny.info.artifact)
    assert info.architecture == family.architecture
    assert {name: info.config[name] for name in family.config} == family.config
    names = [tensor.name for tensor in loader.tensors(info)]
    assert sorted(names) == sorted(tiny.tensors())
    assert loader.num_bytes(info) == sum(tensor.data.nbytes for tensor in loader.tensors(info))
    harness = ParityHarness(tiny, installed_factory("model", family.architecture), backend, loader=loader)
    assert max(harness.prefill(), harness.batched()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.gguf_name)
def test_every_way_of_computing_and_greedy_tokens(family: Family, backend: AttentionBackend, tmp_path: Path) -> None:
    tiny = write_experts(tiny_model(family, tmp_path), family, tmp_path / "tiny.gguf")
    check_parity(tiny, installed_factory("model", family.architecture), backend, loader=installed_loader("gguf"))


def test_a_stack_that_is_none_is_named(tmp_path: Path) -> None:
    """Class 11: the shape is the file's word."""
    family, path, name = FAMILIES[0], tmp_path / "tiny.gguf", "blk.1.ffn_gate_exps.weight"
    flat = np.zeros((4, 80), dtype=np.float32), gguf.GGMLQuantizationType.F32
    tiny = write_experts(tiny_model(family, tmp_path), family, path, replaced={name: flat})
    loader = installed_loader("gguf")
    with pytest.raises(ModelFormatError, match=rf"{path}: tensor '{name}' of shape \[4, 80\] is no stack"):
        list(loader.tensors(loader.describe(tiny.info.artifact)))


def test_packed_experts_unpack_one_by_one_to_the_values_of_the_reference(tmp_path: Path) -> None:
    family = FAMILIES[0]
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(4, 64, 32, generator=generator).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(stack, kind)
    path = tmp_path / "packed.gguf"
    tiny = make_tiny_model(
        family.architecture, tmp_path, num_hidden_layers=1, hidden_size=32, intermediate_size=64, **family.config
    )
    artifact = write_experts(tiny, family, path, replaced={"blk.0.ffn_gate_exps.weight": (packed, kind)}).info.artifact
    expected = gguf.quants.dequantize(packed, kind)
    for is_packed in (False, True):
        loader = installed_loader("gguf", packed=is_packed)
        found = {tensor.name: tensor for tensor in loader.tensors(loader.describe(artifact))}
        for expert in range(4):
            tensor = found[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"]
            assert tensor.shape == (64, 32)
            assert (tensor.dequantize is not None) is is_packed
            values = tensor.data if tensor.dequantize is None else tensor.dequantize()
            assert (values == expected[expert]).all()
