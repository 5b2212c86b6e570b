"""Plugin ``scheduling_policy.v1 priority``: by the requests' own priority, then by arrival."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.interfaces import NoOptions, PluginContext, RequestQueue, RequestView, SchedulingPolicy, plugin
from hardpoint_scheduling.schedulers.queues import OrderedQueue, Rank


def rank(request: RequestView) -> Rank:
    """A total order, lower is served first: priority value, arrival time, id (R1.13)."""
    record = request.record
    return record.priority, record.arrival_time, record.request_id


class PriorityPolicy(SchedulingPolicy):
    """The better head of the two queues is tried first (R3.5); the worst of those running makes room (R3.48)."""

    def create_queue(self) -> RequestQueue:
        return OrderedQueue(rank)

    def precedes(self, held: RequestView, waiting: RequestView) -> bool:
        return rank(held) < rank(waiting)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return max(running, key=rank)


@plugin("scheduling_policy")
def create(ctx: PluginContext, options: NoOptions) -> SchedulingPolicy:
    """Entry point ``priority``."""
    del ctx, options
    return PriorityPolicy()
