"""Plugin ``scheduling_policy.v1 fair_share``: tenants get computed tokens in proportion to their weights.

Every tenant has a virtual time, the tokens computed for it divided by its weight; the tenant whose is lowest is served
next, first come, first served within it. A tenant that had nothing waiting starts at the time the others have reached,
so that nobody saves up credit by being idle (start-time fair queueing).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from hardpoint.interfaces import PluginContext, RequestQueue, RequestView, SchedulingPolicy, plugin
from hardpoint_scheduling.schedulers.policies.tenants import TenantQueue, TenantTimes


class FairShareOptions(BaseModel):
    """Options of ``fair_share``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: dict[str, PositiveFloat] = Field(
        default={}, description="share of each tenant; twice the weight, twice the tokens"
    )
    default_weight: PositiveFloat = Field(
        default=1.0, description="share of a tenant that 'weights' does not name, and of requests without one"
    )


class FairSharePolicy(SchedulingPolicy):
    """Charges what is computed, prompt and output alike; tokens found in a cache are free."""

    def __init__(self, options: FairShareOptions) -> None:
        self._times = TenantTimes(options.weights, options.default_weight)

    def create_queue(self) -> RequestQueue:
        return TenantQueue(self._times)

    def precedes(self, held: RequestView, waiting: RequestView) -> bool:
        """At equal times whoever was held back came before."""
        return self._times.of(held.record.tenant) <= self._times.of(waiting.record.tenant)

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The latest admission of the tenant that had most, but never the first of all while there is another.

        Times rise with every token, recomputed ones too, so tenants could preempt one another in turn for ever; the
        request that has run longest is left to its end.
        """
        of = self._times.of
        chosen = running[-1]
        for request in reversed(running[1:]):
            if of(request.record.tenant) > of(chosen.record.tenant):
                chosen = request
        return chosen

    def on_scheduled(self, request: RequestView, num_tokens: int) -> None:
        self._times.charge(request.record.tenant, num_tokens)

    def on_finished(self, request: RequestView) -> None:
        self._times.leave(request.record.tenant)


@plugin("scheduling_policy", options=FairShareOptions)
def create(ctx: PluginContext, options: FairShareOptions) -> SchedulingPolicy:
    """Entry point ``fair_share``."""
    del ctx
    return FairSharePolicy(options)
