"""A scheduler that admits the waiting request with the least work left, so that short answers do not queue behind long.

Work is counted in tokens: the prompt, and the longest answer that was asked for. A request that waits gains a little
each time another one is preferred, so that a long job starts at last, however many short ones arrive (``patience``).
Admission reserves all blocks a request can ever need, so nothing is ever taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError, OverloadedError
from hardpoint.interfaces import (
    BlockUpdate,
    EngineOutput,
    EngineRequest,
    FinishReason,
    FullAttentionSpec,
    LogprobArrays,
    NewRow,
    PauseMode,
    RunnerOutput,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
    plugin,
    spec_from_wire,
)


class Options(BaseModel):
    """Options under ``plugins.scheduler.shortest_job_first``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patience: int = Field(default=16, ge=1, description="times a request may be passed over before it comes first")


@dataclass(slots=True)
class Live:
    record: EngineRequest
    tokens: list[int]
    limit: int
    slot: int = -1
    generation: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    entered: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    passed_over: int = 0

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.record.prompt_token_ids)


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


def by_row(arrays: LogprobArrays | None) -> dict[int, list[TokenLogprobs]]:
    """Log-probabilities of a step by row, in the order of positions; -1 pads what a row did not ask for."""
    found: dict[int, list[TokenLogprobs]] = {}
    if arrays is not None:
        columns = (arrays.rows, arrays.token_ids, arrays.logprobs, arrays.ranks)
        for row, ids, logprobs, rank in zip(*(column.tolist() for column in columns), strict=True):
            width = ids.index(-1) if -1 in ids else len(ids)
            found.setdefault(row, []).append(TokenLogprobs(ids[:width], logprobs[:width], rank))
    return found


class ShortestJobFirst(Scheduler):
    """One KV group of ``num_blocks`` blocks (block 0 is the null block); synchronous (one step in flight)."""

    def __init__(self, limits: SchedulerLimits, options: Options, *, num_blocks: int, block_size: int) -> None:
        self.limits = limits
        self.options = options
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free_blocks = list(range(num_blocks - 1, 0, -1))
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.generations = [0] * limits.max_num_seqs
        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.finished_slots: list[int] = []
        self.pause = PauseMode.NONE
        self.step_id = 0

    def add(self, request: EngineRequest) -> EngineOutput | None:
        if request.request_id in self.live_request_ids():
            raise ValueError(f"request {request.request_id} is already live")
        # Requests that a free slot will take in the next step do not count as waiting.
        room = None if self.limits.max_waiting is None else self.limits.max_waiting + len(self.free_slots)
        if room is not None and len(self.waiting) >= room:
            raise OverloadedError(f"{len(self.waiting)} requests wait already; raise --max-waiting or retry")
        prompt = request.prompt_token_ids.tolist()
        room = self.limits.max_model_len - len(prompt)
        wanted = request.sampling.max_tokens if request.sampling.max_tokens is not None else room
        live = Live(request, prompt, min(wanted, room))
        if live.limit <= 0 or self._blocks_for_life(live) > self.num_blocks - 1:
            return EngineOutput(request.request_id, [], FinishReason.LENGTH)
        self.waiting.append(live)
        return None

    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        wanted = set(request_ids)
        outputs = []
        for live in [*self.waiting, *self.running]:
            if live.record.request_id in wanted:
                self._release(live)
                outputs.append(EngineOutput(live.record.request_id, [], reason, error=error))
        return outputs

    def schedule(self) -> SchedulerOutput:
        budget = 0 if self.pause is PauseMode.ALL else self.limits.max_num_batched_tokens
        if self.pause is PauseMode.NONE:
            self._admit()
        rows: list[tuple[Live, int]] = []
        for live in self.running:
            count = min(len(live.tokens) - live.computed, budget)
            if count > 0:
                rows.append((live, count))
                budget -= count
        step = self._record(rows)
        for live, count in rows:
            live.computed += count
            live.entered = True
        self.step_id += 1
        return step

    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        by_slot = {live.slot: live for live in self.running}
        outputs = []
        for failure in output.failures:
            live = by_slot.pop(failure.slot, None)
            if live is not None and live.generation == failure.generation:
                self._release(live)
                outputs.append(EngineOutput(live.record.request_id, [], FinishReason.ERROR, error=failure.reason))
        cursor = 0
        sampled, prompts = by_row(output.logprobs), by_row(output.prompt_logprobs)
        columns = (output.slots.tolist(), output.generations.tolist(), output.num_sampled.tolist())
        for row, (slot, generation, count) in enumerate(zip(*columns, strict=True)):
            ids = output.token_ids[cursor : cursor + count].tolist()
            cursor += count
            live = by_slot.get(slot)
            if live is None or live.generation != generation:
                continue
            live.prompt_logprobs += prompts.get(row, [])
            if ids:
                outputs.append(self._accept(live, ids[0], sampled.get(row)))
        return outputs

    def has_work(self) -> bool:
        if self.pause is PauseMode.ALL:
            return bool(self.finished_slots)
        return bool(self.running or self.waiting or self.finished_slots)

    def live_request_ids(self) -> Iterable[str]:
        return [live.record.request_id for live in (*self.waiting, *self.running)]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=len(self.free_blocks),
            num_total_blocks=self.num_blocks - 1,
            step_id=self.step_id,
        )

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        return not self.running

    def set_pause(self, mode: PauseMode) -> None:
        self.pause = mode

    def check_integrity(self) -> None:
        held = [block for live in self.running for block in live.blocks]
        if sorted([*held, *self.free_blocks]) != list(range(1, self.num_blocks)):
            raise RuntimeError("free and held blocks do not add up to the pool")

    def pick(self, waiting: list[Live]) -> Live:
        """The shortest job, unless one was passed over too often; those come in the order of arrival."""
        due = [live for live in waiting if live.passed_over >= self.options.patience]
        return due[0] if due else min(waiting, key=lambda live: len(live.tokens) + live.limit)

    def _blocks_for_life(self, live: Live) -> int:
        return -(-(len(live.record.prompt_token_ids) + live.limit) // self.block_size)

    def _admit(self) -> None:
        while self.waiting and self.free_slots:
            live = self.pick(self.waiting)
            if self._blocks_for_life(live) > len(self.free_blocks):
                return
            for earlier in self.waiting[: self.waiting.index(live)]:
                earlier.passed_over += 1
            self.waiting.remove(live)
            live.slot = self.free_slots.pop()
            self.generations[live.slot] += 1
            live.generation = self.generations[live.slot]
            live.blocks = [self.free_blocks.pop() for _ in range(self._blocks_for_life(live))]
            self.running.append(live)

    def _record(self, rows: list[tuple[Live, int]]) -> SchedulerOutput:
        finished, self.finished_slots = self.finished_slots, []
        return SchedulerOutput(
            step_id=self.step_id,
            slots=_int32(live.slot for live, _ in rows),
            generations=_int32(live.generation for live, _ in rows),
            num_computed_tokens=_int32(live.computed for live, _ in rows),
            num_scheduled_tokens=_int32(count for _, count in rows),
            samples=np.asarray([live.computed + count == len(live.tokens) for live, count in rows], dtype=np.bool_),
            new_rows=tuple(self._new_row(live) for live, _ in rows if not live.entered),
            new_blocks=(BlockUpdate(np.zeros(len(rows), dtype=np.int32), np.zeros(0, dtype=np.int32)),),
            finished_slots=_int32(finished),
            preempted_slots=_int32(()),
            blocks_to_zero=_int32(()),
            num_common_prefix_blocks=(0,),
            num_tokens=sum(count for _, count in rows),
        )

    def _new_row(self, live: Live) -> NewRow:
        return NewRow(
            request_id=live.record.request_id,
            slot=live.slot,
            generation=live.generation,
            token_ids=_int32(live.tokens),
            num_prompt_tokens=len(live.record.prompt_token_ids),
            block_ids=(_int32(live.blocks),),
            sampling=live.record.sampling,
        )

    def _accept(self, live: Live, token: int, logprobs: list[TokenLogprobs] | None) -> EngineOutput:
        live.tokens.append(token)
        sampling = live.record.sampling
        reason: FinishReason | None = None
        stop_reason: int | None = None
        if live.num_outputs > sampling.min_tokens:
            if token in live.record.eos_token_ids and not sampling.ignore_eos:
                reason = FinishReason.STOP
            elif token in sampling.stop_token_ids:
                reason, stop_reason = FinishReason.STOP, token
        if reason is None and live.num_outputs >= live.limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._release(live)
        prompt: list[TokenLogprobs | None] | None = None
        if live.num_outputs == 1 and sampling.prompt_logprobs is not None:
            # The first token of a prompt follows nothing, and what follows its last one was sampled.
            prompt = [None, *live.prompt_logprobs[: len(live.record.prompt_token_ids) - 1]]
        return EngineOutput(
            live.record.request_id, [token], reason, stop_reason, logprobs=logprobs, prompt_logprobs=prompt
        )

    def _release(self, live: Live) -> None:
        if live in self.waiting:
            self.waiting.remove(live)
            return
        self.running.remove(live)
        self.free_blocks.extend(reversed(live.blocks))
        self.free_slots.append(live.slot)
        if live.entered:
            self.finished_slots.append(live.slot)


@plugin("scheduler", options=Options)
def create(ctx: SchedulerContext, options: Options) -> Scheduler:
    if len(ctx.kv_cache.groups) != 1:
        raise ConfigError(f"shortest_job_first plans one KV group; this model has {len(ctx.kv_cache.groups)}")
    if ctx.limits.max_inflight_steps != 1:
        raise ConfigError(f"shortest_job_first keeps one step under way, not {ctx.limits.max_inflight_steps}")
    spec = spec_from_wire(ctx.kv_cache.groups[0].spec, {FullAttentionSpec.kind: FullAttentionSpec})
    return ShortestJobFirst(ctx.limits, options, num_blocks=ctx.kv_cache.num_blocks, block_size=spec.block_size)
