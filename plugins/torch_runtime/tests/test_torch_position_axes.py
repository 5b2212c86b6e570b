"""Positions along several axes: computed at entry, cut into steps, continued behind the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.input_batch import InputBuilder
from hardpoint_torch_runtime.runner.position_axes import AxisPositions, PositionAxes
from hardpoint_torch_runtime.runner.slot_state import SlotState

CPU = torch.device("cpu")
AXES, SLOTS, MAX_TOKENS = 3, 4, 24


class Grid:
    """Every prompt begins with two tokens of text, then holds an image of two rows and two columns, then text."""

    num_position_axes = AXES

    def position_rows(self, row: NewRow) -> np.ndarray:
        count = row.num_prompt_tokens
        text = np.tile(np.arange(count), (AXES, 1))
        if count >= 6:
            text[:, 2:6] = [[2, 2, 2, 2], [2, 2, 3, 3], [2, 3, 2, 3]]
            text[:, 6:] = np.arange(4, count - 2)
        return text


class Plain:
    """All axes agree, as for a text without images."""

    num_position_axes = AXES

    def position_rows(self, row: NewRow) -> np.ndarray:
        return np.tile(np.arange(row.num_prompt_tokens, dtype=np.int32), (AXES, 1))


def build(model: AxisPositions) -> tuple[SlotState, InputBuilder, PositionAxes]:
    state = SlotState(SLOTS, 40, [4])
    return state, InputBuilder(state, MAX_TOKENS, CPU), PositionAxes(model, SLOTS, MAX_TOKENS, CPU)


def enter(state: SlotState, axes: PositionAxes, row: NewRow) -> None:
    state.enter(row)
    axes.enter(row)


def test_prompts_are_cut_and_continued(make_step: Any, make_row: Any) -> None:
    """R4.33: positions behind the prompt go on from the largest one, on all axes alike."""
    state, builder, axes = build(Grid())
    enter(state, axes, make_row(0, [1] * 8, [1, 2, 3]))
    enter(state, axes, make_row(2, [1] * 3, [4, 5]))
    whole = [[0, 1, 2, 2, 2, 2, 4, 5], [0, 1, 2, 2, 3, 3, 4, 5], [0, 1, 2, 3, 2, 3, 4, 5]]
    first = axes.positions(builder.build(make_step(0, [(0, 1, 0, 5, False), (2, 1, 0, 3, True)])))
    assert first.tolist() == [[*row[:5], 0, 1, 2] for row in whole]
    state.append_tokens(np.asarray([2], dtype=np.int32), np.asarray([9], dtype=np.int32))
    second = axes.positions(builder.build(make_step(1, [(2, 1, 3, 1, True), (0, 1, 5, 3, True)])))
    assert second.tolist() == [[3, *row[5:]] for row in whole]
    state.append_tokens(np.asarray([0, 2], dtype=np.int32), np.asarray([9, 9], dtype=np.int32))
    third = axes.positions(
        builder.build(make_step(2, [(0, 1, 8, 1, True), (2, 1, 4, 1, True)]), pad_tokens=4, pad_rows=2)
    )
    assert third.tolist() == [[6, 4, 0, 0]] * AXES
    assert third.data_ptr() == first.data_ptr(), "R4.55: the same memory in every step"


def test_a_resumed_row_gets_its_outputs_where_they_were(make_step: Any, make_row: Any) -> None:
    """R4.33: its prompt ends where it ended, whatever was generated behind it."""
    state, builder, axes = build(Grid())
    enter(state, axes, make_row(1, [1] * 10, [1, 2, 3], num_prompt_tokens=7, resumed=True))
    found = axes.positions(builder.build(make_step(0, [(1, 1, 4, 6, True)])))
    assert found.tolist() == [[2, 2, 4, 5, 6, 7], [3, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equal_axes_are_plain_positions(hand_builders: Any, seed: int) -> None:
    """R4.33: for any rows, chunks and order."""
    make_step, make_row = hand_builders
    random = np.random.default_rng(seed)
    state, builder, axes = build(Plain())
    rows = []
    for slot in random.permutation(SLOTS).tolist():
        length, prompt = int(random.integers(1, 12)), 0
        prompt = int(random.integers(1, length + 1))
        enter(state, axes, make_row(slot, [1] * length, range(1, 4), num_prompt_tokens=prompt))
        start = int(random.integers(0, length))
        rows.append((slot, 1, start, min(int(random.integers(1, length - start + 1)), 6), False))
    batch = builder.build(make_step(0, rows), reorder_threshold=int(random.integers(1, 4)))
    found = axes.positions(batch)
    assert torch.equal(found, batch.positions.expand(AXES, -1))


@pytest.mark.parametrize("shape", [(AXES, 4), (AXES, 9), (2, 6), (18,)])
def test_positions_of_another_shape_name_the_request(make_row: Any, shape: tuple[int, ...]) -> None:
    class Odd(Plain):
        def position_rows(self, row: NewRow) -> np.ndarray:
            return np.zeros(shape, dtype=np.int64)

    _, _, axes = build(Odd())
    row = make_row(0, [1] * 8, [1, 2], num_prompt_tokens=6, request_id="odd")
    with pytest.raises(ModelFormatError, match=r"request odd.*\[3, 6 to 8\]"):
        axes.enter(row)


def test_a_model_with_equal_axes_generates_what_it_generates_with_one(world: Any, make_row: Any) -> None:
    """R4.33: the whole worker, whose model reads one of its axes; with and without waiting for results."""
    requests = [world.engine_request(f"r{i}", [3 + i, 5, 7, 9][: i + 1], max_tokens=5) for i in range(4)]
    expected = world.generate(world.start(), requests, max_tokens=3)
    tiny = world.plugins.factories["model", "TinyForCausalLM"]
    seen: list[tuple[int, ...]] = []

    def several(ctx: Any) -> Any:
        class Several(tiny):  # type: ignore[misc, valid-type]
            num_position_axes = AXES

            def position_rows(self, row: NewRow) -> np.ndarray:
                return Plain().position_rows(row)

            def forward(self, token_ids: Any, positions: Any, *rest: Any, **fields: Any) -> Any:
                seen.append(tuple(positions.shape[:-1]))
                return super().forward(token_ids, positions[1], *rest, **fields)

        return Several(ctx)

    world.plugins.factories["model", "TinyForCausalLM"] = several
    assert world.generate(world.start(), requests, max_tokens=3) == expected
    assert set(seen) == {(AXES,)}
