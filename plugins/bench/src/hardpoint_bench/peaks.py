"""Measures the machine's limits there and then, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from hardpoint_bench.sides import PROGRAMS, SideFault

__all__ = ["measure_peaks"]

_MOST_S = 600


def measure_peaks(threads: int) -> dict[str, float]:
    """``memory_read`` in bytes per second, ``fp32`` and ``int8`` in operations per second, with so many threads.

    Raises :class:`SideFault` where ``torch`` is missing or lacks an operator.
    """
    command = [sys.executable, str(PROGRAMS / "peaks.py"), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MOST_S)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["without a word"]
        raise SideFault(f"the machine's limits cannot be measured: {words[-1]}")
    found: dict[str, float | None] = json.loads(done.stdout)
    if absent := [name for name, rate in found.items() if rate is None]:
        raise SideFault(f"the machine's limits cannot be measured: torch has no operator here for {', '.join(absent)}")
    return {name: rate for name, rate in found.items() if rate is not None}
