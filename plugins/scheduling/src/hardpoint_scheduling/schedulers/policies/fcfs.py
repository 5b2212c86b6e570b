"""Plugin ``scheduling_policy.v1 fcfs``: first come, first served; who came last makes room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hardpoint.interfaces import NoOptions, PluginContext, RequestQueue, RequestView, SchedulingPolicy, plugin
from hardpoint_scheduling.schedulers.queues import FifoQueue


class FcfsPolicy(SchedulingPolicy):
    """Whoever was held back came before those that wait (R3.5); the victim is the last of the running list (R3.48)."""

    picks_last: ClassVar[bool] = True

    def create_queue(self) -> RequestQueue:
        return FifoQueue()

    def precedes(self, held: RequestView, waiting: RequestView) -> bool:
        del held, waiting
        return True

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[-1]


@plugin("scheduling_policy")
def create(ctx: PluginContext, options: NoOptions) -> SchedulingPolicy:
    """Entry point ``fcfs``."""
    del ctx, options
    return FcfsPolicy()
