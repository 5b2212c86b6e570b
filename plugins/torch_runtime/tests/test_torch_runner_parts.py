"""What a runner is made of, what waits between forward and sampling, and the order in which state changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.interfaces.step import BlockUpdate, NewRow, RunnerOutput, SchedulerOutput, TokenUpdate
from hardpoint.interfaces.worker import ParallelSlice, PendingOutput
from hardpoint_testing_torch import FakeGraphBackend, FakeStreams
from hardpoint_torch_runtime.runner.assembly import RunnerParts
from hardpoint_torch_runtime.runner.deferred import Deferral, ForwardProducts
from hardpoint_torch_runtime.runner.extensions import RunnerExtension
from hardpoint_torch_runtime.runner.flags import RunnerFlags
from hardpoint_torch_runtime.runner.input_batch import InputBatch, InputBuilder
from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.runner.step_shape import StepShape
from hardpoint_torch_runtime.worker import TorchWorker, TorchWorkerOptions

PROMPT = [11, 12, 13, 14, 15, 16, 17]


class Worker(TorchWorker):
    """The installed worker with some parts replaced."""

    changes: dict[str, Any]

    def runner_parts(self) -> RunnerParts:
        return replace(super().runner_parts(), **self.changes)


def start(world: Any, options: TorchWorkerOptions | None = None, **changes: Any) -> Worker:
    worker = Worker(world.context(), options or TorchWorkerOptions())
    worker.changes = changes
    world.boot(worker)
    return worker


def taken(answer: Any) -> RunnerOutput:
    output = answer.result() if isinstance(answer, PendingOutput) else answer
    assert isinstance(output, RunnerOutput)
    return output


class Seat(RunnerExtension):
    """Notes what it is told."""

    def __init__(self, name: str, log: list[tuple[str, Any]]) -> None:
        self.name = name
        self.log = log

    def enter(self, row: NewRow) -> None:
        self.log.append((f"{self.name} enters", row.slot))

    def release(self, slots: np.ndarray) -> None:
        self.log.append((f"{self.name} releases", slots.tolist()))

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        self.log.append((f"{self.name} before forward", batch.num_tokens))

    def finish_step(self, step: SchedulerOutput) -> Any:
        return {"step": step.step_id} if self.name != "adapters" else None


@pytest.mark.parametrize("present", list(product([False, True], repeat=3)))
def test_features_are_seats_of_their_own(world: Any, make_step: Any, make_row: Any, present: Sequence[bool]) -> None:
    """R4.20: adapters, a KV connector and an encoder connector, in every combination, each at the same places."""
    log: list[tuple[str, Any]] = []
    names = [
        name
        for name, is_there in zip(("adapters", "kv_connector", "encoder_connector"), present, strict=True)
        if is_there
    ]
    worker = start(world, extensions=tuple(Seat(name, log) for name in names))
    step = make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2])])
    output = taken(worker.execute(step))
    assert log == [(f"{name} enters", 0) for name in names] + [(f"{name} before forward", 7) for name in names]
    assert output.extensions == {name: {"step": 0} for name in names if name != "adapters"}
    log.clear()
    empty = taken(worker.execute(make_step(1, finished=[0])))
    assert log == [(f"{name} releases", [0]) for name in names]
    assert empty.extensions == {name: {"step": 1} for name in names if name != "adapters"}


def test_a_step_ends_cleans_and_begins_in_this_order(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.30, R4.31, R4.35: the same request id ends and begins; blocks are cleared in between, before anything reads
    them; inputs come after all of it."""
    log: list[tuple[str, Any]] = []
    worker = start(world, extensions=(Seat("seat", log),))
    kv: Any = worker.runner.kv
    zero_blocks = kv.zero_blocks

    def zeroing(ids: np.ndarray) -> None:
        log.append(("zeroed", ids.tolist()))
        zero_blocks(ids)

    kv.zero_blocks = zeroing
    row = make_row(0, PROMPT, [1, 2], request_id="same")
    worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[row]))
    log.clear()
    again = make_row(0, PROMPT[:3], [3], request_id="same", generation=2)
    worker.execute(make_step(1, [(0, 2, 0, 3, True)], new_rows=[again], finished=[0], zero=[3]))
    assert log == [("seat releases", [0]), ("zeroed", [3]), ("seat enters", 0), ("seat before forward", 3)]


class Exchange:
    def __init__(self, *, tolerates_faults: bool) -> None:
        self.tolerates_faults = tolerates_faults
        self.num_checks = 0

    def check_ranks(self) -> None:
        self.num_checks += 1
        if self.num_checks > 1:
            raise RuntimeError("rank 3 is gone")


class TestFlags:
    def test_a_model_that_cannot_generate_only_pools(self, world: Any) -> None:
        """R4.21."""
        for tasks, only_pools in ((("generate",), False), (("generate", "embed"), False), (("embed",), True)):
            model = start(world).loaded.model
            model.info = msgspec.structs.replace(model.info, tasks=tasks)  # type: ignore[misc]
            assert RunnerFlags.settle(world.config(), model).only_pools is only_pools

    def test_prompts_as_embeddings_can_be_switched_off(self, world: Any, make_step: Any, make_row: Any) -> None:
        """R4.21: their requests end with a reason, others go on."""
        embeds = np.zeros((2, 16), dtype=np.float32)
        rows = [msgspec.structs.replace(make_row(0, [0, 0], [1]), prompt_embeds=embeds), make_row(1, [5, 6], [2])]
        step = make_step(0, [(0, 1, 0, 2, True), (1, 1, 0, 2, True)], new_rows=rows)
        output = taken(start(world, TorchWorkerOptions(prompt_embeddings=False)).execute(step))
        assert output.num_sampled.tolist() == [0, 1]
        assert "prompts given as embeddings are switched off" in output.failures[0].reason
        assert taken(start(world).execute(step)).num_sampled.tolist() == [1, 1]

    @pytest.mark.parametrize("tolerates", [False, True])
    @pytest.mark.parametrize("has_experts", [False, True])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_the_exchange_is_asked_only_where_experts_are_divided(
        self, world: Any, monkeypatch: pytest.MonkeyPatch, ranks: int, has_experts: bool, tolerates: bool
    ) -> None:
        """R4.21: data-parallel ranks, experts and tolerance, all three; without the first two it is not even made."""
        model = start(world).loaded.model
        asked: list[Exchange] = []

        def exchange() -> Exchange:
            asked.append(Exchange(tolerates_faults=tolerates))
            return asked[-1]

        layers = ("layers.0.moe",) if has_experts else ()
        context = dataclasses.make_dataclass("Context", ["moe_layers"])(layers)
        monkeypatch.setattr("hardpoint_torch_runtime.runner.flags.StaticContext.of", lambda model: context)
        config = world.config(parallel=ParallelSlice(data_parallel_size=ranks))
        flags = RunnerFlags.settle(config, model, exchange=exchange)
        assert len(asked) == int(ranks > 1 and has_experts)
        assert (flags.checked_exchange is not None) == (ranks > 1 and has_experts and tolerates)

    def test_lost_ranks_stop_the_step_before_its_forward(self, world: Any, make_step: Any, make_row: Any) -> None:
        """R4.21."""
        worker = start(world)
        worker.runner.flags = RunnerFlags(only_pools=False, checked_exchange=Exchange(tolerates_faults=True))
        worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3])]))
        with pytest.raises(RuntimeError, match="rank 3 is gone"):
            worker.execute(make_step(1, [(0, 1, 7, 1, True)]))


class TestDeferral:
    def test_products_are_frozen_and_used_up_by_sampling(self, make_step: Any) -> None:
        """R4.22."""
        products = ForwardProducts(make_step(4))
        with pytest.raises(dataclasses.FrozenInstanceError):
            products.logits = torch.zeros(1)  # type: ignore[misc]
        deferral = Deferral()
        deferral.put(products)
        assert deferral.take(4) is products
        with pytest.raises(RuntimeError, match="step 4 is not waiting for sampling; waiting: none"):
            deferral.take(4)

    def test_one_step_waits_at_most(self, make_step: Any) -> None:
        """I4.6: whatever is tried in between, execute and sample take turns."""
        deferral = Deferral()
        deferral.check_free()
        deferral.put(ForwardProducts(make_step(1)))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="step 1 still waits for sampling"):
                deferral.put(ForwardProducts(make_step(2)))
        with pytest.raises(RuntimeError, match="waiting: step 1"):
            deferral.take(2)
        assert deferral.take(1).step.step_id == 1
        deferral.check_free()


# Blocks, slots and buffers


def test_running_rows_append_blocks_and_resumed_ones_replace_them(make_row: Any) -> None:
    """R4.34, R4.32: what a resumed row held before does not matter, its slot included."""
    state = SlotState(3, 40, [4])
    state.enter(make_row(1, PROMPT, [5, 6]))
    (table,) = state.tables
    slots = np.asarray([1], dtype=np.int32)
    state.append_blocks(slots, [BlockUpdate(np.asarray([2], dtype=np.int32), np.asarray([9, 3], dtype=np.int32))])
    assert table.ids[1, : table.counts[1]].tolist() == [5, 6, 9, 3]
    state.release(slots)
    state.enter(make_row(1, PROMPT, [8, 2], generation=2, resumed=True))
    assert table.ids[1, : table.counts[1]].tolist() == [8, 2]
    assert not table.ids[1, 2:].any()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_row_may_be_resumed_in_the_step_that_preempts_it(
    world: Any, make_step: Any, make_row: Any, is_async: bool
) -> None:
    """R4.32, P4.1: it is still in its slot, and its old blocks, which others fill in this very step, are not read."""
    expected = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=3)])["x"]
    worker = start(world, streams=FakeStreams() if is_async else None)
    row = make_row(0, PROMPT, [1, 2])
    tokens = taken(worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[row]))).token_ids.tolist()
    again = make_row(0, [*PROMPT, *tokens], [6, 5, 7], generation=2, num_prompt_tokens=7, resumed=True)
    other = make_row(1, [9] * 8, [2, 1, 3])
    step = make_step(1, [(1, 1, 0, 8, True), (0, 2, 0, 8, True)], new_rows=[other, again], preempted=[0])
    tokens.append(int(taken(worker.execute(step)).token_ids[1]))
    step = make_step(2, [(1, 1, 8, 1, True), (0, 2, 8, 1, True)])
    tokens.append(int(taken(worker.execute(step)).token_ids[1]))
    assert tokens == expected


def test_layers_of_a_group_share_one_mapping(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.51: by layer as well as by group it is one tensor, a part of the persistent buffer."""
    worker = start(world)
    step = make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2])])
    worker.runner.state.apply(step)
    batch = worker.runner.inputs.build(step)
    _, mappings = worker.runner.groups.build(batch, step)
    assert list(mappings) == ["layers.0.attn", "layers.1.attn"]
    assert all(mapping is batch.slot_mappings[0] for mapping in mappings.values())


@pytest.mark.parametrize("is_exact", [False, True])
def test_builders_learn_whether_the_host_knows_lengths(
    world: Any, make_step: Any, make_row: Any, is_exact: bool
) -> None:
    """R4.37: where drafts of a step under way may be refused, what the host has are upper bounds."""
    worker = start(world)
    step = make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2])])
    worker.runner.state.apply(step)
    batch = replace(worker.runner.inputs.build(step), lengths_are_exact=is_exact)
    metadata, _ = worker.runner.groups.build(batch, step)
    assert {common.seq_lens_is_exact for common in metadata.values()} == {is_exact}


def test_groups_that_keep_nothing_map_everything_to_zero(make_step: Any, make_row: Any) -> None:
    """R4.52: and need no blocks; the other group's mapping is a part of its own buffer."""
    state = SlotState(2, 20, [4, 4], keeps_kv=[False, True])
    builder = InputBuilder(state, 16, torch.device("cpu"))
    row = make_row(1, [3] * 6, [])
    none = np.zeros(0, dtype=np.int32)
    state.enter(msgspec.structs.replace(row, block_ids=(none, np.asarray([7, 2], dtype=np.int32))))
    batch = builder.build(make_step(0, [(1, 1, 0, 6, True)]), pad_tokens=8, pad_rows=1)
    assert batch.slot_mappings[0].tolist() == [0] * 8
    assert batch.slot_mappings[1].tolist() == [28, 29, 30, 31, 8, 9, -1, -1]


def test_padding_writes_no_byte_of_the_cache(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.53, R4.54, P4.13: a step padded to a larger shape writes where the plain one does, and gives the same tokens.

    What it writes may be rounded differently: libraries choose kernels by the number of rows.
    """
    caches, tokens = [], []
    for padded in (False, True):
        worker = start(world)
        for view in worker.runner.kv.views.values():
            view.fill_(float("nan"))
        if padded:
            shapes = {0: StepShape(pad_tokens=16, pad_rows=5), 1: StepShape(pad_tokens=4, pad_rows=3)}
            forwards: Any = worker.runner.forwards
            forwards.shape = lambda step, shapes=shapes: shapes[step.step_id]
        rows = [make_row(0, PROMPT, [1, 2]), make_row(1, [5, 6, 7], [4])]
        steps = [
            make_step(0, [(0, 1, 0, 7, True), (1, 1, 0, 3, True)], new_rows=rows),
            make_step(1, [(1, 1, 3, 1, True), (0, 1, 7, 1, True)]),
        ]
        tokens.append([taken(worker.execute(step)).token_ids.tolist() for step in steps])
        caches.append([buffer.clone() for buffer in worker.runner.kv.buffers])
    assert tokens[0] == tokens[1]
    for plain, filled in zip(*caches, strict=True):
        torch.testing.assert_close(
            plain.view(torch.float32), filled.view(torch.float32), rtol=1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("is_async", [False, True])
def test_a_graph_over_the_inputs_stays_valid(world: Any, make_step: Any, make_row: Any, is_async: bool) -> None:
    """R4.55: inputs of every later step, of any shape, order and number of drafts, lie where they lay at first; the
    graph backend looks at their addresses, and reads what was written last."""
    worker = start(world, streams=FakeStreams() if is_async else None)
    forwards: Any = worker.runner.forwards
    run, graphs = forwards.run, FakeGraphBackend()
    read: list[int] = []

    def running(batch: InputBatch, *rest: Any) -> torch.Tensor:
        inputs = (
            batch.token_ids,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
            batch.logits_indices,
            *batch.block_tables,
            *batch.slot_mappings,
        )
        if not graphs.graphs:
            graphs.capture(lambda: batch.seq_lens[0] + 0, inputs, None)
        (graph,) = graphs.graphs
        assert graph.input_addresses == tuple(tensor.data_ptr() for tensor in inputs)
        graph.replay()
        read.append(int(graph.output))
        hidden: torch.Tensor = run(batch, *rest)
        return hidden

    forwards.run = running
    drafts = TokenUpdate(np.asarray([2, 0], dtype=np.int32), np.asarray([36, 36], dtype=np.int32))
    rows = [make_row(0, PROMPT, [1, 2, 3, 4]), make_row(1, [5, 6, 7], [5, 6, 7])]
    for step in (
        make_step(0, [(0, 1, 0, 4, False), (1, 1, 0, 3, True)], new_rows=rows),
        make_step(1, [(1, 1, 3, 1, True), (0, 1, 4, 3, True)]),
        make_step(2, [(0, 1, 7, 3, True), (1, 1, 4, 1, True)], drafts=drafts),
        make_step(3, [(0, 1, 10, 1, True), (1, 1, 5, 1, True)]),
        make_step(4, [(1, 1, 6, 1, True)]),
    ):
        worker.execute(step)
    assert read == [4, 4, 10, 9, 7], "the row with two refused drafts is at its 9th token, not at its 11th"


@pytest.mark.parametrize("is_async", [False, True])
def test_embeddings_follow_the_ways_of_ids(world: Any, make_step: Any, make_row: Any, is_async: bool) -> None:
    """R4.46: rows with embeddings of their own beside new rows, beside rows whose tokens are on the device alone, and
    behind their own prompts. Places that ids stand for get the embeddings of the ids that they have now."""
    worker = start(world, streams=FakeStreams() if is_async else None)
    model: Any = worker.loaded.model
    forward = model.forward
    seen: list[torch.Tensor] = []

    def noting(token_ids: Any, positions: Any, *rest: Any, **fields: Any) -> Any:
        embeddings = fields.get("embeddings")
        seen.append(model.embed(token_ids) if embeddings is None else embeddings.clone())
        return forward(token_ids, positions, *rest, **fields)

    model.forward = noting
    given = model.table[torch.tensor([21, 22, 23, 24])].detach().numpy()
    own = msgspec.structs.replace(make_row(0, [0] * 4, [1, 2]), prompt_embeds=given)
    steps = [
        make_step(0, [(1, 1, 0, 3, True)], new_rows=[make_row(1, [5, 6, 7], [3, 4])]),
        make_step(1, [(0, 1, 0, 3, False), (1, 1, 3, 1, True)], new_rows=[own]),
        make_step(2, [(1, 1, 4, 1, True), (0, 1, 3, 1, True)]),
        make_step(3, [(0, 1, 4, 1, True), (1, 1, 5, 1, True)]),
    ]
    outputs = [worker.execute(step) for step in steps]
    tokens = [taken(output).token_ids.tolist() for output in outputs]
    expected = [[5, 6, 7], [21, 22, 23, tokens[0][0]], [tokens[1][0], 24], [tokens[2][1], tokens[2][0]]]
    for found, ids in zip(seen, expected, strict=True):
        assert torch.equal(found, model.embed(torch.tensor(ids)))
