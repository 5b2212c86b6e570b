"""``--batch-invariant``: holds a loaded model to the promise, layer by layer, before the first step.

A token's bits may depend on its own sequence alone. What computes each row by itself keeps that promise in plain torch
as well: norms, tables, rotation, activations. Products do not, because libraries choose another order of additions by
the number of rows; nor does what sorts tokens by expert or scans them in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.model import Model
from hardpoint_torch_runtime.layers import (
    AttentionLayer,
    EmbeddingTable,
    LayerNorm,
    LMHead,
    ParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    UnquantizedLinearMethod,
    VocabEmbedding,
)

__all__ = ["BatchInvariantMethod", "require_batch_invariance"]

_ROW_BY_ROW = (EmbeddingTable, LayerNorm, RMSNorm, RotaryEmbedding, VocabEmbedding)
_MOST_RANKS = 2
"""Two numbers have one sum; of more, the order of additions is the collective's affair."""
_NAMED_AT_MOST = 3


@runtime_checkable
class BatchInvariantMethod(Protocol):
    """A linear method that can say whether it adds up a row in one order, whatever rows come with it."""

    @property
    def is_batch_invariant(self) -> bool: ...


def require_batch_invariance(model: Model, num_ranks: int, *, has_linear_kernel: bool = False) -> None:
    """Attention is held to the promise where its backend is chosen.

    ``num_ranks`` share each layer; ``has_linear_kernel``: plain linears compute with an override of their seam, which
    was chosen to keep the promise. Raises ``ConfigError`` with the layers that break it and what to choose.
    """
    if num_ranks > _MOST_RANKS:
        raise ConfigError(
            f"--batch-invariant cannot be kept by {num_ranks} ranks, whose sums are added in an order that depends on "
            f"the number of tokens; set --tensor-parallel-size to {_MOST_RANKS} at most, or leave it out"
        )
    faults: dict[str, list[str]] = {}
    for name, reason in _faults(model, has_linear_kernel):
        faults.setdefault(reason, []).append(name)
    if faults:
        told = "; ".join(f"{_some(names)} {reason}" for reason, names in faults.items())
        raise ConfigError(
            f"--batch-invariant cannot be kept: {told}. Use the platform's own kernels (no --compiler none, and "
            "kernels that are compiled) with a model whose layers have such kernels, or leave --batch-invariant out"
        )


def _faults(model: Model, has_linear_kernel: bool) -> Iterator[tuple[str, str]]:
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for path, module in parts:
        name = str(getattr(module, "name", path))
        if isinstance(module, ParallelLinear):
            method: object = module.method
            is_kept = isinstance(method, BatchInvariantMethod) and method.is_batch_invariant
            if not (is_kept or (has_linear_kernel and isinstance(method, UnquantizedLinearMethod))):
                yield name, f"computed by {type(method).__name__}, which rounds by the number of rows"
        elif isinstance(module, LMHead):
            if module.projection is None and module.product is None and not has_linear_kernel:
                yield name, "computed in plain torch, which rounds by the number of rows"
        elif not isinstance(module, (*_ROW_BY_ROW, AttentionLayer)) and any(True for _ in module.parameters(False)):
            yield name, f"a {type(module).__name__}, which has no kernel that keeps rows apart"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more are" if more > 0 else f"{shown} {'is' if len(names) == 1 else 'are'}"
