"""The scheduler's record of one live request."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import BlockHash, EngineRequest, Feature, FinishReason, TokenLogprobs
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher
from hardpoint_scheduling.schedulers.slots import SlotTable
from hardpoint_scheduling.views import ReadOnlyView


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. Everything from ``STOPPED`` on is final: one comparison decides (R1.5)."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KV = 2
    WAITING_FOR_STREAMING_INPUT = 3
    RUNNING = 4
    PREEMPTED = 5
    STOPPED = 6
    LENGTH_CAPPED = 7
    ABORTED = 8
    IGNORED = 9
    FAILED = 10

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.STOPPED

    @property
    def is_blocked(self) -> bool:
        """Waiting for something other than its turn (R3.2)."""
        return RequestStatus.WAITING < self < RequestStatus.RUNNING

    @property
    def finish_reason(self) -> FinishReason:
        """What front ends are told. Raises ``RuntimeError`` for a state that is not final."""
        if not self.is_finished:
            raise RuntimeError(f"a request that is {self.name} has no finish reason; only a finished one has")
        return _FINISH_REASON[self]


_FINISH_REASON: Mapping[RequestStatus, FinishReason] = {
    RequestStatus.STOPPED: FinishReason.STOP,
    RequestStatus.LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.ABORTED: FinishReason.ABORT,
    RequestStatus.IGNORED: FinishReason.LENGTH,
    RequestStatus.FAILED: FinishReason.ERROR,
}

FINAL_STATUS: Mapping[FinishReason, RequestStatus] = {
    FinishReason.STOP: RequestStatus.STOPPED,
    FinishReason.LENGTH: RequestStatus.LENGTH_CAPPED,
    FinishReason.ABORT: RequestStatus.ABORTED,
    FinishReason.ERROR: RequestStatus.FAILED,
}
"""Final state of a request that ran or could have; one refused for its length is ``IGNORED``."""

_FINAL = frozenset(_FINISH_REASON)
_WAITS = frozenset(status for status in RequestStatus if status.is_blocked) | {RequestStatus.WAITING}

_NEXT_STATUS: Mapping[RequestStatus, frozenset[RequestStatus]] = {
    # One wait may follow another: for a grammar, then for KV on its way, then for a turn.
    **{status: _WAITS | _FINAL | {RequestStatus.RUNNING} for status in _WAITS},
    # KV may be on its way to a request that was preempted before; it comes back as what it was.
    RequestStatus.WAITING_FOR_REMOTE_KV: _WAITS | _FINAL | {RequestStatus.RUNNING, RequestStatus.PREEMPTED},
    # A session whose input ran dry waits for more without being preempted.
    RequestStatus.RUNNING: _FINAL | {RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_STREAMING_INPUT},
    RequestStatus.PREEMPTED: _FINAL | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV},
}


class Milestone(enum.Enum):
    """What happens to a request on its way, for traces."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"


@dataclass(frozen=True, slots=True)
class LifecycleEvent:
    """``time`` is in seconds on the scheduler's clock."""

    milestone: Milestone
    time: float


class LiveRequest:
    """One sequence from ``add`` to its terminal output. Implements ``RequestView`` for extensions and policies.

    All tokens live in one growing int32 array, so the outputs are a window of it and can never disagree with it. While
    the request owns a slot, its counters are in the :class:`SlotTable`; ``append`` alone does not update them. Without
    a slot nothing of it is computed; what steps scheduled before may still bring is counted in ``num_stale_tokens``.

    Requests compare by priority, arrival and id: the smaller one is served first (R1.13).

    Attributes:
        append: adds one token to the array (bound once: this runs for every token of every request).
        limit: length of the sequence at which it ends for reasons of length.
        slot: place in the workers' batch, None while waiting.
        num_cached_tokens: prefix hit of the first admission.
        num_stale_tokens: of the tokens in flight, those of steps that were scheduled before the last preemption.
        drops_stale: their results are thrown away rather than delivered; holds until they are all back (R3.80).
        prompt_logprobs: collected over prefill chunks; None when not asked for, or once the first output took them.
    """

    __slots__ = (
        "__weakref__",
        "_block_hashes",
        "_events",
        "_hasher",
        "_tokens",
        "append",
        "drops_stale",
        "first_scheduled_time",
        "has_output",
        "limit",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stale_tokens",
        "prompt_logprobs",
        "record",
        "request_id",
        "slot",
        "status",
        "stop_ids",
        "table",
    )

    def __init__(self, record: EngineRequest, limit: int, hasher: ChainedHasher | None = None) -> None:
        """Without a ``hasher`` there are no block hashes. Raises ``InvalidRequestError`` when embeddings or features do
        not fit the prompt (R1.4, R1.12)."""
        _check_positions(record)
        self.record = record
        self.request_id = record.request_id
        self._tokens = array("i", np.ascontiguousarray(record.prompt_token_ids, dtype=np.int32).tobytes())
        self.append: Callable[[int], None] = self._tokens.append
        self.num_prompt_tokens = len(self._tokens)
        self.limit = limit
        self.status = RequestStatus.WAITING
        self.slot: int | None = None
        self.table: SlotTable | None = None
        self._hasher = hasher
        self._block_hashes: list[BlockHash] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_stale_tokens = 0
        self.drops_stale = False
        self.first_scheduled_time: float | None = None
        self.has_output = False
        self._events: list[LifecycleEvent] = []
        sampling = record.sampling
        self.stop_ids = frozenset(sampling.stop_token_ids)
        wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt_logprobs else None

    def __lt__(self, other: LiveRequest) -> bool:
        return self.rank < other.rank

    @property
    def rank(self) -> tuple[int, float, str]:
        """Total order of requests: priority value, arrival, id."""
        return self.record.priority, self.record.arrival_time, self.request_id

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_tokens_with_drafts(self) -> int:
        """Known tokens and the guesses at what follows them."""
        return len(self._tokens) + self._counter("num_drafts")

    @property
    def num_output_tokens(self) -> int:
        return len(self._tokens) - self.num_prompt_tokens

    @property
    def pools(self) -> bool:
        """Whether the request ends with a pooled result of its prompt instead of tokens."""
        return self.record.task != "generate"

    @property
    def reads_prefix_cache(self) -> bool:
        """False while every prompt position has to be computed (R1.11). A task that pools needs them all, unless it was
        said to need the last one only."""
        needs_last_only = self.record.pooling is not None and self.record.pooling.pooling == "last"
        return self.prompt_logprobs is None and (not self.pools or needs_last_only)

    @property
    def num_computed_tokens(self) -> int:
        """Optimistic: work in flight counts as done."""
        return self._counter("computed")

    @property
    def num_placeholders(self) -> int:
        """Outputs of steps in flight: sampled tokens and the drafts before them."""
        return self._counter("placeholders")

    @property
    def num_in_flight_tokens(self) -> int:
        """Scheduled tokens of steps whose output is not processed, stale ones included."""
        return self._counter("in_flight") + self.num_stale_tokens

    @property
    def num_processed_tokens(self) -> int:
        """Computed by steps whose output is there; nothing can take these back (R3.77)."""
        return self._counter("computed") - self._counter("in_flight")

    @property
    def next_decode_step(self) -> int:
        """First step that may decode the request again (R3.42)."""
        return self._counter("next_decode_step")

    @property
    def last_step(self) -> int:
        """Fence number of the last step that scheduled the request since it got its slot, 0 for none."""
        return self._counter("last_step")

    @property
    def waits_for_stale_output(self) -> bool:
        """Whether tokens are still to be delivered that a new start would compute a second time (R3.62)."""
        return self.num_stale_tokens > 0 and not self.drops_stale

    @property
    def block_hashes(self) -> list[BlockHash]:
        """One chained hash per complete hash block of the known tokens (R1.8).

        Blocks that became full since are hashed now: hundreds of requests may fill one in the same step, but what
        reads the hashes can take its time.
        """
        if self._hasher is not None:
            self._hasher.extend(self.record, self._tokens, self._block_hashes)
        return self._block_hashes

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and outputs, read-only."""
        return ReadOnlyView(self._tokens)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return ReadOnlyView(self._tokens, self.num_prompt_tokens)

    @property
    def tokens(self) -> array[int]:
        """The array itself, for hashing; not to be written."""
        return self._tokens

    def copy_tokens(self) -> np.ndarray:
        """int32 copy of all known tokens."""
        return np.array(self._tokens, dtype=np.int32)

    def move_to(self, status: RequestStatus) -> None:
        """Raises ``RuntimeError`` for a transition the state machine does not have, above all out of a final state."""
        if status not in _NEXT_STATUS.get(self.status, frozenset()):
            raise RuntimeError(f"request {self.request_id} cannot go from {self.status.name} to {status.name}")
        self.status = status

    def note(self, milestone: Milestone, time: float) -> None:
        self._events.append(LifecycleEvent(milestone, time))

    def take_events(self) -> list[LifecycleEvent]:
        """What happened since the last call (R1.14)."""
        events, self._events = self._events, []
        return events

    def settle_stale(self, num_tokens: int) -> None:
        """The output of ``num_tokens`` stale tokens is back (R3.79)."""
        self.num_stale_tokens -= num_tokens
        if self.num_stale_tokens == 0:
            self.drops_stale = False

    def stop_reason_of(self, token: int) -> tuple[bool, int | None]:
        """Whether ``token`` ends the sequence once ``min_tokens`` are exceeded, and the stop id to report.

        An end-of-sequence token reports None.
        """
        if token in self.record.eos_token_ids and not self.record.sampling.ignore_eos:
            return True, None
        return token in self.stop_ids, token if token in self.stop_ids else None

    def _counter(self, column: str) -> int:
        return int(getattr(self.table, column)[self.slot]) if self.table is not None else 0


def hash_full_blocks(hasher: ChainedHasher, requests: Sequence[LiveRequest]) -> list[list[BlockHash]]:
    """``block_hashes`` of many requests at once."""
    hashes = [request._block_hashes for request in requests]
    hasher.extend_many([request.record for request in requests], [request.tokens for request in requests], hashes)
    return hashes


def _check_positions(record: EngineRequest) -> None:
    """What is raised goes to whoever sent the request, beside it, and who never saw the id that the engine gave it."""
    length = len(record.prompt_token_ids)
    if record.prompt_embeds is not None and len(record.prompt_embeds) != length:
        raise InvalidRequestError(
            f"the prompt has {len(record.prompt_embeds)} rows of prompt embeddings for {length} tokens; "
            "give as many placeholder ids as rows"
        )
    start = 0
    for feature in record.features:
        if feature.num_encoder_tokens is not None and feature.num_encoder_tokens < 0:
            raise InvalidRequestError(
                f"the item at {feature.offset} has {feature.num_encoder_tokens} encoder tokens; there cannot be fewer "
                "than none"
            )
        if feature.offset < start or feature.length < 0 or feature.offset + feature.length > length:
            raise InvalidRequestError(
                f"the item at {feature.offset} with {feature.length} positions does not lie within positions {start} "
                f"to {length}; items must be in prompt order and apart from each other"
            )
        _check_names(feature)
        start = feature.offset + feature.length


def _check_names(feature: Feature) -> None:
    """They are hashed with the blocks of the item, long after the request was taken."""
    try:
        (feature.content_hash + feature.modality).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"content_hash or modality of the item at {feature.offset} holds unpaired surrogates, which are not text"
        ) from None
