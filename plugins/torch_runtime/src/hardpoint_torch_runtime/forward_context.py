"""What a model's layers learn about the current step without it passing through every signature.

Legend: T tokens of the step (padding included), B blocks. The runner sets the context around each forward; attention
layers read their own entries by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["BatchDescriptor", "ForwardContext", "get_forward_context", "has_forward_context", "set_forward_context"]


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Key of a captured or compiled step shape; as few fields as possible. ``num_rows`` None: any number of requests.

    ``is_uniform``: all requests have equally many tokens. ``num_adapters`` counts the active ones.
    """

    num_tokens: int
    num_rows: int | None = None
    is_uniform: bool = False
    has_adapter: bool = False
    num_adapters: int = 0


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's facts, by layer name.

    Attributes:
        attention_metadata: what each layer's metadata builder built (layers of one KV group share one object); None
            while memory is profiled: attention then writes zeros and touches no cache.
        slot_mapping: int64 [T] per layer, -1 where nothing is written; layers of one group share one tensor.
        kv_caches: [blocks, KV heads, block size, 2 * head size] per layer, keys before values in the last dimension.
        num_tokens: tokens of the step without padding.
        batch_descriptor: key of the step's shape where graphs or compiled ranges are used.
        padding_mask: bool [T], True where a token is padding; None when it is not provided. Layers may use it to skip
            work, never to change real rows.
        extras: open entries of platforms and plugins.
    """

    attention_metadata: dict[str, Any] | None
    slot_mapping: dict[str, torch.Tensor]
    kv_caches: dict[str, torch.Tensor]
    num_tokens: int
    batch_descriptor: BatchDescriptor | None = None
    padding_mask: torch.Tensor | None = None
    extras: dict[str, Any] = field(default_factory=dict)


# One per process by design (R4.62): a worker runs one forward at a time, and kernels called from compiled code cannot
# be handed a context object.
_active: list[ForwardContext] = []


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the active one inside the block; the previous one returns afterwards, also after an error."""
    depth = len(_active)
    _active.append(context)
    try:
        yield context
    finally:
        del _active[depth:]


def get_forward_context() -> ForwardContext:
    """The active context. Raises ``RuntimeError`` outside a :func:`set_forward_context` block."""
    if not _active:
        raise RuntimeError(
            "no forward context is active: wrap the model call in 'with set_forward_context(ForwardContext(...)):'"
        )
    return _active[-1]


def has_forward_context() -> bool:
    """True inside a :func:`set_forward_context` block."""
    return bool(_active)
