"""Input preparation against a naive rebuild, over random histories of joins, chunks, preemptions and finishes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.step import BlockUpdate, SchedulerOutput
from hardpoint_torch_runtime.runner.input_batch import UNWRITTEN_SLOT, InputBatch, InputBuilder
from hardpoint_torch_runtime.runner.slot_state import SlotState

NUM_SLOTS, MAX_TOKENS, MAX_LEN, BLOCK = 5, 24, 30, 4
POISON = -7


def fresh(block: int = BLOCK, kernel_blocks: int = 1) -> tuple[SlotState, InputBuilder]:
    state = SlotState(NUM_SLOTS, MAX_LEN, [block])
    return state, InputBuilder(state, MAX_TOKENS, torch.device("cpu"), (kernel_blocks,))


def poison(builder: InputBuilder) -> None:
    """Everything a build leaves undefined would show (R4.45)."""
    for buffer in (builder._token_ids, builder._positions, *builder._slot_mappings, *builder._block_tables):
        buffer.host.fill(POISON)


@dataclass
class Naive:
    """One request as plain lists."""

    slot: int
    generation: int
    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    sent_blocks: int = 0
    entered: bool = False
    pending: list[int] = field(default_factory=list)


@dataclass
class History:
    """A random scheduler whose every decision is valid."""

    random: np.random.Generator
    make_step: Any
    make_row: Any
    live: list[Naive] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=lambda: list(range(NUM_SLOTS)))
    free_blocks: list[int] = field(default_factory=lambda: list(range(1, 80)))
    generation: int = 0
    step_id: int = 0
    dropped: list[int] = field(default_factory=list)

    def step(self) -> tuple[Any, list[tuple[Naive, int]]]:
        self._drop_some()
        self._join_some()
        rows: list[tuple[Naive, int]] = []
        budget = MAX_TOKENS
        for live in self.random.permutation(np.asarray(self.live, dtype=object)).tolist():
            known = len(live.tokens) - live.computed
            if known <= 0 or budget == 0 or self.random.random() < 0.2:
                continue
            count = min(int(self.random.integers(1, known + 1)), budget)
            budget -= count
            self._cover(live, live.computed + count)
            rows.append((live, count))
        new_rows = []
        appended: list[list[int]] = []
        for live, _ in rows:
            appended.append([] if not live.entered else live.blocks[live.sent_blocks :])
            if not live.entered:
                new_rows.append(self.make_row(live.slot, live.tokens, live.blocks, generation=live.generation))
            live.sent_blocks = len(live.blocks)
            live.entered = True
        step = self.make_step(
            self.step_id,
            [
                (live.slot, live.generation, live.computed, count, live.computed + count == len(live.tokens))
                for live, count in rows
            ],
            new_rows=new_rows,
            new_blocks=appended,
            finished=self.dropped,
        )
        self.dropped = []
        self.step_id += 1
        return step, rows

    def advance(self, state: SlotState, rows: list[tuple[Naive, int]]) -> None:
        """Sample a random token for rows that reached their end."""
        for live, count in rows:
            live.computed += count
            if live.computed == len(live.tokens):
                token = int(self.random.integers(0, 1000))
                live.tokens.append(token)
                state.append_tokens(np.asarray([live.slot], dtype=np.int32), np.asarray([token], dtype=np.int32))

    def _drop_some(self) -> None:
        for live in list(self.live):
            if len(live.tokens) >= MAX_LEN or self.random.random() < 0.15:
                self.live.remove(live)
                self.free_slots.append(live.slot)
                self.free_blocks += live.blocks
                if live.entered:
                    self.dropped.append(live.slot)

    def _join_some(self) -> None:
        while self.free_slots and self.random.random() < 0.6:
            self.generation += 1
            slot = self.free_slots.pop(int(self.random.integers(0, len(self.free_slots))))
            tokens = self.random.integers(0, 1000, int(self.random.integers(1, 12))).tolist()
            self.live.append(Naive(slot, self.generation, tokens, []))

    def _cover(self, live: Naive, num_tokens: int) -> None:
        while len(live.blocks) * BLOCK < num_tokens:
            live.blocks.append(self.free_blocks.pop(int(self.random.integers(0, len(self.free_blocks)))))


def apply(state: SlotState, step: Any) -> None:
    state.release(step.finished_slots)
    for row in step.new_rows:
        state.enter(row)
    state.check_rows(step.slots, step.generations)
    state.append_blocks(step.slots, step.new_blocks)


def expect_equal(batch: InputBatch, rows: list[tuple[Naive, int]], state: SlotState) -> None:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for live, count in rows:
        span = range(live.computed, live.computed + count)
        ids += [live.tokens[p] for p in span]
        positions += span
        slots += [live.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in span]
        assert state.tables[0].ids[live.slot, : len(live.blocks)].tolist() == live.blocks
    assert batch.token_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mappings[0].tolist() == slots
    assert len(set(slots)) == len(slots)
    assert min(slots) >= BLOCK, "I4.3: a real token never hits the null block"
    counts = [count for _, count in rows]
    ends = [live.computed + count for live, count in rows]
    assert batch.query_start_loc.tolist() == [0, *np.cumsum(counts).tolist()]
    assert batch.seq_lens.tolist() == ends
    assert (batch.max_query_len, batch.max_seq_len) == (max(counts), max(ends))
    for row, (live, _) in enumerate(rows):
        needed = -(-ends[row] // BLOCK)
        assert batch.block_tables[0][row, :needed].tolist() == live.blocks[:needed]
    sampling = [row for row, (live, _) in enumerate(rows) if ends[row] == len(live.tokens)]
    assert batch.sample_rows.tolist() == sampling
    assert batch.logits_indices.tolist() == [int(np.cumsum(counts)[row]) - 1 for row in sampling]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_history_equals_a_rebuild_from_scratch(hand_builders: Any, seed: int) -> None:
    """I4.1, I4.2, I4.3, I4.4: ids, positions, slots and tables equal the naive ones, in buffers poisoned beforehand."""
    make_step, make_row = hand_builders
    history = History(np.random.default_rng(seed), make_step, make_row)
    state, builder = fresh()
    for _ in range(25):
        step, rows = history.step()
        apply(state, step)
        assert sorted(np.flatnonzero(state.occupied)) == sorted(live.slot for live in history.live if live.entered)
        if rows:
            poison(builder)
            expect_equal(builder.build(step), rows, state)
        history.advance(state, rows)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), threshold=st.integers(1, 4))
def test_reordering_permutes_rows_and_nothing_else(hand_builders: Any, seed: int, threshold: int) -> None:
    """R4.35: short rows come first, in their old order; step_rows tells where each came from."""
    make_step, make_row = hand_builders
    history = History(np.random.default_rng(seed), make_step, make_row)
    state, builder = fresh()
    for _ in range(12):
        step, rows = history.step()
        apply(state, step)
        if rows:
            batch = builder.build(step, reorder_threshold=threshold)
            permuted = [rows[i] for i in batch.step_rows.tolist()]
            is_long = [count > threshold for _, count in permuted]
            assert is_long == sorted(is_long)
            assert sorted(batch.step_rows.tolist()) == list(range(len(rows)))
            expect_equal(batch, permuted, state)
        history.advance(state, rows)


def test_padding_is_defined_and_harmless(make_step: Any, make_row: Any) -> None:
    """R4.53, R4.54, P4.13: -1 slots, null blocks, flat query offsets, also after a larger step."""
    state, builder = fresh()
    rows = [make_row(i, [1] * 8, [2 * i + 1, 2 * i + 2]) for i in range(3)]
    step = make_step(0, [(i, 1, 0, 8, True) for i in range(3)], new_rows=rows)
    apply(state, step)
    builder.build(step)
    small = make_step(1, [(1, 1, 7, 1, True)])
    batch = builder.build(small, pad_tokens=4, pad_rows=3)
    assert batch.num_tokens == 1
    assert batch.slot_mappings[0].tolist() == [4 * 4 + 3, *[UNWRITTEN_SLOT] * 3]
    assert batch.token_ids.tolist() == [1, 0, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 1, 1, 1]
    assert batch.seq_lens.tolist() == [8, 0, 0]
    assert batch.block_tables[0][1:].sum() == 0


def test_blocks_appear_split_in_the_kernel_table(make_step: Any, make_row: Any) -> None:
    """R1.45: manager block b is kernel blocks 2b and 2b + 1; slots do not change."""
    state, builder = fresh(kernel_blocks=2)
    step = make_step(0, [(0, 1, 0, 6, True)], new_rows=[make_row(0, [1] * 6, [5, 3])])
    apply(state, step)
    batch = builder.build(step)
    assert batch.block_tables[0][0, :4].tolist() == [10, 11, 6, 7]
    assert batch.slot_mappings[0].tolist() == [20, 21, 22, 23, 12, 13]


def test_each_group_has_its_own_tables_and_slots(make_row: Any) -> None:
    """R4.50, R4.51: the same tokens, mapped by each group's block size and blocks."""
    state = SlotState(NUM_SLOTS, MAX_LEN, [2, 4])
    builder = InputBuilder(state, MAX_TOKENS, torch.device("cpu"))

    def ints(*values: int) -> np.ndarray:
        return np.asarray(values, dtype=np.int32)

    row = msgspec.structs.replace(make_row(1, [9] * 6, []), block_ids=(ints(5, 3, 8), ints(2, 7)))
    step = SchedulerOutput(
        step_id=0,
        slots=ints(1),
        generations=ints(1),
        num_computed_tokens=ints(1),
        num_scheduled_tokens=ints(5),
        samples=np.asarray([True]),
        new_rows=(row,),
        new_blocks=(BlockUpdate(ints(0), ints()), BlockUpdate(ints(0), ints())),
        finished_slots=ints(),
        preempted_slots=ints(),
        blocks_to_zero=ints(),
        num_common_prefix_blocks=(0, 0),
        num_tokens=5,
    )
    apply(state, step)
    batch = builder.build(step)
    assert batch.slot_mappings[0].tolist() == [11, 6, 7, 16, 17]
    assert batch.slot_mappings[1].tolist() == [9, 10, 11, 28, 29]
    assert batch.block_tables[0][0, :3].tolist() == [5, 3, 8]
    assert batch.block_tables[1][0, :2].tolist() == [2, 7]


def test_a_step_over_the_token_limit_names_both_numbers(make_step: Any, make_row: Any) -> None:
    state, builder = fresh()
    step = make_step(0, [(0, 1, 0, 25, True)], new_rows=[make_row(0, [1] * 25, range(1, 8))])
    apply(state, step)
    with pytest.raises(RuntimeError, match="25 tokens, the worker was sized for 24"):
        builder.build(step)
