"""A batch in two halves gives what the whole gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.attention import BlockSizeRule, GraphSupport
from hardpoint_torch_runtime import get_forward_context, has_forward_context
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.forward_pass import ForwardPass
from hardpoint_torch_runtime.runner.micro_batch import MicroBatches, cut_row
from hardpoint_torch_runtime.runner.step_shape import StepShapes

CPU = torch.device("cpu")
PROMPTS = {"one": [7], "seven": [3, 1, 4, 1, 5, 9, 2], "long": [(5 * i + 3) % 30 for i in range(19)], "two": [8, 8]}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=12))
def test_the_cut_is_the_boundary_nearest_to_the_middle(num_scheduled: list[int]) -> None:
    row = cut_row(np.array(num_scheduled, dtype=np.int32))
    if len(num_scheduled) < 2:
        assert row is None
        return
    assert row is not None

    def gap(boundary: int) -> int:
        return abs(sum(num_scheduled[:boundary]) - sum(num_scheduled[boundary:]))

    assert 0 < row < len(num_scheduled)
    assert gap(row) == min(gap(boundary) for boundary in range(1, len(num_scheduled)))


def forwards_in_halves(world: Any, worker: Any, kv_plan: Any, *, shapes: StepShapes | None = None) -> ForwardPass:
    model, runner = worker.loaded.model, worker.runner
    specs = dict(model.kv_cache_specs())
    plan = kv_plan(specs, world.num_blocks)
    sets = [
        AttentionGroups(
            plan,
            plan.layer_specs(specs),
            world.backend,
            BlockSizeRule(1),
            max_rows=world.max_seqs,
            max_tokens=world.max_tokens,
            max_model_len=world.max_len,
            device=CPU,
        )
        for _ in range(2)
    ]
    halves = MicroBatches((sets[0], sets[1]), max_rows=world.max_seqs, device=CPU)
    return ForwardPass(model, sets[0], runner.kv, runner.state.embeddings, micro_batches=halves, shapes=shapes)


@pytest.mark.parametrize("pads", [False, True], ids=["as it is", "padded"])
@pytest.mark.parametrize("max_tokens", [32, 5], ids=["whole prompts", "chunks of 5"])
def test_halves_give_the_tokens_of_the_whole(world: Any, kv_plan: Any, max_tokens: int, pads: bool) -> None:
    """R4.60: prefills, chunks and decodes; exactly two maps of metadata, and a scope for each half within that of the
    whole."""
    requests = [world.engine_request(name, prompt) for name, prompt in PROMPTS.items()]
    expected = world.generate(world.start(), requests, max_tokens=max_tokens)
    worker = world.start()
    shapes = StepShapes(sizes=(8, 40), support=GraphSupport.NEVER, max_rows=6, is_piecewise=True) if pads else None
    worker.runner.forwards = forwards_in_halves(world, worker, kv_plan, shapes=shapes)
    seen = []
    plain = worker.loaded.model.forward

    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        seen.append((context.num_tokens, len(token_ids), context.half_metadata is None))
        if context.padding_mask is not None:
            assert context.padding_mask.tolist() == [token >= context.num_tokens for token in range(len(token_ids))]
        hidden: torch.Tensor = plain(token_ids, positions)
        return hidden

    worker.loaded.model.forward = forward
    assert world.generate(worker, requests, max_tokens=max_tokens) == expected
    assert {is_a_half for _, _, is_a_half in seen} == {True}
    is_padded = [num_tokens < count for num_tokens, count, _ in seen]
    assert any(is_padded) == pads
    assert len(seen) > len(expected["one"])
    assert not has_forward_context()


def test_each_half_sees_its_rows_alone(world: Any, kv_plan: Any, make_step: Any, make_row: Any) -> None:
    """R4.60, R4.62: the pair belongs to the whole's context, its maps to those of the halves."""
    worker = world.start()
    forwards = worker.runner.forwards = forwards_in_halves(world, worker, kv_plan)
    assert forwards.micro_batches is not None
    contexts: list[Any] = []
    plain = worker.loaded.model.forward

    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        contexts.append(get_forward_context())
        hidden: torch.Tensor = plain(token_ids, positions)
        return hidden

    worker.loaded.model.forward = forward
    rows = [make_row(0, [3, 4, 5], [1]), make_row(1, [6, 7], [2]), make_row(2, [9], [3])]
    scheduled = [(0, 1, 0, 3, True), (1, 1, 0, 2, True), (2, 1, 0, 1, True)]
    worker.execute(make_step(0, scheduled, new_rows=rows))
    first, second = (context.attention_metadata["layers.0.attn"] for context in contexts)
    assert (first.num_rows, first.num_tokens, first.max_query_len, first.max_seq_len) == (1, 3, 3, 3)
    assert (second.num_rows, second.num_tokens, second.max_query_len, second.max_seq_len) == (2, 3, 2, 2)
    assert first.query_start_loc.tolist() == [0, 3]
    assert second.query_start_loc.tolist() == second.query_start_loc_cpu.tolist() == [0, 2, 3]
    assert second.slot_mapping.tolist() == [8, 9, 12]
    assert second.block_table[:, 0].tolist() == [2, 3]


def test_one_row_is_not_cut(world: Any, kv_plan: Any) -> None:
    request = world.engine_request("alone", PROMPTS["long"])
    expected = world.generate(world.start(), [request])
    worker = world.start()
    worker.runner.forwards = forwards_in_halves(world, worker, kv_plan)
    assert world.generate(worker, [request]) == expected


def test_a_half_that_fails_leaves_no_context(world: Any, kv_plan: Any, make_step: Any, make_row: Any) -> None:
    """I4.5: neither its own nor that of the whole."""
    worker = world.start()
    worker.runner.forwards = forwards_in_halves(world, worker, kv_plan)
    rows = [make_row(0, [3, 4], [1]), make_row(1, [99, 7], [2])]
    with pytest.raises(IndexError):
        worker.execute(make_step(0, [(0, 1, 0, 2, True), (1, 1, 0, 2, True)], new_rows=rows))
    assert not has_forward_context()
