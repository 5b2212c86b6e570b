"""The machine a benchmark ran on, as far as its figures depend on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe_machine"]

_FLAGS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """``cores`` are the logical ones this process may run on; ``torch`` is None where it is not installed."""
    return {
        "cpu": _cpu("model name") or platform.processor() or platform.machine(),
        "flags": _known_flags(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def _cpu(field: str) -> str:
    """As the kernel calls it; some architectures have no such field."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.partition("\t")[0].strip() == field), "")


def _known_flags() -> list[str]:
    """Instructions that kernels are written for, of those that the processor has."""
    found = {*(_cpu("flags") or _cpu("Features")).split()}
    return [flag for flag in _FLAGS if flag in found]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
