"""Plugin kind ``graph_backend``: records the device work of a call once and repeats it without the host's part.

What to capture, under which key, when, and over which buffers is decided by the caller; a backend only records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


class CapturedGraph(ABC, Generic[_T]):
    """One recording. It reads the captured inputs and writes :attr:`output` in place, always at the same addresses.

    Attributes:
        output: what the captured call returned; a replay changes the contents of its tensors, never their place.
        input_addresses: ``data_ptr()`` of each declared input at capture time, for the caller's check before a replay.
    """

    output: _T
    input_addresses: tuple[int, ...]

    @abstractmethod
    def replay(self) -> None:
        """Queue the recorded work again on the current stream; the caller has filled the inputs in place.

        Raises ``RuntimeError`` after :meth:`release`.
        """

    @abstractmethod
    def release(self) -> None:
        """Give the recording's memory back to its pool. Idempotent."""


class GraphBackend(ABC):
    """What a ``graph_backend`` factory returns: one per worker process."""

    @abstractmethod
    def refuse(self) -> str | None:
        """Reason why nothing can be captured just now, or None."""

    @abstractmethod
    def capture(self, run: Callable[[], _T], inputs: Sequence[torch.Tensor], pool: Any) -> CapturedGraph[_T]:
        """Call ``run`` once while recording. ``inputs`` keep their addresses for the recording's lifetime.

        ``pool`` is the platform's ``graph_pool()``: memory that ``run`` takes comes from it and stays in it. ``run``
        must not wait for the device, read device values on the host or depend on host values that change between
        steps. Raises ``RuntimeError`` naming the fault when it does, and when :meth:`refuse` has a reason; whatever
        ``run`` raises passes unchanged. Either way nothing stays recorded.
        """
