"""Plugin kind ``logits_processor``: joins its declared slot of the sampling chain, never changes the chain's order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hardpoint.interfaces.step import NewRow

if TYPE_CHECKING:
    import numpy as np
    import torch


class LogitsProcessor(ABC):
    """State is kept per slot. ``argmax_invariant`` processors run on random rows only, after temperature (R6.14)."""

    argmax_invariant: bool = False

    @abstractmethod
    def add(self, row: NewRow) -> bool:
        """A request entered ``row.slot``; return whether it is affected. Any earlier state of the slot is void."""

    @abstractmethod
    def remove(self, slot: int) -> None: ...

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """``token_ids[i]``, int32, joined the request in ``slots[i]`` after its :class:`NewRow`.

        Tokens of one slot come in order, each once, before the next :meth:`apply` that concerns it, wherever they were
        sampled.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """float32 [S, V], row i belongs to ``slots[i]``; may work in place."""
