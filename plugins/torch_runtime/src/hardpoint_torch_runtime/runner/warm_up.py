"""A made-up request taken through the real step, so that the first real one meets no first-call costs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID
from hardpoint.interfaces.request import Feature, Int32Array, PoolingParams, SamplingParams
from hardpoint.interfaces.step import BlockUpdate, NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.media_stage import MediaModel
from hardpoint_torch_runtime.runner.runner import ModelRunner

__all__ = ["run_warm_up"]

_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=0))
"""Greedy, and the usual random path. Seeded, so that the engine's own stream of draws is not touched."""


def run_warm_up(runner: ModelRunner, num_tokens: int) -> None:
    """A prefill of ``num_tokens`` and a decode, greedy and random. All KV goes to the null block, cleared afterwards.

    A model that only pools embeds a prompt instead. Call it before the first step; the slots are free again afterwards.
    """
    if runner.flags.only_pools:
        row = msgspec.structs.replace(_row(runner, 0, num_tokens, _SAMPLINGS[0]), task="embed", pooling=PoolingParams())
        step = _step(runner, [0], computed=[0], scheduled=[num_tokens], rows=(row,))
        runner.execute(msgspec.structs.replace(step, samples=np.zeros(1, dtype=np.bool_)))
        runner.execute(_step(runner, finished=[0]))
        return
    for rows in _passes(runner, num_tokens):
        slots = range(len(rows))
        starts = [len(row.token_ids) for row in rows]
        runner.execute(_step(runner, slots, computed=[0] * len(rows), scheduled=starts, rows=rows))
        runner.execute(_step(runner, slots, computed=starts, scheduled=[1] * len(rows)))
        runner.execute(_step(runner, finished=slots))
    runner.kv.zero_blocks(_ints(NULL_BLOCK_ID))


def _passes(runner: ModelRunner, num_tokens: int) -> list[tuple[NewRow, ...]]:
    """What to compute together: everything, where the worker holds several rows, to take few forwards."""
    greedy, random = _SAMPLINGS
    if num_tokens < 2 or runner.state.slots.num_slots < 2:
        return [(_row(runner, 0, num_tokens, sampling),) for sampling in _SAMPLINGS]
    return [(_row(runner, 0, num_tokens - 1, greedy), _row(runner, 1, 1, random))]


def _ints(*values: int) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _row(runner: ModelRunner, slot: int, num_tokens: int, sampling: SamplingParams) -> NewRow:
    lengths = (num_tokens + 1 if most is None else most for most in runner.groups.foreign_tokens)
    blocks = tuple(
        np.full(-(-length // size), NULL_BLOCK_ID, dtype=np.int32)
        for length, size in zip(lengths, runner.groups.block_sizes, strict=True)
    )
    model = runner.model
    features: tuple[Feature, ...] = ()
    # A decoder that sees media among its tokens computes text without any.
    if not isinstance(model, MediaModel) and isinstance(model, EncoderModel):
        features = (model.example_input(num_tokens),)
    return NewRow(
        request_id=f"warm-up-{slot}",
        slot=slot,
        generation=0,
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        block_ids=blocks,
        sampling=sampling,
        features=features,
    )


def _step(
    runner: ModelRunner,
    slots: Sequence[int] = (),
    *,
    computed: Sequence[int] = (),
    scheduled: Sequence[int] = (),
    rows: tuple[NewRow, ...] = (),
    finished: Sequence[int] = (),
) -> SchedulerOutput:
    none = BlockUpdate(np.zeros(len(slots), dtype=np.int32), _ints())
    return SchedulerOutput(
        step_id=0,
        slots=_ints(*slots),
        generations=np.zeros(len(slots), dtype=np.int32),
        num_computed_tokens=_ints(*computed),
        num_scheduled_tokens=_ints(*scheduled),
        samples=np.ones(len(slots), dtype=np.bool_),
        new_rows=rows,
        new_blocks=(none,) * len(runner.groups.groups),
        finished_slots=_ints(*finished),
        preempted_slots=_ints(),
        blocks_to_zero=_ints(),
        num_common_prefix_blocks=(0,) * len(runner.groups.groups),
        num_tokens=sum(scheduled),
    )
