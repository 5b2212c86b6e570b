"""The shape a step runs in: settled before inputs and metadata are built, since both are padded to it (R4.68)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import GraphSupport
from hardpoint_torch_runtime.forward_context import BatchDescriptor, GraphMode

__all__ = ["AS_IT_IS", "AdapterShapes", "StepShape", "StepShapes", "default_sizes"]

LARGEST_SIZE = 512
"""Tokens. Beyond it the device is busy enough that the host's part no longer shows."""
SIZE_STEP = 8


@dataclass(frozen=True, slots=True)
class StepShape:
    """``pad_tokens`` and ``pad_rows`` are None where the step is not padded."""

    graph_mode: GraphMode = GraphMode.NONE
    descriptor: BatchDescriptor | None = None
    pad_tokens: int | None = None
    pad_rows: int | None = None


AS_IT_IS = StepShape()
"""No graph and no padding."""


@dataclass(frozen=True, slots=True)
class AdapterShapes:
    """Whether graphs tell apart how many adapters are active; if not, one graph serves any number but none."""

    specializes: bool = False

    def describe(self, num_adapters: int) -> tuple[bool, int]:
        """(has an adapter, count in the key)."""
        return num_adapters > 0, num_adapters if self.specializes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShapes:
    """Decides by the step's sizes alone.

    Attributes:
        sizes: tokens of the shapes that are captured, ascending.
        support: what all metadata builders of the model tolerate.
        max_rows: requests the worker was sized for.
        query_len: tokens of a row that decodes: one and its drafts.
        is_piecewise: the model's pieces between attention layers can be captured on their own.
    """

    sizes: tuple[int, ...]
    support: GraphSupport
    max_rows: int
    query_len: int = 1
    is_piecewise: bool = False
    adapters: AdapterShapes = AdapterShapes()

    def __post_init__(self) -> None:
        if list(self.sizes) != sorted(set(self.sizes)) or (self.sizes and self.sizes[0] < 1):
            raise ConfigError(f"sizes of captured steps are {self.sizes}; they must be positive and ascending")
        if self.query_len < 1:
            raise ConfigError(f"a decoding row is said to have {self.query_len} tokens; it has at least 1")

    def decide(self, num_scheduled: np.ndarray, *, num_adapters: int = 0, is_plain: bool = True) -> StepShape:
        """The smallest captured shape that holds rows of ``num_scheduled`` (int [R]) tokens.

        :data:`AS_IT_IS` where there is none, or when the step is not ``is_plain``: it brings inputs other than ids,
        whose buffers no graph knows.
        """
        num_rows, num_tokens = len(num_scheduled), int(num_scheduled.sum())
        if not is_plain or num_tokens == 0:
            return AS_IT_IS
        has_adapter, adapters = self.adapters.describe(num_adapters)
        if self.captures_uniform and bool((num_scheduled == self.query_len).all()):
            size = self._size(num_tokens, multiple_of=self.query_len, limit=self.max_rows * self.query_len)
            if size is not None:
                rows = size // self.query_len
                key = BatchDescriptor(size, rows, True, has_adapter, adapters)
                return StepShape(GraphMode.FULL, key, size, rows)
        size = self._size(num_tokens)
        if size is not None and self.support is GraphSupport.ALWAYS:
            rows = min(size, self.max_rows)
            if num_rows <= rows:
                key = BatchDescriptor(size, rows, False, has_adapter, adapters)
                return StepShape(GraphMode.FULL, key, size, rows)
        if size is not None and self.is_piecewise:
            key = BatchDescriptor(size, None, False, has_adapter, adapters)
            return StepShape(GraphMode.PIECEWISE, key, size, None)
        return AS_IT_IS

    @property
    def largest(self) -> int:
        """Tokens of the largest shape; 0 without any."""
        return max(self.sizes, default=0)

    @property
    def captures_uniform(self) -> bool:
        """Whether steps in which every row decodes run as graphs. With drafts a row is no longer a single token."""
        least = GraphSupport.DECODE_ONLY if self.query_len == 1 else GraphSupport.UNIFORM_BATCH
        return self.support >= least

    @property
    def uniform_rows(self) -> tuple[int, ...]:
        """Row counts of the uniform shapes, ascending: what to capture before the first request."""
        if not self.captures_uniform:
            return ()
        limit = self.max_rows * self.query_len
        return tuple(size // self.query_len for size in self.sizes if size % self.query_len == 0 and size <= limit)

    def _size(self, num_tokens: int, *, multiple_of: int = 1, limit: int | None = None) -> int | None:
        for size in self.sizes:
            if size >= num_tokens and size % multiple_of == 0:
                return size if limit is None or size <= limit else None
        return None


def default_sizes(max_tokens: int, candidates: Sequence[int] | None = None) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8 up to 512 and ``max_tokens``; or those of ``candidates`` that are possible."""
    if candidates is None:
        candidates = (1, 2, 4, *range(SIZE_STEP, LARGEST_SIZE + 1, SIZE_STEP))
    return tuple(sorted({size for size in candidates if size <= max_tokens}))
