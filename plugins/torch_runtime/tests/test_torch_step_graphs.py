"""Padded and captured forwards through the runner: the same tokens, and nothing of the cache but real cells touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import GraphSupport
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint.testing.fake_platform import FakeGraphPool
from hardpoint_testing_torch import FakeGraphBackend, FixedShapeBackend
from hardpoint_torch_runtime import (
    BatchDescriptor,
    ForwardContext,
    LayerToolkit,
    get_forward_context,
    has_forward_context,
)
from hardpoint_torch_runtime.forward_context import GraphMode
from hardpoint_torch_runtime.layers import MixtureSizes, RoutingParameters
from hardpoint_torch_runtime.runner.forward_pass import ENCODER_INPUTS, ForwardPass
from hardpoint_torch_runtime.runner.forward_setup import GraphChoice, forward_maker
from hardpoint_torch_runtime.runner.graphs import GraphStore
from hardpoint_torch_runtime.runner.step_shape import StepShapes

PROMPTS = {"one": [7], "seven": [3, 1, 4, 1, 5, 9, 2], "long": [(5 * i + 3) % 30 for i in range(19)]}
LENGTHS = {"one": 9, "seven": 4, "long": 6}
"""Requests end at different steps, so that the number of rows changes."""


def start(world: Any, **fields: Any) -> Any:
    """A worker whose cache is NaN throughout but for the null block; ``fields`` of its forward pass."""
    worker = world.start()
    for view in worker.runner.kv.views.values():
        view.fill_(float("nan"))
        view[0] = 0
    runner = worker.runner
    runner.forwards = ForwardPass(worker.loaded.model, runner.groups, runner.kv, runner.state.embeddings, **fields)
    return worker


def requests(world: Any) -> list[Any]:
    return [world.engine_request(name, PROMPTS[name], max_tokens=count) for name, count in LENGTHS.items()]


def assert_same_cache(worker: Any, plain: Any) -> None:
    """P4.13: the same cells are written, with the same values; every other byte is as it was."""
    for name, view in worker.runner.kv.views.items():
        expected = plain.runner.kv.views[name]
        torch.testing.assert_close(view, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not view[0].any()


def watch(worker: Any) -> list[tuple[ForwardContext, int]]:
    """The contexts that the model's forward runs in, and how many tokens it gets."""
    seen: list[tuple[ForwardContext, int]] = []
    plain = worker.loaded.model.forward

    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        mask = context.padding_mask
        # The next step writes into the same buffer.
        seen.append((replace(context, padding_mask=None if mask is None else mask.clone()), len(token_ids)))
        hidden: torch.Tensor = plain(token_ids, positions)
        return hidden

    worker.loaded.model.forward = forward
    return seen


def test_decodes_are_captured_once_per_shape_and_replayed(world: Any) -> None:
    """R4.53, R4.54, R4.55, P4.13: the same tokens and the same cache, whatever the graph's shape is padded to."""
    plain = start(world)
    expected = world.generate(plain, requests(world))
    world.backend = FixedShapeBackend(GraphSupport.DECODE_ONLY)
    backend, pool = FakeGraphBackend(), FakeGraphPool()
    graphs = GraphStore(backend, pool)
    shapes = StepShapes(sizes=(1, 2, 4), support=GraphSupport.DECODE_ONLY, max_rows=6)
    worker = start(world, shapes=shapes, graphs=graphs)
    seen = watch(worker)
    assert world.generate(worker, requests(world)) == expected
    keys = [BatchDescriptor(rows, rows, is_uniform=True) for rows in (4, 2, 1)]
    assert list(graphs.descriptors) == keys
    replays = [graph.num_replays for graph in backend.graphs]
    # Nine tokens: one by the prefill, the other steps are decodes of three, two and at last one request.
    assert replays == [3, 2, 3]
    # The model's own code ran for the prefill, then twice for each shape: once to warm up, once to be recorded.
    assert [(context.graph_mode, count) for context, count in seen] == [
        (GraphMode.NONE, 27),
        *((GraphMode.FULL, count) for count in (4, 4, 2, 2, 1, 1)),
    ]
    assert_same_cache(worker, plain)
    assert pool.bytes_in_use > 0
    graphs.release()
    assert pool.bytes_in_use == 0


def test_what_a_graph_is_told_holds_for_its_whole_shape(world: Any) -> None:
    """R4.53, R4.54, R4.61: bounds instead of this step's lengths; rows and tokens of padding have nothing."""
    world.backend = FixedShapeBackend(GraphSupport.DECODE_ONLY)
    shapes = StepShapes(sizes=(4,), support=GraphSupport.DECODE_ONLY, max_rows=6)
    worker = start(world, shapes=shapes, graphs=GraphStore(FakeGraphBackend(), FakeGraphPool()))
    seen = watch(worker)
    world.generate(worker, requests(world)[:2])
    first, built = world.backend.builders[0].built[:2]
    assert not first.for_graph
    assert (built.for_graph, built.num_rows, built.num_tokens) == (True, 2, 2)
    assert built.max_seq_len >= world.max_len
    assert (len(built.seq_lens), len(built.block_table), built.slot_mapping.shape) == (4, 4, (4,))
    context, _ = seen[1]
    assert context.batch_descriptor == BatchDescriptor(4, 4, is_uniform=True)
    assert context.padding_mask is not None
    assert context.padding_mask.tolist() == [False, False, True, True]
    # Of the last step, in which one request was left.
    assert built.seq_lens[1:].tolist() == [0, 0, 0]
    assert not built.block_table[1:].any()
    assert built.slot_mapping[1:].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("size", [32, 64], ids=["some fit", "all fit"])
def test_padding_changes_neither_tokens_nor_cache(world: Any, size: int) -> None:
    """R4.53, R4.54, R4.66, R4.68: prefills and chunks too; rows are not padded where their number is no part of the
    shape."""
    world.max_tokens = 64
    plain = start(world)
    expected = world.generate(plain, requests(world), max_tokens=17)
    shapes = StepShapes(sizes=(5, size), support=GraphSupport.NEVER, max_rows=6, is_piecewise=True)
    worker = start(world, shapes=shapes)
    seen = watch(worker)
    assert world.generate(worker, requests(world), max_tokens=17) == expected
    assert_same_cache(worker, plain)
    assert {count for _, count in seen} == {5, size}
    for context, count in seen:
        assert context.graph_mode is GraphMode.PIECEWISE
        assert context.batch_descriptor == BatchDescriptor(count)
        assert context.padding_mask is not None
        assert context.padding_mask.tolist() == [token >= context.num_tokens for token in range(count)]


def test_drafts_make_rows_of_more_than_one_token(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.61: a uniform batch of rows with two tokens each, here the ends of prompts, is captured as such."""
    world.backend = FixedShapeBackend(GraphSupport.UNIFORM_BATCH)
    shapes = StepShapes(sizes=(8,), support=GraphSupport.UNIFORM_BATCH, max_rows=6, query_len=2)
    backend = FakeGraphBackend()
    tokens = []
    for graphs in (None, GraphStore(backend, FakeGraphPool())):
        worker = start(world, shapes=shapes if graphs else None, graphs=graphs)
        rows = [make_row(0, [3, 4, 5], [1]), make_row(1, [6, 7, 8, 9], [2])]
        worker.execute(make_step(0, [(0, 1, 0, 1, False), (1, 1, 0, 2, False)], new_rows=rows))
        output = worker.execute(make_step(1, [(0, 1, 1, 2, True), (1, 1, 2, 2, True)]))
        tokens.append(output.token_ids.tolist())
    assert tokens[0] == tokens[1]
    assert [graph.num_replays for graph in backend.graphs] == [1]


def test_without_graphs_nothing_changes(world: Any) -> None:
    worker = start(world)
    seen = watch(worker)
    world.generate(worker, requests(world))
    for context, count in seen:
        facts = (context.graph_mode, context.batch_descriptor, context.padding_mask, context.num_tokens)
        assert facts == (GraphMode.NONE, None, None, count)


def test_embeddings_run_as_they_are(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.65: no graph reads them; once the prompt is computed, the request decodes as others do."""
    import msgspec

    world.backend = FixedShapeBackend()
    shapes = StepShapes(sizes=(1, 2, 4), support=GraphSupport.DECODE_ONLY, max_rows=6)
    graphs = GraphStore(FakeGraphBackend(), FakeGraphPool())
    worker = start(world, shapes=shapes, graphs=graphs)
    given = worker.loaded.model.table[[3, 4]].detach().numpy()
    row = msgspec.structs.replace(make_row(0, [0, 0], [1]), prompt_embeds=given)
    tokens = []
    for step_id, (computed, samples) in enumerate([(0, False), (1, True), (2, True)]):
        step = make_step(step_id, [(0, 1, computed, 1, samples)], new_rows=[row] if step_id == 0 else [])
        tokens += worker.execute(step).token_ids.tolist()
        assert len(graphs.descriptors) == (step_id == 2)
    request = world.engine_request("ids", [3, 4], max_tokens=2)
    assert world.generate(world.start(), [request])["ids"] == tokens


def test_inputs_of_encoders_go_around_compiled_code(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.65."""
    calls: list[int] = []
    worker = start(world)

    def compiled(token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        calls.append(len(token_ids))
        return plain(token_ids, positions)

    seen = watch(worker)
    plain = worker.loaded.model.forward
    worker.runner.forwards.compiled = compiled
    worker.execute(make_step(0, [(0, 1, 0, 2, True)], new_rows=[make_row(0, [3, 4], [1])]))
    assert (calls, seen[-1][0].skips_compiled) == ([2], False)
    shapes = StepShapes(sizes=(1, 2), support=GraphSupport.DECODE_ONLY, max_rows=6)
    worker.runner.forwards.shapes = shapes
    worker.execute(make_step(1, [(0, 1, 2, 1, True)], extensions={ENCODER_INPUTS: {}}))
    assert (calls, seen[-1][0].skips_compiled, seen[-1][1]) == ([2], True, 1)


def test_tokens_with_several_positions_are_captured_as_well(world: Any) -> None:
    """R4.33, R4.55: their positions lie in one buffer too."""
    expected = world.generate(start(world), requests(world))
    make = world.plugins.factories["model", "TinyForCausalLM"]

    def several(ctx: Any) -> Any:
        model = make(ctx)
        plain = model.forward
        model.num_position_axes = 3
        model.position_rows = lambda row: np.tile(np.arange(row.num_prompt_tokens), (3, 1))
        model.forward = lambda ids, positions, *rest, **fields: plain(ids, positions[2], *rest, **fields)
        return model

    world.plugins.factories["model", "TinyForCausalLM"] = several
    world.backend = FixedShapeBackend(GraphSupport.DECODE_ONLY)
    backend = FakeGraphBackend()
    shapes = StepShapes(sizes=(1, 2, 4), support=GraphSupport.DECODE_ONLY, max_rows=6)
    worker = start(world, shapes=shapes, graphs=GraphStore(backend, FakeGraphPool()))
    assert world.generate(worker, requests(world)) == expected
    assert [graph.num_replays for graph in backend.graphs] == [3, 2, 3]


def test_moved_inputs_are_not_replayed() -> None:
    """R4.55: the device would go on reading the old place."""
    store = GraphStore(FakeGraphBackend(), FakeGraphPool())
    key, still, moving = BatchDescriptor(2), torch.ones(2), torch.ones(2)
    store.capture(key, lambda: still + moving, [still, moving])
    still.fill_(5)
    assert store.replay(key, [still, moving]).tolist() == [6, 6]
    with pytest.raises(RuntimeError, match=r"inputs \[1\] of the step moved since .*num_tokens=2"):
        store.replay(key, [still, torch.ones(2)])


def test_a_capture_that_fails_records_nothing_and_stops_the_step(world: Any) -> None:
    """I4.5: reading a device value on the host cannot be repeated by a device; no context is left behind."""
    world.backend = FixedShapeBackend(GraphSupport.DECODE_ONLY)
    shapes = StepShapes(sizes=(1,), support=GraphSupport.DECODE_ONLY, max_rows=6)
    graphs = GraphStore(FakeGraphBackend(), FakeGraphPool())
    worker = start(world, shapes=shapes, graphs=graphs)
    plain = worker.loaded.model.forward
    worker.loaded.model.forward = lambda ids, positions: plain(ids, positions) * (1 + 0 * int(ids[0]))
    with pytest.raises(RuntimeError, match="waits for the device and cannot be captured"):
        world.generate(worker, [world.engine_request("x", [3, 4], max_tokens=2)])
    assert graphs.descriptors == ()
    assert not has_forward_context()


def test_a_forward_that_fails_leaves_no_context(world: Any, make_step: Any, make_row: Any) -> None:
    """I4.5: the next step is computed as if nothing had been."""
    worker = start(world)
    with pytest.raises(IndexError):
        worker.execute(make_step(0, [(0, 1, 0, 1, True)], new_rows=[make_row(0, [99], [1])]))
    assert not has_forward_context()
    row = make_row(0, [3, 4], [1], generation=2)
    output = worker.execute(make_step(1, [(0, 2, 0, 2, True)], new_rows=[row], finished=[0]))
    request = world.engine_request("again", [3, 4], max_tokens=1)
    assert world.generate(world.start(), [request])["again"] == output.token_ids.tolist()


def test_a_graph_without_a_store_is_refused(world: Any) -> None:
    world.backend = FixedShapeBackend(GraphSupport.DECODE_ONLY)
    shapes = StepShapes(sizes=(1,), support=GraphSupport.DECODE_ONLY, max_rows=6)
    with pytest.raises(RuntimeError, match="step 1 is to run as a graph, but this worker captures none"):
        world.generate(start(world, shapes=shapes), [world.engine_request("x", [3, 4], max_tokens=2)])


def test_a_step_has_one_order(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.68: state, shape and inputs before metadata, which is there when the context is entered; logits after it."""
    shapes = StepShapes(sizes=(4,), support=GraphSupport.NEVER, max_rows=6, is_piecewise=True)
    worker = start(world, shapes=shapes)
    runner, model = worker.runner, worker.loaded.model
    order: list[tuple[str, bool]] = []

    def note(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            order.append((name, has_forward_context()))
            return plain(*args, **kwargs)

        setattr(owner, name, noted)

    parts = {"apply": runner.state, "shape": runner.forwards, "forward": model, "logits": model}
    for name, owner in parts.items():
        note(owner, name)
    prepare, describe = runner.inputs.build, runner.groups.build

    def inputs(*args: Any, **kwargs: Any) -> Any:
        order.append(("inputs", has_forward_context()))
        batch = prepare(*args, **kwargs)
        assert [len(mapping) for mapping in batch.slot_mappings] == [4]
        return batch

    def metadata(*args: Any, **kwargs: Any) -> Any:
        order.append(("metadata", has_forward_context()))
        return describe(*args, **kwargs)

    runner.inputs.build, runner.groups.build = inputs, metadata
    row = make_row(0, [3, 4], [1])
    answer = worker.execute(make_step(0, [(0, 1, 0, 2, True)], new_rows=[row], defers_sampling=True))
    assert answer.step_id == 0
    names = ("apply", "shape", "inputs", "metadata", "forward", "logits")
    assert order == [(name, name == "forward") for name in names]


def graph_platform(platform: Any) -> Any:
    """A platform of the same kind that has graphs, and adds an entry to every forward."""

    class GraphPlatform(type(platform)):  # type: ignore[misc]
        @classmethod
        def create_graph_pool(cls) -> FakeGraphPool:
            return FakeGraphPool()

        def forward_extras(self, context: ForwardContext) -> dict[str, Any]:
            return {"stream": context.graph_mode.value}

    return GraphPlatform()


def test_a_worker_captures_all_shapes_before_the_first_request(world: Any, worker_options: Any) -> None:
    """R4.55, R4.61, R4.64: by options alone; warming up leaves no trace, and the end gives the pool its memory back."""
    expected = world.generate(world.start(), requests(world))
    world.backend, world.platform = FixedShapeBackend(GraphSupport.DECODE_ONLY), graph_platform(world.platform)
    backend = FakeGraphBackend()
    world.plugins.factories["graph_backend", "fake"] = lambda ctx: backend
    worker = world.start(worker_options(graph_backend="fake", graph_sizes=(4, 1, 64, 4)))
    pool = world.platform.graph_pool()
    for view in worker.runner.kv.views.values():
        view.fill_(float("nan"))
    seen = watch(worker)
    worker.warm_up()
    assert [graph.num_replays for graph in backend.graphs] == [2, 1]
    assert not worker.runner.state.slots.occupied.any()
    for view in worker.runner.kv.views.values():
        assert not view[0].any()
        assert view[1:].isnan().all()
    seen.clear()
    assert world.generate(worker, requests(world)) == expected
    assert [graph.num_replays for graph in backend.graphs] == [7, 4]
    # Of the model's own code only the prefill runs any more.
    assert [context.extras for context, _ in seen] == [{"stream": "none"}]
    assert pool.bytes_in_use > 0
    worker.shutdown()
    assert pool.bytes_in_use == 0


def test_a_recording_reads_ids_that_are_made_on_the_device(world: Any, worker_options: Any) -> None:
    """R4.41, R4.55: where samples stay there, the next step's ids are written into the same buffer as the host's."""
    expected = world.generate(world.start(), requests(world))
    world.backend, world.platform = FixedShapeBackend(), graph_platform(world.platform)
    backend = FakeGraphBackend()
    world.plugins.factories["graph_backend", "fake"] = lambda ctx: backend
    options = worker_options(graph_backend="fake", graph_sizes=(1, 4), asynchronous_output=True)
    worker, scheduler = world.start(options), world.scheduler()
    tokens: dict[str, list[int]] = {record.request_id: [] for record in requests(world)}
    for record in requests(world):
        assert scheduler.add(record) is None
    while scheduler.has_work():
        step = scheduler.schedule()
        answer = worker.execute(step)
        # A step that only lets go of a request promises nothing.
        for entry in scheduler.update(step, answer.result() if step.num_tokens else answer):
            tokens[entry.request_id] += entry.new_token_ids
    assert tokens == expected
    assert [graph.num_replays for graph in backend.graphs] == [5, 3]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("backend", "steps of the chosen attention backend cannot be captured"),
        ("platform", "captures no graphs"),
        ("sizes", r"none of the sizes \(64,\) is at most 32 tokens"),
    ],
)
def test_graphs_that_cannot_be_had_stop_the_start(world: Any, worker_options: Any, fault: str, message: str) -> None:
    if fault != "backend":
        world.backend = FixedShapeBackend(GraphSupport.DECODE_ONLY)
    if fault != "platform":
        world.platform = graph_platform(world.platform)
    world.plugins.factories["graph_backend", "fake"] = lambda ctx: FakeGraphBackend()
    options = worker_options(graph_backend="fake", graph_sizes=(64,) if fault == "sizes" else None)
    with pytest.raises(ConfigError, match=f"graph backend 'fake' was asked for, but .*{message}.*unset"):
        world.start(options)


def test_what_cannot_be_recorded_is_named(world: Any) -> None:
    """Experts that are chosen on the host, and exchanges between ranks."""
    world.backend = FixedShapeBackend()
    worker = world.start()
    model, runner, platform = worker.loaded.model, worker.runner, graph_platform(world.platform)
    choice = GraphChoice("fake", FakeGraphBackend(), (1, 2))
    two_ranks = world.config(parallel=ParallelSlice(world_size=2, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="'fake' was asked for, but exchanges between ranks are not recorded"):
        forward_maker(two_ranks, platform, model, runner.groups, runner.kv, choice)
    experts = LayerToolkit.create(
        world.config(), device=torch.device("cpu"), dtype=torch.float32, attention_backend=world.backend
    ).mixture_of_experts("mlp", MixtureSizes(16, 8), RoutingParameters(4, 2))
    model.named_layers = lambda: [("layers.0", experts)]
    with pytest.raises(ConfigError, match="mixtures of experts ask the device"):
        forward_maker(world.config(), platform, model, runner.groups, runner.kv, choice)
    assert forward_maker(two_ranks, platform, model, runner.groups, runner.kv)(runner.state.embeddings).graphs is None
