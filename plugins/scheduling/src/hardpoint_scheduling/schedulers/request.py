"""The scheduler's record of one live request."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hardpoint.interfaces import BlockHash, EngineRequest, FinishReason, TokenLogprobs
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


class LiveRequest:
    """One sequence from ``add`` to its terminal output. Implements ``RequestView`` for extensions.

    All tokens live in one growing int32 array, so the outputs are a window of it and can never disagree with it. While
    the request owns a slot, its counters are in the :class:`SlotTable`; ``append`` alone does not update them.

    Attributes:
        append: adds one token to the array (bound once: this runs for every token of every request).
        limit: length of the sequence at which it ends for reasons of length.
        slot: place in the workers' batch, None while waiting.
        block_hashes: one chained hash per complete hash block of the known tokens.
        num_cached_tokens: prefix hit of the first admission.
        prompt_logprobs: collected over prefill chunks; None when not asked for, or once the first output took them.
    """

    __slots__ = (
        "_tokens",
        "append",
        "block_hashes",
        "first_scheduled_time",
        "has_output",
        "limit",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prompt_logprobs",
        "record",
        "request_id",
        "slot",
        "status",
        "stop_ids",
        "table",
    )

    def __init__(self, record: EngineRequest, limit: int) -> None:
        self.record = record
        self.request_id = record.request_id
        self._tokens = array("i", np.ascontiguousarray(record.prompt_token_ids, dtype=np.int32).tobytes())
        self.append: Callable[[int], None] = self._tokens.append
        self.num_prompt_tokens = len(self._tokens)
        self.limit = limit
        self.status = RequestStatus.WAITING
        self.slot: int | None = None
        self.table: SlotTable | None = None
        self.block_hashes: list[BlockHash] = []
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.has_output = False
        sampling = record.sampling
        self.stop_ids = frozenset(sampling.stop_token_ids)
        wants_prompt_logprobs = sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wants_prompt_logprobs else None

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self._tokens) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """False while every prompt position has to be computed (R1.11)."""
        return self.prompt_logprobs is None

    @property
    def num_computed_tokens(self) -> int:
        return int(self.table.computed[self.slot]) if self.table is not None else 0

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

    def stop_reason_of(self, token: int) -> tuple[bool, int | None]:
        """Whether ``token`` ends the sequence once ``min_tokens`` are exceeded, and the stop id to report.

        An end-of-sequence token reports None.
        """
        if token in self.record.eos_token_ids and not self.record.sampling.ignore_eos:
            return True, None
        return token in self.stop_ids, token if token in self.stop_ids else None
