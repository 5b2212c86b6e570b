"""Media whose tokens see each other in both directions: where they are, and that no step computes a part of one.

A token in the middle of an item attends to the item's end, so all of it has to be in the step that computes its
beginning. What was computed so is found again by the item's content: a cached prefix may end inside an item, and the
rest of it sees the same keys as it did before.
"""

from __future__ import annotations

from itertools import pairwise

from hardpoint.interfaces.request import Feature
from hardpoint_torch_runtime.runner.input_batch import InputBatch
from hardpoint_torch_runtime.runner.prompt_items import PromptItems

__all__ = ["MediaRanges", "refuse_ranges"]

Ranges = tuple[tuple[int, int], ...]


def refuse_ranges(features: tuple[Feature, ...], max_tokens: int) -> str | None:
    """Why items of a prompt cannot each see all of themselves in steps of at most ``max_tokens``."""
    for feature in features:
        if feature.length > max_tokens:
            return (
                f"the item at position {feature.offset} has {feature.length} tokens, which this model computes in one "
                f"step; --max-num-batched-tokens allows {max_tokens}"
            )
    for earlier, later in pairwise(features):
        if earlier.offset + earlier.length == later.offset:
            # Those who made the model tell items apart by what is between them.
            return (
                f"an item ends where the next one begins, at position {later.offset}; this model takes such items for "
                "one, so there must be a token between them"
            )
    return None


class MediaRanges:
    """Half-open ranges of positions, one for each of the ``items`` of prompts."""

    def __init__(self, items: PromptItems) -> None:
        self._items = items

    def of_rows(self, batch: InputBatch) -> tuple[Ranges, ...] | None:
        """Of each row the ranges that tokens of this step lie in; None where no row has any."""
        found: list[Ranges] = [()] * batch.num_rows
        for row in self._items.rows_ahead(batch):
            first = int(batch.num_computed[row])
            last = first + int(batch.num_scheduled[row])
            ranges = ((item.offset, item.offset + item.length) for item in self._items.of(int(batch.slots[row])))
            found[row] = tuple((begin, end) for begin, end in ranges if begin < last and first < end)
        return tuple(found) if any(found) else None

    def cut(self, batch: InputBatch) -> dict[int, str]:
        """By slot why its row cannot be right: the step ends inside an item, whose rest earlier tokens should see.

        Looks at ``batch.mm_ranges``.
        """
        faults = {}
        for row, ranges in enumerate(batch.mm_ranges or ()):
            last = int(batch.num_computed[row]) + int(batch.num_scheduled[row])
            if ranges and ranges[-1][1] > last:
                begin, end = ranges[-1]
                faults[int(batch.slots[row])] = (
                    f"the item at positions {begin} to {end - 1} was cut at {last}, but this model computes items as a "
                    "whole; use a scheduler that keeps them whole"
                )
        return faults
