"""Arguments for the kernel seams of the torch runtime, of the sizes and layouts that models bring.

Legend: T tokens, C hidden size, M intermediate size, H heads, D head size, S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hardpoint_torch_runtime.ops import SEAMS

__all__ = ["KernelProblem", "kernel_problems"]

TOKENS = (0, 1, 2, 7, 33)


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """One call of a seam. ``arguments`` are never changed: ``copies`` hands out what may be."""

    seam: str
    title: str
    arguments: tuple[Any, ...]

    def copies(self, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """The arguments with their strides, floating-point tensors of the seam's dtype as ``dtype`` where given."""
        compute = self.dtype
        return tuple(tree_map(lambda leaf: _copy(leaf, dtype if _dtype(leaf) is compute else None), self.arguments))

    @property
    def dtype(self) -> torch.dtype:
        """Of the floating-point arguments; tables in float32 beside them do not count."""
        return next(leaf.dtype for leaf in self.arguments if torch.is_tensor(leaf) and leaf.dtype.is_floating_point)

    def expected(self) -> tuple[Any, tuple[Any, ...]]:
        """(result of the plain kernel in float64, its arguments after the call).

        Sampling kernels choose, so they are computed as they are, in float32.
        """
        arguments = self.copies(None if SEAMS[self.seam].dtype is not None else torch.float64)
        return SEAMS[self.seam].reference(*arguments), arguments

    def rows(self, first: int, last: int) -> KernelProblem:
        """The same call for some of its tokens or rows."""
        count = len(self.arguments[0])
        shared = {"weight", "bias"}
        names = SEAMS[self.seam].parameters
        part = tuple(
            leaf[first:last] if torch.is_tensor(leaf) and len(leaf) == count and name not in shared else leaf
            for name, leaf in zip(names, self.arguments, strict=True)
        )
        return KernelProblem(self.seam, f"{self.title}, rows {first} to {last}", part)


def kernel_problems(seam: str, dtype: torch.dtype, device: torch.device) -> Sequence[KernelProblem]:
    """Calls of ``seam`` in ``dtype``, without tokens, with one and with many; equal for equal arguments."""
    generator = torch.Generator().manual_seed(len(seam))

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, of)

    return [KernelProblem(seam, title, arguments) for title, arguments in _MAKERS[seam](normal).items()]


Normal = Callable[..., torch.Tensor]
Calls = dict[str, tuple[Any, ...]]


def _silu_and_mul(normal: Normal) -> Calls:
    calls: Calls = {f"[{t}, 2*{m}]": (normal(t, 2 * m) * 3,) for t in TOKENS for m in (8, 96)}
    return {**calls, "[2, 3, 2*16]": (normal(2, 3, 32),), "one of odd size": (normal(5, 2 * 19),)}


def _rms_norm(normal: Normal) -> Calls:
    calls: Calls = {f"[{t}, {c}]": (normal(t, c), normal(c), 1e-6) for t in TOKENS for c in (16, 80)}
    states = normal(7, 6, 16)
    calls["heads of a fused projection [7, 4, 16]"] = (states[:, :4], normal(16), 1e-5)
    calls["tiny values"] = (normal(3, 16) * 1e-3, normal(16), 1e-6)
    return calls


def _add_rms_norm(normal: Normal) -> Calls:
    return {f"[{t}, {c}]": (normal(t, c), normal(t, c) * 4, normal(c), 1e-5) for t in TOKENS for c in (16, 80)}


def _rotary(normal: Normal) -> Calls:
    calls: Calls = {}
    for tokens in TOKENS:
        for size, rotated in ((16, 16), (24, 8)):
            angles = normal(tokens, 1, rotated // 2, of=torch.float32) * 10
            cos, sin = angles.cos(), angles.sin()
            factors = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            states = normal(tokens, 5, size)
            calls[f"[{tokens}, 3, {size}], {rotated} rotated"] = (states[:, :3], *factors, rotated)
    return calls


def _linear(normal: Normal) -> Calls:
    calls: Calls = {}
    for tokens in TOKENS:
        calls[f"[{tokens}, 48] to 32"] = (normal(tokens, 48) / 4, normal(32, 48) / 2, None)
        calls[f"[{tokens}, 17] to 5 with bias"] = (normal(tokens, 17) / 2, normal(5, 17) / 2, normal(5))
    return calls


def _embedding(normal: Normal) -> Calls:
    calls: Calls = {}
    for tokens in TOKENS:
        table = normal(29, 16)
        ids = torch.arange(tokens, device=table.device) * 7 % 29
        calls[f"[{tokens}] of 29"] = (ids, table)
    return calls


def _top_k_top_p(normal: Normal) -> Calls:
    calls: Calls = {}
    for rows, size in ((1, 50), (5, 50), (3, 700)):
        logits = normal(rows, size, of=torch.float32) * 2
        top_k = torch.arange(rows, device=logits.device) * 3
        top_p = 1 - torch.arange(rows, device=logits.device, dtype=torch.float32) * 0.13
        calls[f"[{rows}, {size}], top-k"] = (logits, top_k, None)
        calls[f"[{rows}, {size}], top-p"] = (logits, None, top_p)
        calls[f"[{rows}, {size}], both"] = (logits, top_k, top_p)
    ties = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -torch.inf]])
    calls["ties"] = (ties.to(normal(1).device), torch.tensor([2], device=normal(1).device), None)
    return calls


_MAKERS: Mapping[str, Callable[[Normal], Calls]] = {
    "silu_and_mul": _silu_and_mul,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rotary_embedding": _rotary,
    "linear": _linear,
    "embedding": _embedding,
    "top_k_top_p": _top_k_top_p,
}


def _dtype(leaf: Any) -> torch.dtype | None:
    return leaf.dtype if torch.is_tensor(leaf) else None


def _copy(leaf: Any, dtype: torch.dtype | None) -> Any:
    """With the same strides, over storage of its own."""
    if not torch.is_tensor(leaf):
        return leaf
    fresh = torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype or leaf.dtype, device=leaf.device)
    return fresh.copy_(leaf)
