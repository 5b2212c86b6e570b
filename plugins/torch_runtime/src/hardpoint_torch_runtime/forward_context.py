"""What a model's layers learn about the current step without it passing through every signature.

Legend: T tokens of the step (padding included), B blocks. The runner sets the context around each forward; attention
layers read their own entries by name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "BatchDescriptor",
    "DataParallelMetadata",
    "ForwardContext",
    "GraphMode",
    "LayerTurns",
    "get_forward_context",
    "has_forward_context",
    "set_forward_context",
]


class GraphMode(enum.StrEnum):
    """How the forward at hand runs.

    ``PIECEWISE``: pieces between the layers that read the context are replayed; ``FULL``: all of it is.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Key of a captured or compiled step shape; as few fields as possible. ``num_rows`` None: any number of requests.

    ``is_uniform``: all requests have equally many tokens. ``num_adapters`` counts the active ones, because the grids of
    some adapter kernels depend on it.
    """

    num_tokens: int
    num_rows: int | None = None
    is_uniform: bool = False
    has_adapter: bool = False
    num_adapters: int = 0


@dataclass(frozen=True, slots=True)
class DataParallelMetadata:
    """What ranks that exchange tokens need to know of each other.

    Attributes:
        rank: this rank's index in ``num_tokens``.
        num_tokens: tokens of every data-parallel rank in this step, padding included.
        sequence_parallel_size: ranks that share out one data-parallel rank's tokens for mixtures of experts.
    """

    rank: int
    num_tokens: tuple[int, ...]
    sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.num_tokens):
            raise ValueError(f"data-parallel rank {self.rank} has no entry in the token counts {self.num_tokens}")
        if self.sequence_parallel_size < 1:
            raise ValueError(f"sequence_parallel_size is {self.sequence_parallel_size}; it must be at least 1")

    @property
    def max_tokens(self) -> int:
        """Tokens of the rank that has most: the size to which all pad what they exchange."""
        return max(self.num_tokens)

    @property
    def local_tokens(self) -> tuple[int, ...]:
        """Tokens of every rank that takes part: those of a data-parallel rank in even shares, the first ones larger."""
        size = self.sequence_parallel_size
        return tuple(count // size + (share < count % size) for count in self.num_tokens for share in range(size))


class LayerTurns:
    """Names of layers in the order in which one forward runs them, each handed out once (R4.67).

    Compiled code holds no layer's name, or it would be compiled anew for each: the operator that runs layers of this
    kind asks whose turn it is. One object serves one forward, so that an aborted one leaves nothing behind.
    """

    __slots__ = ("_names", "_taken")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._taken = 0

    @property
    def index(self) -> int:
        """How many have been taken."""
        return self._taken

    def take(self, caller: str | None = None) -> str:
        """The next name. ``caller`` is who asks, where that is known.

        Raises ``RuntimeError`` when all were taken, or when it is not the caller's turn: layers ran in another order
        than they are listed in, and each would get the other's weights.
        """
        if self._taken == len(self._names):
            raise RuntimeError(
                f"a layer ({caller or 'unnamed'}) asks for its turn, but all {len(self._names)} listed ones have had "
                "theirs in this forward; enter a new forward context for every forward"
            )
        name = self._names[self._taken]
        if caller is not None and caller != name:
            raise RuntimeError(
                f"it is the turn of layer {name!r}, but {caller!r} asks; the model's named_layers() must list its "
                "layers in the order in which they run"
            )
        self._taken += 1
        return name

    def check_complete(self) -> None:
        """Raises ``RuntimeError`` unless every name was taken."""
        if self._taken != len(self._names):
            raise RuntimeError(
                f"the forward is over, but only {self._taken} of {len(self._names)} listed layers ran; the next one "
                f"would have been {self._names[self._taken]!r}"
            )


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's facts, by layer name.

    Attributes:
        attention_metadata: what each layer's metadata builder built (layers of one KV group share one object); None
            while memory is profiled: attention then writes zeros and touches no cache. Empty where ``half_metadata``
            is set: layers run in the scope of one half.
        slot_mapping: int64 [T] per layer, -1 where nothing is written; layers of one group share one tensor.
        kv_caches: [blocks, KV heads, block size, 2 * head size] per layer, keys before values in the last dimension;
            of latent layers [blocks, 1, block size, head size], since the values are in the keys.
        states: for a recurrent layer the tensors of its states, each [blocks, *shape], beside their bytes in
            ``kv_caches``.
        num_tokens: tokens of the step without padding.
        batch_descriptor: key of the step's shape where graphs or compiled ranges are used.
        padding_mask: bool [T], True where a token is padding; None when it is not provided. Layers may use it to skip
            work, never to change real rows.
        extras: open entries of platforms and plugins.
        uncompiled_layers: by name, the layers that compiled code calls as they are.
        half_metadata: ``attention_metadata`` of both halves of a batch that is computed in two.
        graph_mode: how this forward runs.
        skips_compiled: the model's plain forward is called, although a compiled one may exist.
        moe_turns: the mixtures of experts in the order of their turns; None where nobody listed them.
        data_parallel: token counts of the ranks that tokens are exchanged with; None where they are not.
        encoder_hidden: [E, C], what an encoder made of inputs that rows of this step begin to attend to, in the order
            of the cross-attention layers' slot mapping; None where there are none.
    """

    attention_metadata: dict[str, Any] | None
    slot_mapping: dict[str, torch.Tensor]
    kv_caches: dict[str, torch.Tensor]
    num_tokens: int
    batch_descriptor: BatchDescriptor | None = None
    padding_mask: torch.Tensor | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    uncompiled_layers: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    half_metadata: tuple[dict[str, Any], dict[str, Any]] | None = None
    graph_mode: GraphMode = GraphMode.NONE
    skips_compiled: bool = False
    moe_turns: LayerTurns | None = None
    data_parallel: DataParallelMetadata | None = None
    states: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    encoder_hidden: torch.Tensor | None = None

    def __post_init__(self) -> None:
        halves = self.half_metadata
        if halves is None:
            return
        if len(halves) != 2:
            raise ValueError(f"half_metadata holds {len(halves)} maps; a batch is computed in exactly two halves")
        if self.attention_metadata is None or self.attention_metadata:
            raise ValueError("attention_metadata must be empty where half_metadata is given: each half has its own")


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
