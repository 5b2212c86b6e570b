"""All of attention's Triton kernels compile for all targets, and use what the committed table says."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from hardpoint_testing_torch.triton_aot_suite import KernelResourceSuite

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestResources(KernelResourceSuite):
    provider: ClassVar[str] = f"{HERE / 'attention_kernel_cases.py'}:kernel_cases"
    table: ClassVar[Path] = HERE / "attention_kernel_resources.json"
