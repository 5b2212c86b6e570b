"""New requests: refused when they can never run or there is no room to wait, else queued."""

from __future__ import annotations

from hardpoint.errors import InvalidRequestError, OverloadedError
from hardpoint.interfaces import EngineOutput, EngineRequest, FinishReason
from hardpoint_scheduling.kv_cache.encoder_cache import EncoderItem
from hardpoint_scheduling.schedulers.admission import Admission
from hardpoint_scheduling.schedulers.request import LiveRequest, Milestone
from hardpoint_scheduling.schedulers.state import SchedulerState


class Intake:
    """Turns records into live requests (R1.1)."""

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission

    def add(self, record: EngineRequest) -> EngineOutput | None:
        """The terminal output of a request that can never run. Raises as ``Scheduler.add`` says."""
        state = self._state
        self._check_one_step(record)
        if record.request_id in state.live or state.kv.holds(record.request_id):
            raise ValueError(f"request {record.request_id} is already live or still holds blocks")
        if record.features:
            state.expect_media()
        refusal = self._refusal(record)
        if refusal is not None:
            return refusal
        if self._queue_is_full():
            raise OverloadedError(
                f"{state.num_waiting} requests wait already and --max-waiting allows {state.limits.max_waiting}; "
                "retry later or raise it"
            )
        live = LiveRequest(record, self._length_limit(record), state.hasher if state.kv.prefix_caching else None)
        if (fault := self._draft_fault(live)) is not None:
            return EngineOutput(record.request_id, [], FinishReason.ERROR, error=fault)
        live.note(Milestone.QUEUED, state.clock())
        state.live[record.request_id] = live
        state.extensions.on_added(live)
        self._admission.enqueue(live)
        return None

    def _check_one_step(self, record: EngineRequest) -> None:
        """Raises ``InvalidRequestError`` for a prompt that has to be computed at once and fits no step."""
        length, limits = len(record.prompt_token_ids), self._state.limits
        scheduled = limits.max_scheduled_tokens
        most = limits.max_num_batched_tokens if scheduled is None else scheduled
        if self._state.kv.needs_whole_prompts and length > most:
            raise InvalidRequestError(
                f"the prompt has {length} tokens and is computed in one step; --max-num-batched-tokens allows {most}",
                param="prompt",
                code="context_length_exceeded",
            )

    def _queue_is_full(self) -> bool:
        """Requests that the next step can take to a free slot do not count as waiting."""
        state = self._state
        limit = state.limits.max_waiting
        return limit is not None and state.num_waiting >= limit + state.table.num_free

    def _refusal(self, record: EngineRequest) -> EngineOutput | None:
        """The terminal output of a request that could never produce a token."""
        length = len(record.prompt_token_ids)
        if length == 0:
            return EngineOutput(record.request_id, [], FinishReason.ERROR, error="the prompt has no tokens")
        pools = record.task != "generate"
        wanted = None if pools else record.sampling.max_tokens
        most = self._state.limits.max_model_len - (not pools)
        too_long = length > most or length > self._state.kv.largest_sequence
        if too_long or (wanted is not None and wanted <= 0):
            return EngineOutput(record.request_id, [], FinishReason.LENGTH)
        fault = self._encoder_fault(record)
        if fault is None and self._state.encoder is not None:
            fault = self._state.encoder.refusal(record, at_once=not self._state.limits.chunked_prefill)
        return None if fault is None else EngineOutput(record.request_id, [], FinishReason.ERROR, error=fault)

    def _draft_fault(self, request: LiveRequest) -> str | None:
        """R3.31: what drafts leave of the input budget must hold a token, or the request would wait for ever."""
        state = self._state
        most = state.limits.max_num_batched_tokens
        if not state.extensions.lookahead or state.limits.max_scheduled_tokens is None:
            return None
        drafts = state.extensions.num_lookahead_tokens(request)
        short = f"{drafts} draft tokens leave no room in max_num_batched_tokens ({most}); raise it, or draft fewer"
        return short if drafts >= most else None

    def _encoder_fault(self, record: EngineRequest) -> str | None:
        """R1.34: layers that attend to an encoder's output have blocks for so much of it and no more."""
        most = self._state.kv.max_encoder_tokens
        if most is None:
            return None
        given = sum(EncoderItem.of(feature).num_embeddings for feature in record.features)
        return f"{given} encoder tokens were given, the model takes at most {most}" if given > most else None

    def _length_limit(self, record: EngineRequest) -> int:
        """Sequence length at which the request ends.

        Bounded by what the pool holds for one sequence, so that a request alone can always go on. The last token
        needs no KV: nothing follows it. A prompt that is pooled is never continued, so nothing may cut it short.
        """
        if record.task != "generate":
            return len(record.prompt_token_ids) + 1
        longest = min(self._state.limits.max_model_len, self._state.kv.largest_sequence + 1)
        if record.sampling.max_tokens is None:
            return longest
        return min(longest, len(record.prompt_token_ids) + record.sampling.max_tokens)
