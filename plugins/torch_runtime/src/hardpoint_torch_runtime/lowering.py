"""How a model describes itself to compilers, and what these may bring beyond the interface. Names no compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch

from hardpoint.interfaces.compiler import LoweredRange
from hardpoint_torch_runtime.layers import (
    AttentionLayer,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
)

__all__ = [
    "CompilingPlatform",
    "DescribedStack",
    "LoweredForward",
    "NotStandard",
    "ResumingCompiler",
    "StandardBlock",
    "StandardStack",
]

LoweredForward: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""(hidden [T, C], which may be overwritten, positions [T]) to what the stack's layers and final norm make of it, or
None where a step must run as the model is."""


@dataclass(frozen=True, slots=True)
class StandardBlock:
    """One decoder layer: attention over rotated heads and a gated feed-forward block, each after a norm, each added to
    the residual stream.

    Attributes:
        q_norm, k_norm: over single heads, before the rotation; both or none.
        rotary: the table that this layer's heads turn by.
        attention_output_norm, feed_forward_output_norm: over what is about to be added; both or none.
        activation: of the gate, which comes first in the output of ``gate_up_proj``.
    """

    name: str
    input_norm: RMSNorm
    qkv_proj: QKVParallelLinear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    rotary: RotaryEmbedding
    attention: AttentionLayer
    o_proj: ParallelLinear
    attention_output_norm: RMSNorm | None
    feed_forward_norm: RMSNorm
    gate_up_proj: MergedColumnParallelLinear
    activation: Literal["silu", "gelu_tanh"]
    down_proj: ParallelLinear
    feed_forward_output_norm: RMSNorm | None


@dataclass(frozen=True, slots=True)
class StandardStack:
    """Blocks in the order in which they run; ``final_norm`` None: the sum is handed on to the next stage."""

    blocks: tuple[StandardBlock, ...]
    final_norm: RMSNorm | None


@dataclass(frozen=True, slots=True)
class NotStandard:
    """Why a stack is not made of standard blocks."""

    reason: str


@runtime_checkable
class DescribedStack(Protocol):
    """A module of a model, ``forward(hidden, positions)``, that compilers may replace.

    ``lowered`` is called first in every forward, unless it is None.
    """

    lowered: LoweredForward | None

    def describe(self) -> StandardStack | NotStandard:
        """What the stack computes as long as ``lowered`` is None."""


@runtime_checkable
class ResumingCompiler(Protocol):
    """A compiler that may not be able to lower a model yet when it is loaded."""

    def resume(self) -> list[LoweredRange] | None:
        """Called between two steps until it returns something: what ``lower`` would have, had it been possible.

        Cheap while there is nothing to do yet.
        """

    @property
    def is_waiting(self) -> bool:
        """Whether :meth:`resume` is to be called."""


@runtime_checkable
class CompilingPlatform(Protocol):
    """A platform with a compiler of its own for models that name none."""

    default_compiler: str
    """Name of the ``compiler`` plugin; empty: none."""
