"""Captures every shape in which rows decode before the first request, by made-up steps through the real runner."""

from __future__ import annotations

import numpy as np

from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID
from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.step import BlockUpdate, NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.runner import ModelRunner

__all__ = ["capture_shapes"]


def capture_shapes(runner: ModelRunner) -> int:
    """How many shapes there are now. All KV goes to the null block, which is cleared afterwards.

    Call it before the first request; all slots are free again when it returns. The largest shape comes first, so that
    the others find room in its memory.
    """
    shapes, graphs = runner.forwards.shapes, runner.forwards.graphs
    if shapes is None or graphs is None:
        return 0
    for num_rows in reversed(shapes.uniform_rows):
        runner.execute(_decodes(runner, num_rows, shapes.query_len))
        runner.execute(_step(runner, 0, 0, finished=num_rows))
    runner.kv.zero_blocks(np.array([NULL_BLOCK_ID], dtype=np.int32))
    return len(graphs.descriptors)


def _decodes(runner: ModelRunner, num_rows: int, query_len: int) -> SchedulerOutput:
    """Rows that have computed one token, and go on with ``query_len`` of them."""
    blocks = tuple(
        np.full(-(-(1 + query_len) // size), NULL_BLOCK_ID, dtype=np.int32) for size in runner.groups.block_sizes
    )
    rows = tuple(
        NewRow(
            request_id=f"capture-{slot}",
            slot=slot,
            generation=0,
            token_ids=np.zeros(1 + query_len, dtype=np.int32),
            num_prompt_tokens=1 + query_len,
            block_ids=blocks,
            sampling=SamplingParams(temperature=0.0),
        )
        for slot in range(num_rows)
    )
    return _step(runner, num_rows, query_len, rows)


def _step(
    runner: ModelRunner, num_rows: int, query_len: int, rows: tuple[NewRow, ...] = (), *, finished: int = 0
) -> SchedulerOutput:
    def filled(value: int) -> np.ndarray:
        return np.full(num_rows, value, dtype=np.int32)

    nothing = np.zeros(0, dtype=np.int32)
    return SchedulerOutput(
        step_id=0,
        slots=np.arange(num_rows, dtype=np.int32),
        generations=filled(0),
        num_computed_tokens=filled(1),
        num_scheduled_tokens=filled(query_len),
        samples=np.ones(num_rows, dtype=np.bool_),
        new_rows=rows,
        new_blocks=(BlockUpdate(filled(0), nothing),) * len(runner.groups.groups),
        finished_slots=np.arange(finished, dtype=np.int32),
        preempted_slots=nothing,
        blocks_to_zero=nothing,
        num_common_prefix_blocks=(0,) * len(runner.groups.groups),
        num_tokens=num_rows * query_len,
    )
