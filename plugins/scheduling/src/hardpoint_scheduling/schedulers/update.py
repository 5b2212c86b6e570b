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
from hardpoint_scheduling.schedulers.results import check_output, check_pooled, sampled_rows
from hardpoint_scheduling.schedulers.state import InflightStep, SchedulerState


@dataclass(frozen=True, slots=True)
class _Result:
    """A step's output beside the requests of its rows. ``alive``: bool [R], rows whose request still has its slot."""

    entry: InflightStep
    output: RunnerOutput
    alive: BoolArray
    logprobs: dict[int, list[TokenLogprobs]]

    @property
    def step(self) -> SchedulerOutput:
        return self.entry.step


class OutputUpdate:
    """Most rows get one token and go on: they are handled as arrays and one list comprehension. A row is looked at on
    its own when it ends, gives its first output, wants log-probabilities, has several tokens or was preempted since.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def apply(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        """Raises ``RuntimeError`` when the output does not belong to the oldest step or misses a row's sample."""
        entry = self._oldest(step, output)
        if output.failures:
            # Before blocks of requests that ended meanwhile become free: what a failed row wrote must not be found.
            self._distrust(entry, output)
        self._lifecycle.release_due()
        outputs = self._fail_rows(entry, output) if output.failures else []
        table = self._state.table
        alive = table.generation[step.slots] == step.generations
        all_alive = bool(alive.all())
        check_output(step, output, alive)
        is_plain = all_alive and step.drafts is None and not self._state.inflight
        table.settle(step, alive, output.num_sampled, is_plain=is_plain)
        result = _Result(entry, output, alive, by_row(output.logprobs))
        if output.prompt_logprobs is not None:
            self._collect_prompt_logprobs(entry, output, alive)
        if table.num_pooling or output.pooled:
            outputs.extend(self._end_pooled(result))
        if all_alive:
            single, several = sampled_rows(output.num_sampled)
        else:
            single, several = sampled_rows(np.where(alive, output.num_sampled, 0))
            outputs.extend(self._append_stale(result))
        if len(single):
            outputs.extend(self._append(result, single))
        if len(several):
            outputs.extend(self._append_several(result, several.tolist()))
        if output.drafts is not None:
            self._attach_drafts(result)
        return outputs

    def _oldest(self, step: SchedulerOutput, output: RunnerOutput) -> InflightStep:
        inflight = self._state.inflight
        if not inflight or inflight[0].step.step_id != step.step_id:
            expected = inflight[0].step.step_id if inflight else "none"
            raise RuntimeError(f"step {step.step_id} is updated, but the oldest step under way is {expected}")
        has_rows = output.slots is step.slots or np.array_equal(output.slots, step.slots)
        if output.step_id != step.step_id or not has_rows:
            raise RuntimeError(f"the output of step {output.step_id} does not have the rows of step {step.step_id}")
        return inflight.popleft()

    def _distrust(self, entry: InflightStep, output: RunnerOutput) -> None:
        """Take the blocks of failed rows out of the prefix index, also those of requests that ended meanwhile."""
        for request in _failed(entry, output):
            self._state.kv.forget(request.request_id)
            self._state.kv.forget_hashes(request.block_hashes)

    def _fail_rows(self, entry: InflightStep, output: RunnerOutput) -> list[EngineOutput]:
        """A row that could not be computed ends its request alone, unless its result is unwanted anyhow."""
        outputs = []
        for request, reason in _failed(entry, output).items():
            if request.status.is_finished or (request.num_stale_tokens and request.drops_stale):
                continue
            self._lifecycle.end_all([(request, FinishReason.ERROR)])
            outputs.append(
                EngineOutput(
                    request.request_id,
                    [],
                    FinishReason.ERROR,
                    num_cached_tokens=request.num_cached_tokens,
                    error=reason,
                )
            )
        return outputs

    def _collect_prompt_logprobs(self, entry: InflightStep, output: RunnerOutput, alive: BoolArray) -> None:
        for row, entries in by_row(output.prompt_logprobs).items():
            request = entry.rows[row]
            if alive[row] and request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(entries)

    def _append(self, result: _Result, rows: Int32Array) -> list[EngineOutput]:
        """One token for each of ``rows``."""
        table, entry, output = self._state.table, result.entry, result.output
        if len(rows) == len(entry.rows):
            slots, tokens, requests = entry.step.slots, output.token_ids, entry.rows
        else:
            slots = entry.step.slots[rows]
            tokens = output.token_ids[_first_tokens(output)[rows]]
            requests = [entry.rows[row] for row in rows.tolist()]
        lengths = table.num_tokens[slots] + 1
        table.num_tokens[slots] = lengths
        token_list = tokens.tolist()
        for request, token in zip(requests, token_list, strict=True):
            request.append(token)
        outputs = [EngineOutput(r.request_id, [t]) for r, t in zip(requests, token_list, strict=True)]
        is_special = (lengths >= table.limit[slots]) | table.detail[slots]
        is_stop = table.stop_ids[slots] == tokens[:, None]
        if is_stop.any():
            is_special |= is_stop.any(axis=1) & (lengths > table.stops_after[slots])
        if not is_special.any():
            return outputs
        ended: list[tuple[LiveRequest, FinishReason]] = []
        for i in np.flatnonzero(is_special).tolist():
            request = requests[i]
            outputs[i] = self._detailed_output(request, token_list[i : i + 1], result.logprobs.get(int(rows[i])), ended)
        self._lifecycle.end_all(ended)
        return outputs

    def _append_several(self, result: _Result, rows: list[int]) -> list[EngineOutput]:
        """The accepted drafts of a row and the token after them; what follows the end of a sequence is dropped."""
        state, outputs = self._state, []
        ended: list[tuple[LiveRequest, FinishReason]] = []
        first = _first_tokens(result.output)
        for row in rows:
            request, count = result.entry.rows[row], int(result.output.num_sampled[row])
            tokens = result.output.token_ids[first[row] : first[row] + count].tolist()
            kept = []
            for token in tokens:
                request.append(token)
                kept.append(token)
                if _end_of(request, token)[0] is not None:
                    break
            if request.slot is not None:
                state.table.num_tokens[request.slot] = request.num_tokens
            outputs.append(self._detailed_output(request, kept, result.logprobs.get(row), ended))
        self._lifecycle.end_all(ended)
        return outputs

    def _end_pooled(self, result: _Result) -> list[EngineOutput]:
        """Requests end with their pooled result, also those that were preempted since; unless it is to be dropped."""
        step, output, entry = result.step, result.output, result.entry
        pools = np.asarray([request.pools for request in entry.rows], dtype=np.bool_)
        check_pooled(step, output, result.alive & self._state.table.is_through(step), pools)
        wanted = []
        for row, pooled in sorted(output.pooled.items()):
            request = entry.rows[row]
            if not request.status.is_finished and (result.alive[row] or not request.drops_stale):
                wanted.append((request, pooled))
        self._lifecycle.end_all([(request, FinishReason.STOP) for request, _ in wanted])
        return [
            EngineOutput(
                request.request_id,
                [],
                FinishReason.STOP,
                num_cached_tokens=request.num_cached_tokens,
                first_scheduled_time=request.first_scheduled_time,
                pooled=pooled,
            )
            for request, pooled in wanted
        ]

    def _append_stale(self, result: _Result) -> list[EngineOutput]:
        """Rows whose request was preempted after they were scheduled (R3.79).

        Its counters are reset already, so only the stale share falls; its tokens are delivered unless the drop flag
        says otherwise (R3.80). Rows of ended requests bring surplus tokens, which nobody wants.
        """
        step, delivered = result.step, []
        for row in np.flatnonzero(~result.alive).tolist():
            request = result.entry.rows[row]
            if request.status.is_finished:
                continue
            wanted = not request.drops_stale and int(result.output.num_sampled[row]) > 0
            request.settle_stale(int(step.num_scheduled_tokens[row]))
            if wanted:
                delivered.append(row)
        return self._append_several(result, delivered)

    def _attach_drafts(self, result: _Result) -> None:
        """Guesses are for the step after this one; where that is under way already, they come too late."""
        step, table, drafts = result.step, self._state.table, result.output.drafts
        if drafts is None:
            return
        current = (table.generation[step.slots] == step.generations) & step.samples & (table.owed[step.slots] == 0)
        rows = np.flatnonzero(current)
        wanted = np.repeat(current, drafts.counts)
        table.attach_drafts(step.slots[rows], drafts.counts[rows], drafts.ids[wanted])

    def _detailed_output(
        self,
        request: LiveRequest,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        ended: list[tuple[LiveRequest, FinishReason]],
    ) -> EngineOutput:
        """An output that may say more than its ``tokens``, already appended. A request that is through joins
        ``ended``."""
        reason, stop_reason = _end_of(request, tokens[-1])
        if reason is not None:
            ended.append((request, reason))
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
        wants_logprobs = logprobs is not None and request.record.sampling.logprobs is not None
        return EngineOutput(
            request.request_id,
            tokens,
            reason,
            stop_reason,
            num_cached_tokens=request.num_cached_tokens if first or reason is not None else 0,
            logprobs=logprobs[: len(tokens)] if logprobs is not None and wants_logprobs else None,
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


def _failed(entry: InflightStep, output: RunnerOutput) -> dict[LiveRequest, str]:
    """Requests of the step whose row failed, with the reason; a failure that names no row of the step is ignored."""
    step, failed = entry.step, {}
    for failure in output.failures:
        rows = np.flatnonzero((step.slots == failure.slot) & (step.generations == failure.generation))
        for row in rows.tolist():
            failed[entry.rows[row]] = failure.reason
    return failed


def _first_tokens(output: RunnerOutput) -> Int32Array:
    """Per row, where its tokens begin in ``token_ids``."""
    return np.cumsum(output.num_sampled) - output.num_sampled
