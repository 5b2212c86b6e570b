"""What the front end knows of one request: collects engine outputs, hands out what the reader has not seen.

The reader takes snapshots, nothing is queued: however late it reads, a request costs its own tokens and no more.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.engine.input_processor import ProcessedRequest
from hardpoint.errors import HardpointError
from hardpoint.interfaces.engine import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from hardpoint.interfaces.request import EngineOutput, FinishReason, OutputKind, TokenLogprobs
from hardpoint.interfaces.stat_logger import RequestFinished
from hardpoint.interfaces.tokenizer import Tokenizer

MAX_UNREAD_LOGPROBS = 16_384
"""Log-probabilities kept for a reader of deltas; about a megabyte. One that falls further behind is cut off."""


class LogprobTexts:
    """Adds texts to log-probabilities; one per tokenizer, so that equal tokens share their strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = lru_cache(maxsize=65_536)(lambda i: (tokenizer.token_text(i), tokenizer.token_bytes(i)))

    def position(self, raw: TokenLogprobs) -> PositionLogprobs:
        chosen, *top = (
            Logprob(token_id, logprob, *self._piece(token_id), rank)
            for rank, (token_id, logprob) in enumerate(zip(raw.token_ids, raw.logprobs, strict=True))
            if token_id >= 0
        )
        first = Logprob(chosen.token_id, chosen.logprob, chosen.text, chosen.token_bytes, raw.rank)
        return PositionLogprobs(first, tuple(top))


class SequenceState:
    """One of the ``n`` sequences of a request. ``request_id`` is the engine's name for it."""

    def __init__(self, parent: RequestState, index: int, detokenizer: Detokenizer | None, texts: LogprobTexts) -> None:
        self.parent = parent
        self.index = index
        self.request_id = parent.processed.requests[index].request_id
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self._detokenizer = detokenizer
        self._texts = texts
        self._token_ids = array("i")
        self._raw_logprobs: list[TokenLogprobs] = []
        self._logprobs: list[PositionLogprobs] = []
        self._num_seen = 0
        self._end_seen = False

    def apply(self, output: EngineOutput) -> int:
        """Record an output and return how many of its tokens count: those after a stop string do not."""
        used = len(output.new_token_ids)
        stopped_by = None
        if self._detokenizer is not None and used:
            used = self._detokenizer.update(output.new_token_ids, output.finish_reason is FinishReason.STOP)
            stopped_by = self._detokenizer.stopped_by
        self._token_ids.extend(output.new_token_ids[:used])
        self._raw_logprobs.extend((output.logprobs or [])[:used])
        self.num_tokens += used
        if stopped_by is not None:
            self.finish(FinishReason.STOP, stopped_by)
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        return used

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    @property
    def num_unread_logprobs(self) -> int:
        return len(self._raw_logprobs) * (len(self._raw_logprobs[0].token_ids) if self._raw_logprobs else 0)

    def take(self, kind: OutputKind) -> CompletionOutput | None:
        """What ``kind`` shows now, or None when the reader has seen it all."""
        finished = self.finish_reason is not None
        if self._num_seen == self.num_tokens and self._end_seen == finished:
            return None
        self._num_seen, self._end_seen = self.num_tokens, finished
        return self._delta() if kind is OutputKind.DELTA else self.whole()

    def _delta(self) -> CompletionOutput:
        text = self._detokenizer.take(self.finish_reason is not None) if self._detokenizer else ""
        token_ids, self._token_ids = tuple(self._token_ids), array("i")
        raw, self._raw_logprobs = self._raw_logprobs, []
        return self._completion(text, token_ids, [self._texts.position(position) for position in raw])

    def whole(self) -> CompletionOutput:
        text = self._detokenizer.text(self.finish_reason is not None) if self._detokenizer else ""
        self._logprobs.extend(self._texts.position(position) for position in self._raw_logprobs)
        self._raw_logprobs.clear()
        return self._completion(text, tuple(self._token_ids), self._logprobs)

    def _completion(self, text: str, token_ids: tuple[int, ...], logprobs: list[PositionLogprobs]) -> CompletionOutput:
        wanted = self.parent.processed.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=tuple(logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_generated_tokens=self.num_tokens,
        )


class RequestState:
    """All sequences of one call. ``notify`` runs whenever there may be something new to take.

    ``failure`` is what the reader is to be raised instead of a last output: the engine's death, or its refusal.
    """

    def __init__(
        self, processed: ProcessedRequest, tokenizer: Tokenizer, texts: LogprobTexts, notify: Callable[[], None]
    ) -> None:
        self.processed = processed
        self.notify = notify
        self.failure: HardpointError | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self.pooled: np.ndarray | None = None
        self.extensions: dict[str, Any] = {}
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] = []
        prompt, params = processed.prompt_token_ids, processed.params
        self.sequences = [
            SequenceState(self, i, Detokenizer(tokenizer, prompt, params) if params.detokenize else None, texts)
            for i in range(len(processed.requests))
        ]

    @property
    def finished(self) -> bool:
        return self.ended is not None

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    def unfinished(self) -> list[SequenceState]:
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def take(self) -> RequestOutput | None:
        """The next output in the form the request asked for; None when there is nothing new. Raises :attr:`failure`."""
        if self.failure is not None:
            raise self.failure
        kind = self.processed.params.output_kind
        if kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        parts = [(sequence, sequence.take(kind)) for sequence in self.sequences]
        if all(part is None for _, part in parts):
            return None
        if kind is OutputKind.DELTA:
            return self._output([part for _, part in parts if part is not None])
        return self._output([part or sequence.whole() for sequence, part in parts])

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        wanted = self.processed.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.processed.request_id,
            prompt=self.processed.prompt_text,
            prompt_token_ids=self.processed.prompt_token_ids,
            outputs=tuple(completions),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=tuple(self.prompt_logprobs) if wanted else None,
            metrics=self.metrics() if self.finished else None,
            error=self.error,
            pooled=self.pooled,
            extensions=self.extensions,
        )

    def metrics(self) -> RequestMetrics:
        arrival = self.processed.arrival_time

        def since(moment: float | None) -> float | None:
            return None if moment is None else max(moment - arrival, 0.0)

        per_token = self.inter_token_s()
        return RequestMetrics(
            arrival_time=arrival,
            queue_s=since(self.first_scheduled),
            ttft_s=since(self.first_token),
            e2e_s=since(self.ended),
            decode_tokens_per_s=1.0 / per_token if per_token else None,
        )

    def summary(self, model: str, reason: FinishReason) -> RequestFinished:
        """The figures of the ended request."""
        times = self.metrics()
        counts = (len(self.processed.prompt_token_ids), self.num_cached_tokens, self.num_tokens)
        waits = (times.ttft_s, times.queue_s, self.inter_token_s())
        return RequestFinished(self.processed.request_id, model, reason, *counts, times.e2e_s or 0.0, *waits)

    def inter_token_s(self) -> float | None:
        """Mean seconds between tokens; None with fewer than two."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)
