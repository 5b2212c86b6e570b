"""Slots: every refusal names what is wrong, and nothing of an earlier owner remains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    assert state.num_output_tokens(ints(1)).tolist() == [1]
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
