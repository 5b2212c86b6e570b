"""Where the computation of a request begins: after its cached prefix and what comes from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint_scheduling.kv_cache.coordinator import PrefixHit
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Start:
    """``num_computed`` tokens need no computation: those of ``hit``, then ``num_external`` (R3.70).

    ``asynchronous``: the external ones arrive later. ``num_allocated``: tokens for which the request has its blocks
    already, from a load that ended. ``num_local``: how much of the computed part was cached.
    """

    hit: PrefixHit
    num_external: int
    asynchronous: bool = False
    num_allocated: int = 0
    num_local: int = 0

    @property
    def num_computed(self) -> int:
        return self.hit.num_tokens + self.num_external


def merge(hit: PrefixHit, num_external: int, asynchronous: bool) -> Start:
    """A cached prefix may end inside a block, where external tokens can only follow whole blocks (R3.64).

    ``num_external`` counts from the end of the last whole block. External tokens that reach further than the partial
    block replace it, so nothing is copied only to be overwritten; those that do not are not loaded at all.
    """
    tail = hit.num_tail_tokens
    if tail == 0:
        return Start(hit, num_external, asynchronous and num_external > 0, num_local=hit.num_tokens)
    if num_external > tail:
        whole = hit.without_tail()
        return Start(whole, num_external, asynchronous, num_local=whole.num_tokens)
    return Start(hit, 0, num_local=hit.num_tokens)


def find_start(state: SchedulerState, request: LiveRequest) -> Start | None:
    """None while an extension cannot tell. At least one token is left to compute (R3.91).

    Nothing is looked up for a request that has computed tokens, as after a load (R3.63). One whose load brought too
    little to go on from is computed from its cached prefix on, since the same load might do so again.
    """
    kv = state.kv
    arrival = state.loads.arrived.get(request.request_id)
    if arrival is not None:
        return Start(
            kv.no_hit(), arrival.num_computed, num_allocated=arrival.num_allocated, num_local=arrival.num_local
        )
    if not request.reads_prefix_cache:
        return Start(kv.no_hit(), 0)
    hit = kv.find_prefix(request.block_hashes, request.num_tokens)
    if not state.extensions.external or request.request_id in state.loads.incomplete:
        return Start(hit, 0, num_local=hit.num_tokens)
    aligned = hit.num_tokens - hit.num_tail_tokens
    match = state.extensions.match_external(request, aligned)
    if match is None:
        return None
    num_external = max(min(match.num_tokens, request.num_tokens - 1 - aligned), 0)
    return merge(hit, num_external, match.asynchronous)
