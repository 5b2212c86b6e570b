"""Slots: every refusal names what is wrong, and nothing of an earlier owner remains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.step import BlockUpdate, TokenUpdate
from hardpoint_torch_runtime.runner.slot_state import BlockTable, SlotState


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@pytest.fixture
def state() -> SlotState:
    return SlotState(3, 16, [4])


def test_entering_sets_every_field(state: SlotState, make_row: Any) -> None:
    state.enter(make_row(1, [7, 8, 9], [4, 2], generation=5, num_prompt_tokens=2))
    assert state.occupied.tolist() == [False, True, False]
    assert state.token_ids[1, :3].tolist() == [7, 8, 9]
    assert (state.num_tokens[1], state.num_prompt_tokens[1], state.generations[1]) == (3, 2, 5)
    assert state.tables[0].ids[1].tolist()[:3] == [4, 2, 0]


def test_a_shorter_owner_leaves_no_blocks_of_a_longer_one(state: SlotState, make_row: Any) -> None:
    """Class 43, R4.54."""
    state.enter(make_row(0, [1] * 12, [1, 2, 3]))
    state.release(ints(0))
    assert state.tables[0].ids[0].sum() == 0
    state.enter(make_row(0, [1], [9], generation=2))
    assert state.tables[0].ids[0].tolist()[:3] == [9, 0, 0]


def test_a_replaced_table_holds_nothing_of_the_former_one() -> None:
    """R4.54, without a release in between."""
    table = BlockTable(1, 4, 4)
    table.replace(0, ints(1, 2, 3))
    table.replace(0, ints(9))
    assert (table.ids[0].tolist(), table.counts.tolist()) == ([9, 0, 0, 0], [1])


def test_releasing_an_empty_slot_is_harmless(state: SlotState) -> None:
    state.release(ints(2, 1))
    state.release(ints())
    assert not state.occupied.any()


def test_blocks_are_appended_per_row(state: SlotState, make_row: Any) -> None:
    state.enter(make_row(0, [1], [1]))
    state.enter(make_row(2, [1], [2]))
    state.append_blocks(ints(2, 0), [BlockUpdate(ints(2, 1), ints(7, 8, 9))])
    assert state.tables[0].ids[0, :2].tolist() == [1, 9]
    assert state.tables[0].ids[2, :3].tolist() == [2, 7, 8]
    assert state.tables[0].counts.tolist() == [2, 0, 3]


def test_a_held_slot_cannot_be_entered(state: SlotState, make_row: Any) -> None:
    state.enter(make_row(0, [1], [1]))
    with pytest.raises(RuntimeError, match=r"slot 0 is handed to request late .* still held"):
        state.enter(make_row(0, [1], [2], request_id="late"))


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_out_of_range_is_refused(state: SlotState, make_row: Any, slot: int) -> None:
    with pytest.raises(RuntimeError, match=r"outside 0\.\.2"):
        state.enter(make_row(slot, [1], [1]))


def test_too_many_tokens_or_blocks_are_refused(state: SlotState, make_row: Any) -> None:
    with pytest.raises(RuntimeError, match="18 tokens, the slot holds 17"):
        state.enter(make_row(0, [1] * 18, [1]))
    with pytest.raises(RuntimeError, match="given 7 blocks of 4 tokens, but its table holds 6"):
        state.enter(make_row(1, [1], range(1, 8)))
    state.enter(make_row(2, [1], [1]))
    with pytest.raises(RuntimeError, match="slot 2 was given 7 blocks"):
        state.append_blocks(ints(2), [BlockUpdate(ints(6), ints(2, 3, 4, 5, 6, 7))])


def test_a_stale_generation_is_recognized(state: SlotState, make_row: Any) -> None:
    state.enter(make_row(0, [1], [1], generation=4))
    state.check_rows(ints(0), ints(4))
    with pytest.raises(RuntimeError, match="generation 3, but the slot is held by generation 4"):
        state.check_rows(ints(0), ints(3))


def test_tokens_learned_elsewhere_are_appended_and_own_ones_skipped(state: SlotState, make_row: Any) -> None:
    for slot in range(3):
        state.enter(make_row(slot, [1] * (slot + 1), [1]))
    state.append_known(ints(2, 0, 1), TokenUpdate(ints(2, 1, 3), ints(7, 8, -1, 4, -1, 5)))
    assert state.num_tokens.tolist() == [1, 4, 5]
    assert state.token_ids[2, :5].tolist() == [1, 1, 1, 7, 8]
    assert state.token_ids[1, :4].tolist() == [1, 1, 4, 5]
    state.append_known(ints(0), TokenUpdate(ints(1), ints(-1)))
    assert state.num_tokens[0] == 1


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_tokens_under_way_are_filled_in_as_many_as_there_are(hand_builders: Any, data: st.DataObject) -> None:
    """R4.37: counted when they are submitted, as if all drafts were right; written, in order, when they arrive, while
    later ones are still under way."""
    _, make_row = hand_builders
    state = SlotState(3, 200, [4])
    lists = [[slot] for slot in range(3)]
    for slot in range(3):
        state.enter(make_row(slot, lists[slot], [1]))
    under_way: list[tuple[np.ndarray, np.ndarray, list[list[int]]]] = []
    refused = [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 12))):
        slots = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        runs = [data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)) for _ in slots]
        expected = ints(*(len(run) + data.draw(st.integers(0, 2)) for run in runs))
        state.expect(ints(*slots), expected)
        under_way.append((ints(*slots), expected, runs))
        for _ in range(data.draw(st.integers(0, len(under_way)))):
            owners, most, arrived = under_way.pop(0)
            state.resolve(owners, most, ints(*map(len, arrived)), ints(*(token for run in arrived for token in run)))
            for slot, number, run in zip(owners.tolist(), most.tolist(), arrived, strict=True):
                lists[slot] += run
                refused[slot] += number - len(run)
        for slot in range(3):
            pending = sum(int(most[owners == slot].sum()) for owners, most, _ in under_way)
            assert state.num_pending[slot] == pending
            assert state.num_tokens[slot] == len(lists[slot]) + pending
            assert state.token_ids[slot, : len(lists[slot])].tolist() == lists[slot]
            assert state.num_refused[slot] == refused[slot]
    state.release(ints(0, 1, 2))
    assert not state.num_pending.any()
    assert not state.num_refused.any()


def test_guesses_lie_behind_the_known_tokens_and_do_not_count(state: SlotState, make_row: Any) -> None:
    state.enter(make_row(0, [7, 8], [1]))
    state.enter(make_row(2, [9], [2]))
    state.write_ahead(ints(2, 0), ints(2, 1), ints(4, 5, 6))
    assert state.num_tokens.tolist() == [2, 0, 1]
    assert (state.token_ids[0, 2], state.token_ids[2, 1:3].tolist()) == (6, [4, 5])
    state.append_runs(ints(0, 2), ints(2, 1), ints(1, 2, 3))
    assert state.token_ids[0, :4].tolist() == [7, 8, 1, 2]
    assert state.token_ids[2, :2].tolist() == [9, 3]
    with pytest.raises(RuntimeError, match="slot 0 would hold 18 tokens, but has room for 17"):
        state.write_ahead(ints(0), ints(14), ints(*range(14)))
