"""What the parts of a scheduler share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hardpoint.interfaces import EngineOutput, PauseMode, SchedulerLimits, SchedulerOutput, SchedulingPolicy
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher
from hardpoint_scheduling.kv_cache.hit_window import HitWindow
from hardpoint_scheduling.schedulers.encoder_inputs import EncoderPlanner
from hardpoint_scheduling.schedulers.extensions import ExtensionHost
from hardpoint_scheduling.schedulers.fences import Fences
from hardpoint_scheduling.schedulers.loads import Loads
from hardpoint_scheduling.schedulers.plan import StepPlan
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
    recent_hits: HitWindow = field(default_factory=HitWindow)
    next_step_id: int = 0


@dataclass(slots=True)
class SchedulerState:
    """Owned by the scheduler, changed by its collaborators.

    Attributes:
        live: id to request, the sole truth about who is live (R3.1).
        charges: whether the policy wants to hear of scheduled tokens.
        waiting: requests that can be admitted. skipped: requests that something holds back.
        returning: ids of preempted requests that wait to run again.
        loads: requests whose KV is on its way from elsewhere, and their blocks.
        encoder: plans encoders; None where the limits give them no budget and no layer attends to their output.
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
    charges: bool = field(init=False)
    waiting: LiveQueue = field(init=False)
    skipped: LiveQueue = field(init=False)
    running: RunningList = field(default_factory=RunningList)
    returning: set[str] = field(default_factory=set)
    loads: Loads = field(default_factory=Loads)
    encoder: EncoderPlanner | None = field(init=False)
    inflight: deque[InflightStep] = field(default_factory=deque)
    fences: Fences = field(init=False)
    counters: Counters = field(default_factory=Counters)
    ended: list[EngineOutput] = field(default_factory=list)
    finished_slots: list[int] = field(default_factory=list)
    preempted_slots: list[int] = field(default_factory=list)
    held_blocks: set[str] = field(default_factory=set)
    pause: PauseMode = PauseMode.NONE

    def __post_init__(self) -> None:
        self.charges = type(self.policy).on_scheduled is not SchedulingPolicy.on_scheduled
        self.waiting, self.skipped = live_queue(self.policy), live_queue(self.policy)
        self.encoder = self._plan_encoders()
        loads = bool(self.extensions.external or self.extensions.holding)
        self.fences = Fences(enabled=loads and self.limits.max_inflight_steps > 1)

    def _plan_encoders(self) -> EncoderPlanner | None:
        """Where layers attend to an encoder's output there is one, so without limits it gets as much as a step has
        tokens, and room for the longest input at least."""
        limits, longest = self.limits, self.kv.max_encoder_tokens
        budget, room = limits.encoder_budget, limits.encoder_cache_size
        if not budget and longest is not None:
            budget = room = max(longest, limits.max_num_batched_tokens)
        return EncoderPlanner(budget, room, limits.max_num_seqs, self.step_tokens) if budget else None

    @property
    def step_tokens(self) -> int:
        """Most that a step computes."""
        scheduled = self.limits.max_scheduled_tokens
        return self.limits.max_num_batched_tokens if scheduled is None else scheduled

    def expect_media(self) -> None:
        """A request brings items for encoders. Without limits these get as much as a step has tokens, or the longest
        prompt: an item has no more embeddings than its prompt has positions, so none is too large."""
        if self.encoder is None:
            most = max(self.limits.max_model_len, self.limits.max_num_batched_tokens)
            self.encoder = EncoderPlanner(most, most, self.limits.max_num_seqs, self.step_tokens)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.skipped) + len(self.loads.under_way)

    @property
    def active_cap(self) -> int:
        """Most requests that may run at once (R3.3)."""
        cap = self.limits.max_num_active_seqs
        return self.limits.max_num_seqs if cap is None else cap

    @property
    def expects_drafts(self) -> bool:
        """Whether steps are planned with guesses that are still on the worker."""
        return self.limits.max_inflight_steps > 1 and bool(self.extensions.drafting)

    @property
    def decode_interval(self) -> int:
        """Steps from one decode of a request to its next, so that stages pass tokens round in time (R3.42)."""
        return self.limits.num_pipeline_stages if self.limits.max_inflight_steps > 1 else 1

    def start_plan(self) -> StepPlan:
        """A new step with whole budgets (R3.31); paused wholly, with none (R3.33)."""
        limits = self.limits
        step_id = self.counters.next_step_id
        self.counters.next_step_id += 1
        return StepPlan(
            step_id=step_id,
            budget=0 if self.pause is PauseMode.ALL else self.step_tokens,
            input_budget=limits.max_num_batched_tokens,
            num_groups=self.kv.num_groups,
            prefill_cap=self._prefill_cap(),
            appends_drafts=limits.max_scheduled_tokens is not None and bool(self.extensions.lookahead),
        )

    def _prefill_cap(self) -> int | None:
        """Most new tokens of one request in this step, None without a cap (R3.32): alone, nobody is starved."""
        threshold, eligible = self.limits.long_prefill_threshold, len(self.running) + self.num_waiting
        if threshold <= 0 or eligible < 2:
            return None
        if self.limits.adaptive_prefill_threshold:
            return max(threshold, self.limits.max_num_batched_tokens // eligible)
        return threshold
