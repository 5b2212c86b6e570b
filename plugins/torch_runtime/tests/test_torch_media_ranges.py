"""Media that see all of themselves: which ranges a step tells attention of, and what is never computed in part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from hardpoint.interfaces.request import Feature
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.input_batch import InputBatch
from hardpoint_torch_runtime.runner.media_ranges import MediaRanges, refuse_ranges
from hardpoint_torch_runtime.runner.prompt_items import PromptItems


def items(*places: tuple[int, int]) -> tuple[Feature, ...]:
    return tuple(
        Feature(modality="image", content_hash=f"at {offset}", offset=offset, length=length)
        for offset, length in places
    )


def entered(prompts: PromptItems, slot: int, *places: tuple[int, int]) -> None:
    prompts.enter(cast(NewRow, SimpleNamespace(slot=slot, features=items(*places))))


def batch(*rows: tuple[int, int, int], **fields: object) -> InputBatch:
    """Rows by slot, tokens computed, and tokens of this step."""
    slots, computed, scheduled = np.asarray(rows, dtype=np.int32).reshape(-1, 3).T
    known = {"num_rows": len(rows), "slots": slots, "num_computed": computed, "num_scheduled": scheduled}
    return cast(InputBatch, SimpleNamespace(**{**known, "mm_ranges": None, **fields}))


def test_a_step_is_told_of_what_its_tokens_lie_in() -> None:
    prompts = PromptItems(4)
    ranges = MediaRanges(prompts)
    assert ranges.of_rows(batch((0, 0, 9))) is None
    entered(prompts, 1, (2, 4), (8, 3))
    entered(prompts, 3, (0, 5))
    found = ranges.of_rows(batch((1, 0, 6), (0, 3, 1), (3, 2, 7)))
    assert found == (((2, 6),), (), ((0, 5),)), "also of one that a cached prefix ends inside"
    assert ranges.of_rows(batch((1, 6, 2), (3, 5, 1))) is None
    assert ranges.of_rows(batch((1, 6, 9))) == (((8, 11),),)
    assert ranges.of_rows(batch((1, 11, 1))) is None
    prompts.release(np.asarray([1, 2], dtype=np.int32))
    assert ranges.of_rows(batch((1, 0, 6), (3, 0, 5))) == ((), ((0, 5),))
    entered(prompts, 3)
    assert ranges.of_rows(batch((1, 0, 6), (3, 0, 5))) is None


@pytest.mark.parametrize(
    ("computed", "count", "is_cut"), [(0, 2, False), (0, 4, True), (0, 6, False), (4, 1, True), (4, 2, False)]
)
def test_a_step_that_ends_inside_an_item_is_a_fault(computed: int, count: int, is_cut: bool) -> None:
    prompts = PromptItems(2)
    ranges = MediaRanges(prompts)
    entered(prompts, 1, (2, 4))
    rows = (0, 0, 3), (1, computed, count)
    found = ranges.cut(batch(*rows, mm_ranges=ranges.of_rows(batch(*rows))))
    assert list(found) == ([1] if is_cut else [])
    if is_cut:
        assert f"the item at positions 2 to 5 was cut at {computed + count}" in found[1]


def test_items_larger_than_a_step_or_without_a_gap_are_refused() -> None:
    assert refuse_ranges((), 8) is None
    assert refuse_ranges(items((0, 8), (9, 8)), 8) is None
    assert "item at position 9 has 9 tokens" in str(refuse_ranges(items((0, 8), (9, 9)), 8))
    assert "begins, at position 12" in str(refuse_ranges(items((0, 8), (9, 3), (12, 2)), 8))
