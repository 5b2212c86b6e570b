"""What this machine reaches at its best with all threads, as one line of JSON: ``python peaks.py THREADS``.

``memory_read`` in bytes per second, ``fp32`` and ``int8`` in operations per second, the best of several tries each,
through stock operators of ``torch``. None where an operator is missing on this machine, or computes something else:
there are processors on which one returns at once, with whatever its result's memory held.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

_READ_BYTES = 2**30
_SIZES = (1024, 2048)
_SECONDS = 1.5


def best(work: Callable[[], object]) -> float:
    """Shortest time of one call, in seconds."""
    work()
    shortest, until = float("inf"), time.perf_counter() + _SECONDS
    while (started := time.perf_counter()) < until:
        work()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def memory_read() -> float:
    """More than any cache holds, summed up."""
    data = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    return _READ_BYTES / best(data.sum)


def product(work: Callable[[int], Callable[[], object]]) -> float | None:
    """Square matrices; the size that comes out best. ``work`` raises ``RuntimeError`` where results are wrong."""
    try:
        return max(2 * size**3 / best(work(size)) for size in _SIZES)
    except (RuntimeError, NotImplementedError):
        return None


def fp32(size: int) -> Callable[[], object]:
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: a @ b


def int8_onednn(size: int) -> Callable[[], object]:
    a, b = (torch.randint(-127, 128, (size, size), dtype=torch.int8) for _ in range(2))
    require_close(torch._int_mm(a, b)[-1].double(), a[-1].double() @ b.double(), 0.0)
    return lambda: torch._int_mm(a, b)


def int8_dynamic(size: int) -> Callable[[], object]:
    """Activations quantized on the way, as an engine has to."""
    scales, zeros, x = torch.full((size,), 0.05), torch.zeros(size), torch.randn(size, size)
    weight = torch.quantize_per_channel(torch.randn(size, size), scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    found = torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False)
    require_close(found[-1].double(), weight.dequantize().double() @ x[-1].double(), 0.05)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False)


def require_close(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Raise ``RuntimeError`` for a difference above ``tolerance`` times the largest value (NaN: always)."""
    worst = float((found - exact).abs().max() / exact.abs().max())
    if not worst <= tolerance:
        raise RuntimeError(f"wrong results: {worst} of the largest value away")


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    with torch.inference_mode():
        in_8_bits = [rate for work in (int8_onednn, int8_dynamic) if (rate := product(work)) is not None]
        print(json.dumps({"memory_read": memory_read(), "fp32": product(fp32), "int8": max(in_8_bits, default=None)}))


if __name__ == "__main__":
    main()
