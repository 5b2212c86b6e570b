"""Routes engine frames to request states, finds what the engine must stop, and reports what happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hardpoint.engine.core import ERROR_CODE
from hardpoint.engine.input_processor import ProcessedRequest
from hardpoint.engine.output_state import MAX_UNREAD_LOGPROBS, LogprobTexts, RequestState, SequenceState
from hardpoint.errors import HardpointError, as_raised
from hardpoint.interfaces.request import EngineOutput, EngineOutputs, FinishReason, OutputKind
from hardpoint.interfaces.stat_logger import RequestFinished, StepObserved, TokensEmitted
from hardpoint.interfaces.tokenizer import Tokenizer

_logger = logging.getLogger("hardpoint.engine")
StatEvent = StepObserved | TokensEmitted | RequestFinished


@dataclass(slots=True)
class _Tally:
    """Figures of one frame."""

    now: float
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


class OutputProcessor:
    """``observe`` receives every statistics event; it must not raise."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_name: str,
        *,
        observe: Callable[[StatEvent], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._texts = LogprobTexts(tokenizer)
        self._observe = observe or (lambda event: None)
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, SequenceState] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences without a terminal event."""
        return len(self._sequences)

    def add(self, processed: ProcessedRequest, notify: Callable[[], None] = lambda: None) -> RequestState:
        state = RequestState(processed, self._tokenizer, self._texts, notify)
        self._requests[processed.request_id] = state
        self._sequences.update((sequence.request_id, sequence) for sequence in state.sequences)
        return state

    def process(self, batch: EngineOutputs) -> list[str]:
        """Apply one frame; returns engine request ids to abort because the front end ended them."""
        tally = _Tally(self._clock())
        aborts = []
        touched: dict[str, RequestState] = {}
        for output in batch.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # It ended here first; the engine's own end of it is on the way.
            touched[sequence.parent.processed.request_id] = sequence.parent
            self._apply(sequence, output, tally)
            if sequence.finish_reason is not None:
                self._close(sequence)
                if output.finish_reason is None:
                    aborts.append(output.request_id)
        for state in touched.values():
            state.notify()
        self._report(batch, tally)
        return aborts

    def abort(self, request_id: str) -> list[str]:
        """End a request whose reader is gone; returns the engine request ids to abort."""
        state = self._requests.get(request_id)
        return self._end(state, FinishReason.ABORT, None) if state is not None else []

    def fail_all(self, failure: Callable[[], HardpointError]) -> None:
        """The engine is gone: every waiting reader gets its own exception."""
        for state in list(self._requests.values()):
            self._end(state, FinishReason.ERROR, failure())

    def _end(self, state: RequestState, reason: FinishReason, failure: HardpointError | None) -> list[str]:
        state.failure = failure
        ended = state.unfinished()
        for sequence in ended:
            sequence.finish(reason)
            self._close(sequence)
        state.notify()
        return [sequence.request_id for sequence in ended]

    def _apply(self, sequence: SequenceState, output: EngineOutput, tally: _Tally) -> None:
        state = sequence.parent
        try:
            used = sequence.apply(output)
            for raw in output.prompt_logprobs or ():
                state.prompt_logprobs.append(None if raw is None else self._texts.position(raw))
        except Exception:
            _logger.exception("request %s: its output could not be turned into text", output.request_id)
            self._end_sequence(sequence, "the output could not be decoded")
            return
        state.first_scheduled = state.first_scheduled or output.first_scheduled_time
        state.pooled = output.pooled if output.pooled is not None else state.pooled
        state.extensions.update(output.extensions)
        state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
        if output.error is not None:
            state.error = output.error
            state.failure = as_raised(output.extensions.get(ERROR_CODE, ""), output.error)
        if used or output.pooled is not None:
            self._count(state, used, tally)
        is_read_by_parts = state.processed.params.output_kind is OutputKind.DELTA
        if is_read_by_parts and sequence.num_unread_logprobs > MAX_UNREAD_LOGPROBS:
            self._end_sequence(sequence, "the output was read too slowly")

    def _end_sequence(self, sequence: SequenceState, error: str) -> None:
        sequence.finish(FinishReason.ERROR)
        sequence.parent.error = error

    def _count(self, state: RequestState, used: int, tally: _Tally) -> None:
        tally.num_generated_tokens += used
        if state.first_token is None or state.last_token is None:
            state.first_token = tally.now
            tally.num_prompt_tokens += len(state.processed.prompt_token_ids)
            tally.ttft_s.append(max(tally.now - state.processed.arrival_time, 0.0))
        else:
            tally.inter_token_s.append((tally.now - state.last_token) / used)
        state.last_token = tally.now

    def _close(self, sequence: SequenceState) -> None:
        self._sequences.pop(sequence.request_id, None)
        state = sequence.parent
        if state.finished or state.unfinished():
            return
        state.ended = self._clock()
        del self._requests[state.processed.request_id]
        reasons = [one.finish_reason for one in state.sequences if one.finish_reason is not None]
        reason = FinishReason.ERROR if FinishReason.ERROR in reasons else reasons[0]
        self._observe(state.summary(self._model_name, reason))

    def _report(self, batch: EngineOutputs, tally: _Tally) -> None:
        if batch.stats is not None:
            counts = (tally.num_prompt_tokens, tally.num_generated_tokens, len(self._requests))
            self._observe(StepObserved(self._model_name, batch.stats, *counts, batch.timestamp))
        if tally.num_generated_tokens:
            self._observe(TokensEmitted(self._model_name, tuple(tally.ttft_s), tuple(tally.inter_token_s)))
