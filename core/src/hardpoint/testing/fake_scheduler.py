"""The smallest scheduler that keeps the contract: first come, first served, no prefix sharing, no preemption.

Admission reserves a request's whole life in blocks, so it never has to take anything back. Serves the core's own
tests and
plugin authors who need a loop without the scheduling distribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hardpoint.errors import OverloadedError
from hardpoint.interfaces.request import EngineOutput, EngineRequest, FinishReason, SchedulerStats
from hardpoint.interfaces.scheduler import PauseMode, Scheduler, SchedulerLimits
from hardpoint.interfaces.step import BlockUpdate, NewRow, RunnerOutput, SchedulerOutput


@dataclass(slots=True)
class _Live:
    record: EngineRequest
    tokens: list[int]
    limit: int
    slot: int = -1
    generation: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    entered: bool = False

    @property
    def pools(self) -> bool:
        return self.record.task != "generate"

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.record.prompt_token_ids)


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


class FakeScheduler(Scheduler):
    """One KV group of ``num_blocks`` blocks (block 0 is the null block); synchronous (one step in flight)."""

    def __init__(self, limits: SchedulerLimits, *, num_blocks: int, block_size: int) -> None:
        self.limits = limits
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free_blocks = list(range(num_blocks - 1, 0, -1))
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.generations = [0] * limits.max_num_seqs
        self.waiting: deque[_Live] = deque()
        self.running: list[_Live] = []
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
        live = _Live(request, prompt, min(wanted, room))
        if live.pools and room >= 0:
            live.limit = 1
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
        rows: list[tuple[_Live, int]] = []
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
        cursor = 0
        for slot, generation, count in zip(output.slots, output.generations, output.num_sampled, strict=True):
            ids = output.token_ids[cursor : cursor + int(count)].tolist()
            cursor += int(count)
            live = by_slot.get(int(slot))
            if live is None or live.generation != int(generation) or not ids:
                continue
            outputs.append(self._accept(live, ids[0]))
        for row, pooled in output.pooled.items():
            live = by_slot.get(int(output.slots[row]))
            if live is not None and live.generation == int(output.generations[row]):
                self._release(live)
                outputs.append(EngineOutput(live.record.request_id, [], FinishReason.STOP, pooled=pooled))
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

    def _blocks_for_life(self, live: _Live) -> int:
        return -(-(len(live.record.prompt_token_ids) + live.limit) // self.block_size)

    def _admit(self) -> None:
        while self.waiting and self.free_slots and self._blocks_for_life(self.waiting[0]) <= len(self.free_blocks):
            live = self.waiting.popleft()
            live.slot = self.free_slots.pop()
            self.generations[live.slot] += 1
            live.generation = self.generations[live.slot]
            live.blocks = [self.free_blocks.pop() for _ in range(self._blocks_for_life(live))]
            self.running.append(live)

    def _record(self, rows: list[tuple[_Live, int]]) -> SchedulerOutput:
        finished, self.finished_slots = self.finished_slots, []
        return SchedulerOutput(
            step_id=self.step_id,
            slots=_int32(live.slot for live, _ in rows),
            generations=_int32(live.generation for live, _ in rows),
            num_computed_tokens=_int32(live.computed for live, _ in rows),
            num_scheduled_tokens=_int32(count for _, count in rows),
            samples=np.asarray(
                [live.computed + count == len(live.tokens) and not live.pools for live, count in rows], dtype=np.bool_
            ),
            new_rows=tuple(self._new_row(live) for live, _ in rows if not live.entered),
            new_blocks=(BlockUpdate(np.zeros(len(rows), dtype=np.int32), np.zeros(0, dtype=np.int32)),),
            finished_slots=_int32(finished),
            preempted_slots=_int32(()),
            blocks_to_zero=_int32(()),
            num_common_prefix_blocks=(0,),
            num_tokens=sum(count for _, count in rows),
        )

    def _new_row(self, live: _Live) -> NewRow:
        return NewRow(
            request_id=live.record.request_id,
            slot=live.slot,
            generation=live.generation,
            token_ids=_int32(live.tokens),
            num_prompt_tokens=len(live.record.prompt_token_ids),
            block_ids=(_int32(live.blocks),),
            sampling=live.record.sampling,
            task=live.record.task,
            pooling=live.record.pooling,
        )

    def _accept(self, live: _Live, token: int) -> EngineOutput:
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
        return EngineOutput(live.record.request_id, [token], reason, stop_reason)

    def _release(self, live: _Live) -> None:
        if live in self.waiting:
            self.waiting.remove(live)
            return
        self.running.remove(live)
        self.free_blocks.extend(reversed(live.blocks))
        self.free_slots.append(live.slot)
        if live.entered:
            self.finished_slots.append(live.slot)
