"""Applying a step's result: tokens appended, stops found, outputs built, ended requests released."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardpoint.interfaces import (
    BoolArray,
    EngineOutput,
    FinishReason,
    Int32Array,
    RunnerOutput,
    SchedulerOutput,
    TokenLogprobs,
)
from hardpoint_scheduling.schedulers.lifecycle import Lifecycle
from hardpoint_scheduling.schedulers.logprobs import by_row
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.slots import NO_TOKEN
from hardpoint_scheduling.schedulers.state import InflightStep, SchedulerState


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Rows of the step that got a token: ``rows`` and ``tokens`` are int32 [S], ``requests`` has length S."""

    rows: Int32Array
    slots: Int32Array
    tokens: Int32Array
    requests: list[LiveRequest]


class OutputUpdate:
    """Most rows get one token and go on: they are handled as arrays and one list comprehension. A row is looked at on
    its own when it ends, gives its first output, fills a hash block or wants log-probabilities.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def apply(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        """Raises ``RuntimeError`` when the output does not belong to the oldest step or misses a row's sample."""
        entry = self._oldest(step, output)
        # Before blocks of requests that ended meanwhile become free: what a failed row wrote must not be found.
        self._distrust(entry, output)
        self._lifecycle.release_due()
        outputs = self._fail_rows(output)
        alive = self._state.table.generation[step.slots] == step.generations
        _check_samples(step, output, alive)
        if output.prompt_logprobs is not None:
            self._collect_prompt_logprobs(entry, output, alive)
        sampled = _sampled_rows(entry, output, alive)
        if sampled.requests:
            outputs.extend(self._append(sampled, output))
        return outputs

    def _oldest(self, step: SchedulerOutput, output: RunnerOutput) -> InflightStep:
        inflight = self._state.inflight
        if not inflight or inflight[0].step.step_id != step.step_id:
            expected = inflight[0].step.step_id if inflight else "none"
            raise RuntimeError(f"step {step.step_id} is updated, but the oldest step under way is {expected}")
        if output.step_id != step.step_id or not np.array_equal(output.slots, step.slots):
            raise RuntimeError(f"the output of step {output.step_id} does not have the rows of step {step.step_id}")
        return inflight.popleft()

    def _distrust(self, entry: InflightStep, output: RunnerOutput) -> None:
        """Take the blocks of failed rows out of the prefix index, also those of requests that ended meanwhile."""
        step, kv = entry.step, self._state.kv
        for failure in output.failures:
            failed = (step.slots == failure.slot) & (step.generations == failure.generation)
            for row in np.flatnonzero(failed).tolist():
                kv.forget(entry.rows[row].request_id)

    def _fail_rows(self, output: RunnerOutput) -> list[EngineOutput]:
        """A row that could not be computed ends its request alone."""
        outputs = []
        for failure in output.failures:
            table = self._state.table
            if not 0 <= failure.slot < table.num_slots or table.generation[failure.slot] != failure.generation:
                continue
            request = table.owner[failure.slot]
            if request is None:
                continue
            self._lifecycle.end_all([(request, FinishReason.ERROR)])
            outputs.append(
                EngineOutput(
                    request.request_id,
                    [],
                    FinishReason.ERROR,
                    num_cached_tokens=request.num_cached_tokens,
                    error=failure.reason,
                )
            )
        return outputs

    def _collect_prompt_logprobs(self, entry: InflightStep, output: RunnerOutput, alive: BoolArray) -> None:
        for row, entries in by_row(output.prompt_logprobs).items():
            request = entry.rows[row]
            if alive[row] and request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(entries)

    def _append(self, sampled: _Sampled, output: RunnerOutput) -> list[EngineOutput]:
        table = self._state.table
        slots, tokens = sampled.slots, sampled.tokens
        lengths = table.num_tokens[slots] + 1
        table.num_tokens[slots] = lengths
        token_list = tokens.tolist()
        for request, token in zip(sampled.requests, token_list, strict=True):
            request.append(token)
        outputs = [EngineOutput(r.request_id, [t]) for r, t in zip(sampled.requests, token_list, strict=True)]
        self._hash_full_blocks(sampled.requests, lengths)
        stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
        stopped &= lengths > table.stops_after[slots]
        special = np.flatnonzero(stopped | (lengths >= table.limit[slots]) | table.detail[slots])
        if len(special):
            self._detail(sampled, special.tolist(), output, outputs)
        return outputs

    def _hash_full_blocks(self, requests: list[LiveRequest], lengths: Int32Array) -> None:
        state = self._state
        if not state.kv.prefix_caching:
            return
        for i in np.flatnonzero(lengths % state.kv.hash_block_size == 0).tolist():
            request = requests[i]
            state.hasher.extend(request.record, request.tokens, request.block_hashes)

    def _detail(self, sampled: _Sampled, special: list[int], output: RunnerOutput, outputs: list[EngineOutput]) -> None:
        """Replace the plain outputs of the ``special`` rows and end those that are through."""
        logprobs = by_row(output.logprobs)
        ended: list[tuple[LiveRequest, FinishReason]] = []
        for i in special:
            request, token = sampled.requests[i], int(sampled.tokens[i])
            reason, stop_reason = _end_of(request, token)
            outputs[i] = self._detailed_output(request, token, reason, stop_reason, logprobs.get(int(sampled.rows[i])))
            if reason is not None:
                ended.append((request, reason))
        if ended:
            self._lifecycle.end_all(ended)

    def _detailed_output(
        self,
        request: LiveRequest,
        token: int,
        reason: FinishReason | None,
        stop_reason: int | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> EngineOutput:
        first = not request.has_output
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if first:
            request.has_output = True
            if request.prompt_logprobs is not None:
                # Nothing precedes the first prompt token, so it has no log-probability.
                prompt_logprobs = [None, *request.prompt_logprobs[: request.num_prompt_tokens - 1]]
                request.prompt_logprobs = None
        if request.slot is not None:
            self._state.table.detail[request.slot] = self._state.table.always_needs_detail(request.slot)
        return EngineOutput(
            request.request_id,
            [token],
            reason,
            stop_reason,
            num_cached_tokens=request.num_cached_tokens if first or reason is not None else 0,
            logprobs=logprobs if request.record.sampling.logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            first_scheduled_time=request.first_scheduled_time if first else None,
        )


def _end_of(request: LiveRequest, token: int) -> tuple[FinishReason | None, int | None]:
    """Why the sequence ends with ``token``, already appended; a stop wins over the length."""
    if request.num_output_tokens > request.record.sampling.min_tokens:
        stops, stop_reason = request.stop_reason_of(token)
        if stops:
            return FinishReason.STOP, stop_reason
    if request.num_tokens >= request.limit:
        return FinishReason.LENGTH, None
    return None, None


def _check_samples(step: SchedulerOutput, output: RunnerOutput, alive: BoolArray) -> None:
    """A live row without the sample it owes would never be scheduled again, so it must not pass unnoticed."""
    wrong = alive & (output.num_sampled != step.samples)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise RuntimeError(
            f"step {step.step_id}, slot {int(step.slots[row])}: {int(output.num_sampled[row])} tokens sampled, "
            f"{int(step.samples[row])} expected; a row that cannot be computed must be reported as a failure"
        )
    if len(output.token_ids) != int(output.num_sampled.sum()):
        raise RuntimeError(
            f"step {step.step_id}: {len(output.token_ids)} token ids for {int(output.num_sampled.sum())} samples"
        )
    if len(output.token_ids) and int(output.token_ids.min()) <= NO_TOKEN:
        raise RuntimeError(f"step {step.step_id}: token id {int(output.token_ids.min())} is negative")


def _sampled_rows(entry: InflightStep, output: RunnerOutput, alive: BoolArray) -> _Sampled:
    has_token = alive & (output.num_sampled > 0)
    if has_token.all():
        rows = np.arange(len(entry.rows), dtype=np.int32)
        return _Sampled(rows, entry.step.slots, output.token_ids, entry.rows)
    chosen = np.flatnonzero(has_token)
    positions = (np.cumsum(output.num_sampled) - output.num_sampled)[chosen]
    requests = [entry.rows[i] for i in chosen.tolist()]
    return _Sampled(chosen.astype(np.int32), entry.step.slots[chosen], output.token_ids[positions], requests)
