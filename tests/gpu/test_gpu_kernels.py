"""Every installed kernel on a real device against the float64 oracles: attention backends, and kernels at seams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_cases import SHAPES, installed, problems
from hardpoint.errors import HardpointError
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.kernel_override import KernelCase
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_testing_torch.gpu_bench import attention, kernels
from hardpoint_torch_runtime.ops import SEAMS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
STORED_TOLERANCE = {"fp8": 6e-2, "int8_per_token_head": 3e-2}
"""Kernels may compute in a quantized cache's own dtype."""


def usable(name: str, device: torch.device) -> AttentionBackend:
    try:
        return attention.create_backend(name, device)
    except HardpointError as error:
        pytest.skip(str(error))


@EACH_DTYPE
@pytest.mark.parametrize("title", SHAPES)
@pytest.mark.parametrize("name", installed("attention_backend"))
def test_attention(
    name: str, title: str, dtype: torch.dtype, device: torch.device, description: DeviceDescription
) -> None:
    """R5.47, I5.3: what a backend accepts it computes, in every batch."""
    backend, shape = usable(name, device), replace(SHAPES[title], dtype=dtype)
    reason = backend.objection(shape.need(description))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    allowed = max(attention.TOLERANCES[dtype], STORED_TOLERANCE.get(shape.kv_cache_dtype or "", 0.0))
    errors = [attention.largest_error(backend, problem, device) for problem in problems(SHAPES[title], dtype)]
    assert max(errors) <= allowed, errors


@EACH_DTYPE
@pytest.mark.parametrize("name", installed("kernel_override"))
def test_kernels_at_seams(name: str, dtype: torch.dtype, device: torch.device) -> None:
    try:
        override = kernels.create_override(name, device)
    except HardpointError as error:
        pytest.skip(str(error))
    text, fixed = str(dtype).removeprefix("torch."), SEAMS[override.seam].dtype
    if fixed not in (None, text):
        pytest.skip(f"the seam {override.seam} is always {fixed}")
    reason = override.refusal(KernelCase(override.seam, device.type, text))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    assert kernels.largest_error(override, dtype, device) <= kernels.TOLERANCES[dtype]
