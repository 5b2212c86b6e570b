"""The CPU's kernels compute what the quantization methods say in torch: each method and block type, rounded and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces.model_source import WeightTensor
from hardpoint.interfaces.quantization import LinearShape
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import KernelProvider
from hardpoint_cpu.linear_method import pack
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_quantization.gguf_blocks import BLOCK_TYPES
from hardpoint_quantization.gguf_linear import GGUFLinear
from hardpoint_quantization.int4 import Int4Linear
from hardpoint_quantization.int8 import Int8Linear
from hardpoint_testing_torch import relative_norm
from hardpoint_torch_runtime.layers import Placement

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OUTPUTS, INPUTS, TOKENS = 60, 512, 40
CPU = torch.device("cpu")
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
ACTIVATIONS = pytest.mark.parametrize("int8_activations", [True, False], ids=["int8", "float"])


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    provider = KernelProvider(Host(), build="wait")
    found = provider.library()
    assert found is not None, provider.report().reason
    return found


def compare(method: Any, layer: torch.nn.Module, library: NativeLibrary) -> None:
    x = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(1))
    expected = method.apply(layer, x, None)
    found = pack(library, method.stored(layer), None)(x)
    assert relative_norm(found, expected.double()) < 1e-5


@ACTIVATIONS
@pytest.mark.parametrize("group_size", [None, 32, 64, 128])
def test_weights_that_were_quantized_here(
    library: NativeLibrary, group_size: int | None, int8_activations: bool
) -> None:
    """``group_size`` None: int8."""
    if group_size is None:
        method: Any = Int8Linear(CPU, int8_activations=int8_activations)
    else:
        method = Int4Linear(group_size, CPU, int8_activations=int8_activations)
    layer, dense = torch.nn.Module(), torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    method.create_weights(layer, LinearShape(INPUTS, (OUTPUTS,), "float32"))
    with torch.no_grad():
        method.load_dense(layer, Placement.whole((OUTPUTS, INPUTS)), dense)
    method.process_after_loading(layer)
    compare(method, layer, library)


@ACTIVATIONS
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_of_gguf_files(library: NativeLibrary, name: str, int8_activations: bool) -> None:
    kind, generator = BLOCK_TYPES[name], np.random.default_rng(0)
    raw = generator.integers(0, 256, (OUTPUTS, kind.row_bytes(INPUTS)), dtype=np.uint8)
    blocks = raw.reshape(-1, kind.num_bytes)
    for at in HALVES.get(name, (0,)):
        blocks[:, at : at + 2] = generator.standard_normal((len(blocks), 1)).astype(np.float16).view(np.uint8)
    tensor = WeightTensor("w", f"gguf.{name.lower()}", (OUTPUTS, INPUTS), raw)
    method, layer = GGUFLinear(CPU, lambda reason: None, int8_activations=int8_activations), torch.nn.Module()
    method.create_weights(layer, LinearShape(INPUTS, (OUTPUTS,), "float32"))
    method.load_packed(layer, "weight", Placement.whole(tensor.shape), tensor)
    method.process_after_loading(layer)
    compare(method, layer, library)
