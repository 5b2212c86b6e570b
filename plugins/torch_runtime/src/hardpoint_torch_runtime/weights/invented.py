"""Weights without files: a loader that makes up whatever the model at hand says it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from hardpoint.interfaces.model_source import WeightTensor

__all__ = ["WeightInventor"]


@runtime_checkable
class WeightInventor(Protocol):
    """What a ``weight_loader`` may have beside its own methods: then it is asked for this instead of ``tensors``."""

    def invent(self, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[WeightTensor]:
        """A dense tensor for each stored name and shape that is ``wanted``, one at a time.

        Values must depend on nothing but name, shape and options: ranks and pipeline stages ask for different tensors,
        and each takes its share of equal ones.
        """
