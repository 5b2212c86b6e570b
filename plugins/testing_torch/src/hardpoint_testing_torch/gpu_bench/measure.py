"""Time on a device, and the most that it can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from hardpoint_testing_torch.gpu_bench.records import Roof, Scale

__all__ = ["measure_roof", "num_bytes", "seconds_per_call"]

_WARM_UP = 3
_MOST_CALLS = 1000


def seconds_per_call(run: Callable[[], Any], device: torch.device, budget_s: float) -> float:
    """Mean time of ``run`` over as many calls as fit ``budget_s``. Calls are queued one behind the other, so that the
    host's part shows only where it takes longer than the device's."""
    for _ in range(_WARM_UP):
        run()
    once = _timed(run, device, 1)
    calls = max(1, min(_MOST_CALLS, int(budget_s / max(once, 1e-7))))
    return _timed(run, device, calls) / calls


def _timed(run: Callable[[], Any], device: torch.device, calls: int) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def measure_roof(device: torch.device, dtype: torch.dtype, scale: Scale) -> Roof:
    """By a copy that no cache holds, and a product of square matrices of ``dtype``."""
    source = torch.zeros(scale.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = seconds_per_call(lambda: target.copy_(source), device, scale.budget_s)
    left = torch.zeros(scale.matrix, scale.matrix, dtype=dtype, device=device)
    product = seconds_per_call(lambda: left @ left, device, scale.budget_s)
    return Roof(bytes_per_s=2 * scale.copy_bytes / copy, flops_per_s=2 * scale.matrix**3 / product)


def num_bytes(*values: Any) -> int:
    """Of all tensors among ``values``."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
