"""Seats of features in the runner (R4.20): each is independent of the others, and any may be absent.

What a feature keeps per request is a :class:`StatePart`: it sees requests enter and slots become free, in the order of
the state update. One that also acts around the forward is a :class:`RunnerExtension`: adapters choose what is active,
connectors load and save KV, encoders fill in what they computed.
"""

from __future__ import annotations

from typing import Any, Protocol

from hardpoint.interfaces.request import Int32Array
from hardpoint.interfaces.step import NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["RunnerExtension", "StatePart"]


class StatePart(Protocol):
    """State by slot."""

    def enter(self, row: NewRow) -> None:
        """A request takes ``row.slot``; what the slot held before is void."""

    def release(self, slots: Int32Array) -> None:
        """Finished or preempted; never an error for a slot that holds nothing."""


class RunnerExtension:
    """Override what is needed. ``name`` keys the payloads in ``SchedulerOutput.extensions`` and
    ``RunnerOutput.extensions``."""

    name: str = ""

    def enter(self, row: NewRow) -> None:
        """See :class:`StatePart`; after the KV blocks were copied and cleared."""

    def release(self, slots: Int32Array) -> None:
        """See :class:`StatePart`; before anything else of the step."""

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        """The inputs are ready. Not called for steps without tokens."""

    def finish_step(self, step: SchedulerOutput) -> Any | None:
        """What the step's output carries for this feature, msgpack-able, or None; also for steps without tokens.

        Called once per step, after its forward was submitted.
        """
        return None
