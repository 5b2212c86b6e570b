"""What an architecture means: pure functions of its name, so that every decision can be tested without a device."""

from __future__ import annotations

__all__ = ["attention_priorities", "features", "supported_quantization"]

_TRITON, _FLASH, _REFERENCE = "triton", "flash_attn", "torch_reference"

_MATRIX_CORES = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")
_FLASH_KERNELS = ("gfx90a", "gfx942", "gfx950")
_FP8 = {"gfx940": "fp8_fnuz", "gfx941": "fp8_fnuz", "gfx942": "fp8_fnuz", "gfx950": "fp8", "gfx1200": "fp8",
        "gfx1201": "fp8"}  # fmt: skip
"""Two encodings: that of gfx94x has no infinities, no negative zero, and half the range of the usual one."""


def attention_priorities(architecture: str) -> tuple[str, ...]:
    """Attention backends to try, the best first; an empty text stands for a device that cannot be asked.

    FlashAttention's packages for ROCm cover data-center devices; Triton runs on all.
    """
    name = _plain(architecture)
    if name in _FLASH_KERNELS:
        return (_TRITON, _FLASH, _REFERENCE)
    return (_TRITON, _REFERENCE)


def features(architecture: str) -> frozenset[str]:
    """What kernels may ask for: the maker's name, the architecture, and what it computes with."""
    name = _plain(architecture)
    found = {"rocm", *([name] if name else ())}
    if name in _MATRIX_CORES:
        found.add("matrix_cores")
    if name in _FP8:
        found.add(_FP8[name])
    # Lanes that run in step: kernels are compiled for one or the other.
    found.add("wave64" if name.startswith("gfx9") else "wave32")
    return frozenset(found)


def supported_quantization(architecture: str) -> tuple[str, ...]:
    """Names of ``quantization`` plugins that may be used; empty, which means any, where the device is unknown."""
    name = _plain(architecture)
    if not name:
        return ()
    common = ("gguf", "int8", "int4", "gptq", "compressed-tensors")
    return (*common, "fp8") if name in _FP8 else common


def _plain(architecture: str) -> str:
    """Without the switches behind the colon (``gfx942:sramecc+:xnack-``)."""
    return architecture.partition(":")[0]
