"""A made-up request taken through the real step, so that the first real one meets no first-call costs."""

from __future__ import annotations

import msgspec
import numpy as np

from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID
from hardpoint.interfaces.request import Int32Array, PoolingParams, SamplingParams
from hardpoint.interfaces.step import BlockUpdate, NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.runner import ModelRunner

__all__ = ["run_warm_up"]

_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=0))
"""Greedy, and the usual random path. Seeded, so that the engine's own stream of draws is not touched."""


def run_warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """A prefill of ``num_tokens`` and a decode, greedy and random. All KV goes to the null block, cleared afterwards.

    A model that only pools embeds a prompt instead. Call it before the first step; slot 0 is free again afterwards.
    """
    if runner.flags.only_pools:
        row = msgspec.structs.replace(_row(runner, num_tokens, _SAMPLINGS[0]), task="embed", pooling=PoolingParams())
        step = _step(runner, num_computed=0, num_scheduled=num_tokens, row=row)
        runner.execute(msgspec.structs.replace(step, samples=np.zeros(1, dtype=np.bool_)))
        runner.execute(_step(runner, num_computed=0, num_scheduled=0, finished=True))
        return
    for sampling in _SAMPLINGS:
        runner.execute(_step(runner, num_computed=0, num_scheduled=num_tokens, row=_row(runner, num_tokens, sampling)))
        runner.execute(_step(runner, num_computed=num_tokens, num_scheduled=1))
        runner.execute(_step(runner, num_computed=0, num_scheduled=0, finished=True))
    runner.kv.zero_blocks(_ints(NULL_BLOCK_ID))


def _ints(*values: int) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _row(runner: ModelRunner, num_tokens: int, sampling: SamplingParams) -> NewRow:
    blocks = tuple(
        np.full(-(-(num_tokens + 1) // size), NULL_BLOCK_ID, dtype=np.int32) for size in runner.groups.block_sizes
    )
    return NewRow(
        request_id="warm-up",
        slot=0,
        generation=0,
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        block_ids=blocks,
        sampling=sampling,
    )


def _step(
    runner: ModelRunner, *, num_computed: int, num_scheduled: int, row: NewRow | None = None, finished: bool = False
) -> SchedulerOutput:
    slots = _ints(0) if num_scheduled else _ints()
    none = BlockUpdate(np.zeros(len(slots), dtype=np.int32), _ints())
    return SchedulerOutput(
        step_id=0,
        slots=slots,
        generations=slots,
        num_computed_tokens=np.full(len(slots), num_computed, dtype=np.int32),
        num_scheduled_tokens=np.full(len(slots), num_scheduled, dtype=np.int32),
        samples=np.ones(len(slots), dtype=np.bool_),
        new_rows=() if row is None else (row,),
        new_blocks=(none,) * len(runner.groups.groups),
        finished_slots=_ints(0) if finished else _ints(),
        preempted_slots=_ints(),
        blocks_to_zero=_ints(),
        num_common_prefix_blocks=(0,) * len(runner.groups.groups),
        num_tokens=num_scheduled,
    )
