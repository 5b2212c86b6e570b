"""Makes the steps a scheduler would make, by hand: which tokens of which request, in which slot and blocks.

Every output is held against the record's rules before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.step import BlockUpdate, Deferred, GrammarMask, NewRow, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import PendingOutput, Worker, WorkerConfig

__all__ = ["WorkerDriver", "check_output", "take_output"]


def _int32(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


@dataclass(slots=True)
class DrivenRow:
    """One request: ``tokens`` are prompt and outputs, ``slot`` is None while it is out of the batch."""

    name: str
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    extra: Mapping[str, Any]
    slot: int | None = None
    generation: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sent_blocks: int = 0
    resumed: bool = False

    @property
    def pools(self) -> bool:
        return self.extra.get("task", "generate") != "generate"


class WorkerDriver:
    """``worker`` must have its KV cache of ``num_blocks`` blocks in ``num_groups`` groups; block 0 is never used."""

    def __init__(self, worker: Worker, config: WorkerConfig, *, num_groups: int, num_blocks: int) -> None:
        self.worker = worker
        self.block_size = config.block_size
        self.vocab_size = config.model.vocab_size
        self.rows: dict[str, DrivenRow] = {}
        self.outputs: dict[str, list[int]] = {}
        self.failures: dict[str, str] = {}
        self.step_id = 0
        self._num_groups = num_groups
        self._free_slots = list(range(config.max_num_seqs))
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._generations = dict.fromkeys(range(config.max_num_seqs), 0)
        self._finished: list[int] = []
        self._preempted: list[int] = []

    def add(self, name: str, prompt: Sequence[int], *, sampling: SamplingParams | None = None, **extra: Any) -> None:
        """A request that enters with the next step it has tokens in; greedy unless ``sampling`` says otherwise.

        ``extra`` are further fields of its ``NewRow``.
        """
        chosen = sampling if sampling is not None else SamplingParams(temperature=0.0)
        self.rows[name] = DrivenRow(name, list(prompt), len(prompt), chosen, extra)
        self.outputs[name] = []

    def finish(self, name: str) -> None:
        """Its slot and blocks are free; the worker learns of it with the next step."""
        self._leave(self.rows.pop(name), self._finished)

    def preempt(self, name: str) -> None:
        """Out of the batch without blocks; it enters again, with all its tokens, when it is scheduled again."""
        row = self.rows[name]
        self._leave(row, self._preempted)
        row.slot, row.computed, row.blocks, row.sent_blocks, row.resumed = None, 0, [], 0, True

    def _leave(self, row: DrivenRow, slots: list[int]) -> None:
        self._free_blocks += reversed([block for block in row.blocks if not self._is_shared(block, row)])
        if row.slot is not None:
            slots.append(row.slot)
            # Taken again first, so that state left behind meets the next owner.
            self._free_slots.insert(0, row.slot)

    def _is_shared(self, block: int, row: DrivenRow) -> bool:
        return any(block in other.blocks for other in self.rows.values() if other is not row)

    def share(self, name: str, owner: str, num_tokens: int) -> None:
        """``name`` starts with the first ``num_tokens`` (whole blocks) of ``owner`` as if they were cached."""
        row = self.rows[name]
        row.blocks = self.rows[owner].blocks[: num_tokens // self.block_size]
        row.computed = num_tokens

    def reserve(self, name: str, num_tokens: int) -> None:
        """Blocks for ``num_tokens``."""
        row = self.rows[name]
        while len(row.blocks) * self.block_size < num_tokens:
            row.blocks.append(self._free_blocks.pop())

    def make_step(self, counts: Mapping[str, int] | None = None, **extra: Any) -> SchedulerOutput:
        """The next step: ``counts`` tokens of each named request, by default all that are known and not computed."""
        if counts is None:
            counts = {name: len(row.tokens) - row.computed for name, row in self.rows.items()}
        rows = [self.rows[name] for name in counts]
        entering = [row for row in rows if row.slot is None]
        for row, count in zip(rows, counts.values(), strict=True):
            self.reserve(row.name, row.computed + count)
        for row in entering:
            row.slot = self._free_slots.pop(0)
            self._generations[row.slot] += 1
            row.generation = self._generations[row.slot]
            row.sent_blocks = len(row.blocks)
        step = SchedulerOutput(
            step_id=self.step_id,
            slots=_int32(row.slot or 0 for row in rows),
            generations=_int32(row.generation for row in rows),
            num_computed_tokens=_int32(row.computed for row in rows),
            num_scheduled_tokens=_int32(counts.values()),
            samples=np.asarray(
                [
                    row.computed + count == len(row.tokens) and not row.pools
                    for row, count in zip(rows, counts.values(), strict=True)
                ],
                dtype=np.bool_,
            ),
            new_rows=tuple(self._new_row(row) for row in entering),
            new_blocks=(self._new_blocks(rows),) * self._num_groups,
            finished_slots=_int32(self._finished),
            preempted_slots=_int32(self._preempted),
            blocks_to_zero=_int32(()),
            num_common_prefix_blocks=(0,) * self._num_groups,
            num_tokens=sum(counts.values()),
            **extra,
        )
        self.step_id += 1
        self._finished, self._preempted = [], []
        for row, count in zip(rows, counts.values(), strict=True):
            row.computed += count
        return step

    def _new_row(self, row: DrivenRow) -> NewRow:
        fields: dict[str, Any] = {
            **row.extra,
            "request_id": row.name,
            "slot": row.slot,
            "generation": row.generation,
            "token_ids": _int32(row.tokens),
            "num_prompt_tokens": row.num_prompt,
            "block_ids": (_int32(row.blocks),) * self._num_groups,
            "sampling": row.sampling,
            "resumed": row.resumed,
        }
        return NewRow(**fields)

    @staticmethod
    def _new_blocks(rows: Sequence[DrivenRow]) -> BlockUpdate:
        new = [row.blocks[row.sent_blocks :] for row in rows]
        for row in rows:
            row.sent_blocks = len(row.blocks)
        return BlockUpdate(_int32(len(ids) for ids in new), _int32(block for ids in new for block in ids))

    def step(self, counts: Mapping[str, int] | None = None, **extra: Any) -> RunnerOutput:
        """Make a step, run it and remember its tokens."""
        step = self.make_step(counts, **extra)
        return self.absorb(step, self.run(step))

    def run(self, step: SchedulerOutput, grammar: GrammarMask | None = None) -> RunnerOutput:
        """Execute, and sample where the step defers it."""
        answer = self.worker.execute(step)
        if step.defers_sampling:
            assert answer == Deferred(step.step_id), f"a step that defers sampling was answered with {answer!r}"
            answer = self.worker.sample(step.step_id, grammar)
        return take_output(answer)

    def absorb(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        """Check ``output`` and append its tokens to their requests."""
        check_output(step, output, self.vocab_size)
        names = {row.slot: row.name for row in self.rows.values() if row.slot is not None}
        ids = iter(output.token_ids.tolist())
        for slot, count in zip(output.slots.tolist(), output.num_sampled.tolist(), strict=True):
            for _ in range(count):
                token = next(ids)
                self.rows[names[slot]].tokens.append(token)
                self.outputs[names[slot]].append(token)
        for failure in output.failures:
            self.failures[names[failure.slot]] = failure.reason
        return output

    def generate(self, count: int, *, chunk: int | None = None) -> dict[str, list[int]]:
        """Steps until every request has ``count`` outputs; at most ``chunk`` tokens of each in one step."""
        while waiting := [n for n in self.rows if len(self.outputs[n]) < count and n not in self.failures]:
            left = {name: len(self.rows[name].tokens) - self.rows[name].computed for name in waiting}
            self.step({name: min(chunk or number, number) for name, number in left.items()})
        return {name: self.outputs[name] for name in self.rows}


def take_output(answer: object) -> RunnerOutput:
    """What a worker answered, waited for if it is a promise."""
    result = answer.result() if isinstance(answer, PendingOutput) else answer
    assert isinstance(result, RunnerOutput), f"a step was answered with {result!r}"
    return result


def check_output(step: SchedulerOutput, output: RunnerOutput, vocab_size: int) -> None:
    """The rules of :class:`RunnerOutput`. Raises ``AssertionError`` naming the one that is broken."""
    what = f"step {step.step_id}"
    assert output.step_id == step.step_id, f"{what} was answered as step {output.step_id}"
    assert np.array_equal(output.slots, step.slots), f"{what}: rows must come in the order of the step"
    assert np.array_equal(output.generations, step.generations), f"{what}: generations must be those of the step"
    failed = {(failure.slot, failure.generation) for failure in output.failures}
    for failure in output.failures:
        assert failure.reason.strip(), f"{what}: a failed row needs a reason"
    wanted = [
        int(samples and (slot, generation) not in failed)
        for samples, slot, generation in zip(
            step.samples.tolist(), step.slots.tolist(), step.generations.tolist(), strict=True
        )
    ]
    assert output.num_sampled.tolist() == wanted, f"{what}: one token for each row that samples and has not failed"
    assert len(output.token_ids) == sum(wanted), f"{what}: {len(output.token_ids)} tokens for {sum(wanted)} rows"
    assert output.token_ids.dtype == np.int32, f"{what}: token ids are int32, not {output.token_ids.dtype}"
    outside = [token for token in output.token_ids.tolist() if not 0 <= token < vocab_size]
    assert not outside, f"{what}: token {outside[:1]} is outside the vocabulary of {vocab_size}"
