"""The seams at which another kernel may take the place of the plain one: all of them, with their contracts.

A model is built with one :class:`Kernels`; layers keep the functions they need, so that a call costs one attribute.
There is no other way to replace a kernel: nothing here or elsewhere assigns to a module's or class's attribute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hardpoint.errors import ConfigError, PluginError
from hardpoint_torch_runtime.ops import reference
from hardpoint_torch_runtime.sampling.truncation import apply_top_k_top_p

__all__ = ["SEAMS", "KernelSeam", "Kernels", "check_signature", "seam"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one model, by seam; the plain ones unless said otherwise."""

    silu_and_mul: Callable[[torch.Tensor], torch.Tensor] = reference.silu_and_mul
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = reference.rms_norm
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]] = (
        reference.add_rms_norm
    )
    rotary_embedding: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = (
        reference.rotary_embedding
    )
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = reference.linear
    embedding: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = reference.embedding
    top_k_top_p: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor] = apply_top_k_top_p


@dataclass(frozen=True, slots=True)
class KernelSeam:
    """One row of the table.

    Attributes:
        parameters: names in order; the seam passes all of them by position.
        contract: shapes, dtypes and what is returned.
        mutates: parameters that the kernel writes in place; it leaves all others as they are.
        dtype: the dtype of the seam's tensors where it is not the compute dtype, by name.
    """

    name: str
    parameters: tuple[str, ...]
    contract: str
    used_by: str
    mutates: tuple[str, ...] = ()
    dtype: str | None = None

    @property
    def reference(self) -> Callable[..., Any]:
        """The plain kernel."""
        kernel: Callable[..., Any] = getattr(Kernels(), self.name)
        return kernel

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"


_ROWS = (
    KernelSeam(
        "silu_and_mul",
        ("gate_up",),
        "gate_up [..., 2 M], gate first; returns silu(gate) * up [..., M]",
        "gated feed-forward layers",
    ),
    KernelSeam(
        "rms_norm",
        ("x", "weight", "eps"),
        "x [..., C], perhaps not contiguous, weight [C]; returns x / rms(x) * weight [..., C], accumulated in float32",
        "norms of queries and keys, and the first norm of a model",
    ),
    KernelSeam(
        "add_rms_norm",
        ("x", "residual", "weight", "eps"),
        "x, residual [T, C], weight [C]; adds x to residual in place; returns (rms_norm of the sum, residual)",
        "norms between layers",
        mutates=("residual",),
    ),
    KernelSeam(
        "rotary_embedding",
        ("heads", "cos", "sin", "rotary_size"),
        "heads [T, H, D], rows perhaps not contiguous, cos, sin float32 [T, 1, R], sin with the sign of its half; "
        "turns the pairs (i, i + R/2) of the first R values in place; returns heads",
        "rotary positions, on queries and keys together",
        mutates=("heads",),
    ),
    KernelSeam(
        "linear",
        ("x", "weight", "bias"),
        "x [..., I], weight [O, I], bias [O] or None; returns [..., O]",
        "dense linear layers and tied heads",
    ),
    KernelSeam(
        "embedding", ("token_ids", "weight"), "token_ids int64 [T], weight [V, C]; returns [T, C]", "token embeddings"
    ),
    KernelSeam(
        "top_k_top_p",
        ("logits", "top_k", "top_p"),
        "logits float32 [S, V], S at least 1, top_k int64 [S] (0: all) or None, top_p float32 [S] (1: all) or None; "
        "sets excluded logits to -inf in place, keeping ties and at least one a row; returns logits",
        "sampling",
        mutates=("logits",),
        dtype="float32",
    ),
)

SEAMS: Mapping[str, KernelSeam] = MappingProxyType({row.name: row for row in _ROWS})


def seam(name: str) -> KernelSeam:
    """The row of ``name``. Raises ``ConfigError`` listing the seams."""
    if name not in SEAMS:
        raise ConfigError(
            f"there is no kernel seam {name!r}; plugins.worker.torch.kernel_overrides and the platform's "
            f"kernel_candidates may name: {', '.join(SEAMS)}"
        )
    return SEAMS[name]


def check_signature(row: KernelSeam, function: Callable[..., Any]) -> None:
    """Raises ``PluginError`` when ``function`` does not take the seam's parameters, by name and in order (R10.49).

    Callables of compiled code that do not tell their parameters pass.
    """
    if not callable(function):
        raise PluginError(f"the kernel for seam {row.name!r} is a {type(function).__name__}, not a callable")
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(parameter.name for parameter in found if parameter.kind in by_position)
    demanded = [p.name for p in found if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if names != row.parameters or demanded:
        taken = ", ".join([*names, *(f"*, {name}" for name in demanded)])
        raise PluginError(f"the kernel takes ({taken}), but the seam is {row.signature}, all by position")
