"""What the parts of a scheduler share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hardpoint.interfaces import EngineOutput, PauseMode, SchedulerLimits, SchedulerOutput, SchedulingPolicy
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher
from hardpoint_scheduling.schedulers.extensions import ExtensionHost
from hardpoint_scheduling.schedulers.fences import Fences
from hardpoint_scheduling.schedulers.queues import LiveQueue, RunningList, live_queue
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.slots import SlotTable


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step between ``schedule`` and ``update`` with the requests behind its rows."""

    step: SchedulerOutput
    rows: list[LiveRequest]


@dataclass(slots=True)
class Counters:
    """Cumulative figures for :class:`SchedulerStats`."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    next_step_id: int = 0


@dataclass(slots=True)
class SchedulerState:
    """Owned by the scheduler, changed by its collaborators.

    Attributes:
        live: id to request, the sole truth about who is live (R3.1).
        waiting: requests that can be admitted. skipped: requests that something holds back.
        ended: terminal outputs that arose while scheduling, delivered with the next update.
        held_blocks: ended requests whose blocks an extension still needs.
        finished_slots, preempted_slots: slots the workers have to drop, reported once.
    """

    limits: SchedulerLimits
    kv: KVCoordinator
    hasher: ChainedHasher
    extensions: ExtensionHost
    table: SlotTable
    policy: SchedulingPolicy
    clock: Callable[[], float]
    live: dict[str, LiveRequest] = field(default_factory=dict)
    waiting: LiveQueue = field(init=False)
    skipped: LiveQueue = field(init=False)
    running: RunningList = field(default_factory=RunningList)
    inflight: deque[InflightStep] = field(default_factory=deque)
    fences: Fences = field(default_factory=Fences)
    counters: Counters = field(default_factory=Counters)
    ended: list[EngineOutput] = field(default_factory=list)
    finished_slots: list[int] = field(default_factory=list)
    preempted_slots: list[int] = field(default_factory=list)
    held_blocks: set[str] = field(default_factory=set)
    pause: PauseMode = PauseMode.NONE

    def __post_init__(self) -> None:
        self.waiting, self.skipped = live_queue(self.policy), live_queue(self.policy)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.skipped)

    @property
    def active_cap(self) -> int:
        """Most requests that may run at once (R3.3)."""
        cap = self.limits.max_num_active_seqs
        return self.limits.max_num_seqs if cap is None else cap

    def prefill_cap(self) -> int | None:
        """Most new tokens of one request in this step, None without a cap (R3.32): alone, nobody is starved."""
        threshold = self.limits.long_prefill_threshold
        if threshold <= 0 or len(self.running) + self.num_waiting < 2:
            return None
        return threshold
