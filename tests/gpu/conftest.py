"""Tests that need a real device; `make test-gpu` runs them. Everywhere else they are collected and skipped."""

from __future__ import annotations

import pytest
import torch

from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_testing_torch.gpu_bench.__main__ import describe


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first device; skips where there is none, or where this run hides it."""
    if not torch.cuda.is_available():
        pytest.skip("no graphics processor that torch can use; on a machine with one, run `make test-gpu`")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def description(device: torch.device) -> DeviceDescription:
    return describe(device)
