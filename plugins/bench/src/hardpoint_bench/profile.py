"""Where the time of a step goes: sampled stacks, put into groups by the innermost frame that belongs to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GROUPS", "OTHER", "Group", "kernel_share", "shares"]

OTHER = "other"


@dataclass(frozen=True, slots=True)
class Group:
    """Modules below ``prefixes``. ``is_kernel``: they do little but call what computes, whose time is theirs then."""

    name: str
    prefixes: tuple[str, ...]
    is_kernel: bool = False


_LAYERS = "hardpoint_torch_runtime.layers"

GROUPS = (
    Group("native kernels", ("hardpoint_cpu",), is_kernel=True),
    Group(
        "linear layers",
        (f"{_LAYERS}.linear", f"{_LAYERS}.linear_method", f"{_LAYERS}.embedding", "hardpoint_quantization"),
        is_kernel=True,
    ),
    Group("attention", ("hardpoint_attention", f"{_LAYERS}.attention", f"{_LAYERS}.mla"), is_kernel=True),
    Group("other layers", (_LAYERS, "hardpoint_models", "hardpoint_torch_runtime.ops"), is_kernel=True),
    Group("sampling", ("hardpoint_torch_runtime.sampling",)),
    Group("runner", ("hardpoint_torch_runtime",)),
    Group("scheduler", ("hardpoint_scheduling",)),
    Group("executor", ("hardpoint_executors",)),
    Group("engine", ("hardpoint",)),
)
"""The first one whose modules a frame is in counts."""


def shares(stacks: Mapping[str, float]) -> dict[str, float]:
    """Fraction of the sampled time by group, in their order; :data:`OTHER` for stacks without any frame of them."""
    total = sum(stacks.values())
    if not total:
        return {}
    seconds = dict.fromkeys([*(group.name for group in GROUPS), OTHER], 0.0)
    for stack, spent in stacks.items():
        seconds[_group_of(stack)] += spent
    return {name: spent / total for name, spent in seconds.items()}


def kernel_share(found: Mapping[str, float]) -> float:
    """Of :func:`shares`, what is spent in kernels and the layers that call them."""
    return sum(found.get(group.name, 0.0) for group in GROUPS if group.is_kernel)


def _group_of(stack: str) -> str:
    for frame in reversed(stack.split(";")):
        module = frame.partition(":")[0]
        for group in GROUPS:
            if any(module == prefix or module.startswith(f"{prefix}.") for prefix in group.prefixes):
                return group.name
    return OTHER
