"""Who holds blocks without a slot: requests whose KV comes, or came, from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.schedulers.request import LiveRequest


@dataclass(frozen=True, slots=True)
class Load:
    """A transfer that fills the blocks of ``num_external`` tokens, which follow ``num_local`` found in the cache."""

    request: LiveRequest
    num_local: int
    num_external: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request has once its transfer ended: the KV of ``num_computed`` tokens, ``num_local`` of them cached, in
    blocks for ``num_allocated``, which are more where a part did not arrive.
    """

    num_computed: int
    num_local: int
    num_allocated: int


@dataclass(slots=True)
class Loads:
    """Attributes:
    under_way: transfers of live requests. They are in no queue, since only the transfer's end moves them on.
    arrived: requests back in a queue with their blocks.
    orphaned: requests that ended during their transfer, which still writes their blocks.
    incomplete: requests back in a queue without blocks, since too little arrived to go on from; until they are admitted
        nothing is loaded for them again.
    """

    under_way: dict[str, Load] = field(default_factory=dict)
    arrived: dict[str, Arrival] = field(default_factory=dict)
    orphaned: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)

    def requests(self) -> Iterator[LiveRequest]:
        """Those in no queue."""
        return (load.request for load in self.under_way.values())

    def holders(self) -> set[str]:
        """Ids of all that hold blocks here."""
        return {*self.under_way, *self.arrived, *self.orphaned}

    def drop(self, request_id: str, kv: KVCoordinator) -> None:
        """The request ended. Its blocks are free at once, unless a transfer still writes them."""
        self.incomplete.discard(request_id)
        if self.arrived.pop(request_id, None) is not None:
            kv.free(request_id)
        elif self.under_way.pop(request_id, None) is not None:
            self.orphaned.add(request_id)

    def give_up_arrived(self, kv: KVCoordinator) -> None:
        """Free what has arrived, as a reset of the cache wants it; it is computed or loaded again."""
        for request_id in list(self.arrived):
            self.drop(request_id, kv)
