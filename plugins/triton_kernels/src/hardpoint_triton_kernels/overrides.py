"""Kernel overrides, one plugin for each seam: ``triton_`` and the seam's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hardpoint.interfaces.kernel_override import KernelOverride
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_triton_kernels.availability import device_types, probe, require_triton

__all__ = [
    "create_add_rms_norm",
    "create_rms_norm",
    "create_rotary_embedding",
    "create_silu_and_mul",
    "create_top_k_top_p",
]

_COMPUTE_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_SAMPLING_DTYPE = frozenset({"float32"})


def _override(
    seam: str, function: Callable[..., Any], kernel: Any, dtypes: frozenset[str] = _COMPUTE_DTYPES
) -> KernelOverride:
    """Tiles depend on the width of a row alone, so that every row is computed the same way in every batch."""
    return KernelOverride(seam, function, device_types(kernel), dtypes, is_batch_invariant=True)


@plugin("kernel_override", probe=probe)
def create_silu_and_mul(ctx: WorkerContext, options: NoOptions) -> KernelOverride:
    """Raises ``PluginError`` without Triton, as all factories here do."""
    require_triton()
    from hardpoint_triton_kernels.kernels import activation

    return _override("silu_and_mul", activation.silu_and_mul, activation.act_and_mul_kernel)


@plugin("kernel_override", probe=probe)
def create_rms_norm(ctx: WorkerContext, options: NoOptions) -> KernelOverride:
    require_triton()
    from hardpoint_triton_kernels.kernels import norm

    return _override("rms_norm", norm.rms_norm, norm.rms_norm_kernel)


@plugin("kernel_override", probe=probe)
def create_add_rms_norm(ctx: WorkerContext, options: NoOptions) -> KernelOverride:
    require_triton()
    from hardpoint_triton_kernels.kernels import norm

    return _override("add_rms_norm", norm.add_rms_norm, norm.rms_norm_kernel)


@plugin("kernel_override", probe=probe)
def create_rotary_embedding(ctx: WorkerContext, options: NoOptions) -> KernelOverride:
    require_triton()
    from hardpoint_triton_kernels.kernels import rotary

    return _override("rotary_embedding", rotary.rotary_embedding, rotary.rotary_kernel)


@plugin("kernel_override", probe=probe)
def create_top_k_top_p(ctx: WorkerContext, options: NoOptions) -> KernelOverride:
    require_triton()
    from hardpoint_triton_kernels.kernels import truncation

    return _override("top_k_top_p", truncation.top_k_top_p, truncation.truncation_kernel, _SAMPLING_DTYPE)
