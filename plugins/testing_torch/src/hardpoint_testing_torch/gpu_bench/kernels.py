"""Kernels at the seams of the torch runtime, against the plain ones.

Legend: T tokens, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hardpoint.errors import HardpointError
from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_testing_torch.gpu_bench.measure import num_bytes, seconds_per_call
from hardpoint_testing_torch.gpu_bench.records import KernelRow, Scale, Skipped
from hardpoint_testing_torch.installed import installed_factory
from hardpoint_testing_torch.kernel_problems import kernel_problems
from hardpoint_torch_runtime.ops import SEAMS

__all__ = ["create_override", "largest_error", "measure_override"]

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
Normal = Callable[..., torch.Tensor]


def create_override(name: str, device: torch.device) -> KernelOverride:
    """The installed override ``name``. Raises ``PluginError`` where it cannot be used."""
    context = WorkerContext(name=name, api_version=1, roles=frozenset({ProcessRole.WORKER}), device=device)
    made: KernelOverride = installed_factory("kernel_override", name)(context, NoOptions())
    return made


def measure_override(name: str, device: torch.device, dtype: torch.dtype, scale: Scale) -> KernelRow | Skipped:
    """What the override makes of the kit's problems and of a large one, or why it is not used."""
    try:
        override = create_override(name, device)
        fixed = SEAMS[override.seam].dtype
        compute = dtype if fixed is None else getattr(torch, fixed)
        text = str(compute).removeprefix("torch.")
        reason = override.refusal(KernelCase(override.seam, device.type, text))
        if reason is not None:
            return Skipped(name=name, reason=reason)
        error = largest_error(override, compute, device)
        arguments = _large_arguments(override.seam, compute, device, scale)
        seconds = seconds_per_call(partial(override.function, *arguments), device, scale.budget_s)
    except (HardpointError, RuntimeError) as fault:
        return Skipped(name=name, reason=f"{type(fault).__name__}: {fault}")
    plain = partial(SEAMS[override.seam].reference, *arguments)
    written = num_bytes(*tree_leaves(override.function(*arguments)))
    return KernelRow(
        group=override.seam,
        name=name,
        case=" x ".join(map(str, arguments[0].shape)),
        error=error,
        tolerance=TOLERANCES[compute],
        seconds=seconds,
        plain_seconds=seconds_per_call(plain, device, scale.budget_s),
        bytes=num_bytes(*arguments) + written,
        flops=0,
    )


def largest_error(override: KernelOverride, dtype: torch.dtype, device: torch.device) -> float:
    """Largest deviation from the plain kernel in float64, relative to values above one, over the kit's problems."""
    errors = [0.0]
    for problem in kernel_problems(override.seam, dtype, device):
        expected, _ = problem.expected()
        found = override.function(*problem.copies())
        for one, other in zip(tree_leaves(expected), tree_leaves(found), strict=True):
            if torch.is_tensor(one) and one.numel():
                errors.append(_deviation(one.double(), other.double()))
    return max(errors)


def _deviation(wanted: torch.Tensor, found: torch.Tensor) -> float:
    same = (wanted == found) | (wanted.isnan() & found.isnan())  # infinities among them
    error = torch.where(same, 0.0, (wanted - found).abs() / wanted.abs().clamp_min(1.0))
    largest = error.max()
    return float(largest) if bool(torch.isfinite(largest)) else float("inf")


def _large_arguments(seam: str, dtype: torch.dtype, device: torch.device, scale: Scale) -> tuple[Any, ...]:
    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(of)

    return _MAKERS[seam](normal, scale)


def _rotary(normal: Normal, scale: Scale) -> tuple[Any, ...]:
    size = min(128, scale.width)
    angles = normal(scale.tokens, 1, size // 2, of=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    heads = normal(scale.tokens, max(1, scale.width // size), size)
    return heads, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), size


def _top_k_top_p(normal: Normal, scale: Scale) -> tuple[Any, ...]:
    logits = normal(max(1, scale.tokens // 128), 32 * scale.width, of=torch.float32)
    rows = logits.shape[0]
    top_k = torch.full((rows,), 50, device=logits.device)
    return logits, top_k, torch.full((rows,), 0.9, device=logits.device)


_MAKERS: Mapping[str, Callable[[Normal, Scale], tuple[Any, ...]]] = {
    "silu_and_mul": lambda normal, scale: (normal(scale.tokens, 2 * scale.width),),
    "rms_norm": lambda normal, scale: (normal(scale.tokens, scale.width), normal(scale.width), 1e-6),
    "add_rms_norm": lambda normal, scale: (
        normal(scale.tokens, scale.width),
        normal(scale.tokens, scale.width),
        normal(scale.width),
        1e-6,
    ),
    "rotary_embedding": _rotary,
    "linear": lambda normal, scale: (normal(scale.tokens, scale.width), normal(scale.width, scale.width), None),
    "embedding": lambda normal, scale: (
        torch.arange(scale.tokens, device=normal(1).device) % 100,
        normal(100, scale.width),
    ),
    "top_k_top_p": _top_k_top_p,
}
