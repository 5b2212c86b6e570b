"""Layers whose contexts are dealt out among ranks: what runner and layers make of it over many steps, with ranks that
are threads and exchange tensors.

Legend: N ranks, T tokens of a step, H query heads of all ranks, D head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AttentionImpl,
    AttentionLayerParams,
    BlockSizeRule,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    NewRow,
    ParallelSlice,
    SchedulerOutput,
    WorkerConfig,
    spec_to_wire,
)
from hardpoint.interfaces.step import TokenUpdate
from hardpoint.testing.executor_suite import worker_config
from hardpoint_testing_torch import AttentionShape, PlainAttentionBackend, dense_attention, make_problem
from hardpoint_testing_torch.rank_threads import RankThreads
from hardpoint_torch_runtime import ForwardContext, set_forward_context
from hardpoint_torch_runtime.context_sharing import context_shards
from hardpoint_torch_runtime.layers import AttentionLayer, ContextPlace, ContextRanks, ContextShards, Partial
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.input_batch import UNWRITTEN_SLOT, InputBuilder
from hardpoint_torch_runtime.runner.slot_state import SlotState

HEADS, SIZE, BLOCK, ROOM = 12, 8, 4, 60
LENGTHS = (41, 23, 6)
"""Tokens of the rows in slots 0 to 2."""

Makers = tuple[Callable[..., SchedulerOutput], Callable[..., NewRow]]
Step = list[tuple[int, int]]

STEPS: list[Step] = [[(0, 9), (1, 1)], [(0, 16), (1, 9)], [(0, 1), (2, 3)], [(1, 1), (0, 13), (2, 1)], [(2, 1)]]
STEPS += [[(0, 1), (1, 1), (2, 1)], [(1, 11), (0, 1)]]
"""Slots and numbers of their tokens: first chunks, later ones, decodes, and all of them in one step."""


class Meeting:
    """Where threads meet: each leaves a tensor, and takes those of all.

    In between one thread runs at a time, in its ``turn``, since a process has one forward context.
    """

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self._left: list[torch.Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=10)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._left[rank] = tensor
        self.turn.release()
        try:
            self._barrier.wait()
            found = list(self._left)
            # Nobody leaves the next tensor before all have taken these.
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return found


class OneRank:
    """The communicator of one of the threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.exchange(self._rank, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self._rank, tensor), dim)

    def close(self) -> None:
        """Threads leave nothing open."""


def layer_of(shards: ContextShards, rank: int, meeting: Meeting, kv_heads: int) -> AttentionLayer:
    params = AttentionLayerParams(
        "layer", HEADS // shards.num_ranks, kv_heads, SIZE, SIZE**-0.5, sinks=torch.linspace(-1, 1, HEADS)
    )
    own = params.sinks.view(kv_heads, shards.num_ranks, -1)[:, rank].flatten() if params.sinks is not None else None
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=kv_heads, head_size=SIZE, dtype="float32", context_shards=shards.num_ranks
    )
    ranks = None if shards.num_ranks == 1 else ContextRanks(OneRank(meeting, rank), shards.num_ranks, rank)
    return AttentionLayer(replace(params, sinks=own), PlainAttentionBackend(), spec, ranks=ranks)


class Rank:
    """One rank's layer, cache, block tables and runner parts."""

    def __init__(
        self, shards: ContextShards, rank: int, meeting: Meeting, makers: Makers, kernel: int, kv_heads: int
    ) -> None:
        self.rank, self.kv_heads, self.make_step = rank, kv_heads, makers[0]
        self.layer = layer_of(shards, rank, meeting, kv_heads)
        self.num_ranks = shards.num_ranks
        spec = self.layer.spec
        assert isinstance(spec, FullAttentionSpec)
        plan = KVCacheConfig(num_blocks=ROOM, groups=(KVCacheGroup(("layer",), spec_to_wire(spec)),), tensors=())
        place = ContextPlace(shards, rank) if shards.num_ranks > 1 else None
        self.groups = AttentionGroups(
            plan,
            {"layer": spec},
            PlainAttentionBackend(),
            BlockSizeRule(exact=(kernel,)),
            max_rows=3,
            max_tokens=64,
            max_model_len=max(LENGTHS) + 1,
            device=torch.device("cpu"),
            place=place,
        )
        self.slots = SlotState(3, max(LENGTHS) + 1, self.groups.block_sizes)
        self.inputs = InputBuilder(
            self.slots, 64, torch.device("cpu"), self.groups.kernel_blocks, places=self.groups.places
        )
        self.cache = torch.full((ROOM * BLOCK // kernel, kv_heads, kernel, 2 * SIZE), torch.nan)
        used = 1
        for slot, length in enumerate(LENGTHS):
            count = -(-length // (BLOCK * shards.num_ranks))
            self.slots.enter(makers[1](slot, [0] * length, list(range(used, used + count))))
            used += count
        self.computed = [0, 0, 0]

    def run(self, step_id: int, step: Step, states: list[torch.Tensor]) -> torch.Tensor:
        """[T, K, G, D] of the rank's own heads. ``states`` per slot: queries, keys and values side by side."""
        rows = [(slot, 1, self.computed[slot], count, True) for slot, count in step]
        record = self.make_step(step_id, rows)
        batch = self.inputs.build(record)
        metadata, slots = self.groups.build(batch, record)
        picked = torch.cat([states[slot][self.computed[slot] : self.computed[slot] + count] for slot, count in step])
        query, key, value = picked.split((HEADS, self.kv_heads, self.kv_heads), dim=1)
        own = query.unflatten(1, (self.kv_heads, self.num_ranks, -1))[:, :, self.rank].flatten(1)
        with set_forward_context(ForwardContext(metadata, slots, {"layer": self.cache}, batch.num_tokens)):
            output = self.layer(own, key.flatten(1), value.flatten(1))
        for slot, count in step:
            self.computed[slot] += count
        return output.view(len(picked), self.kv_heads, -1, SIZE)


def over_ranks(shards: ContextShards, makers: Makers, *, kernel: int = BLOCK, kv_heads: int = 1) -> list[torch.Tensor]:
    """What all ranks together answer to each of ``STEPS``: [T, K, H / K, D]."""
    draw = torch.Generator().manual_seed(5)
    states = [torch.randn(length, HEADS + 2 * kv_heads, SIZE, generator=draw) for length in LENGTHS]
    meeting = Meeting(shards.num_ranks)

    def body(rank: int) -> list[torch.Tensor]:
        with meeting.turn:
            mine = Rank(shards, rank, meeting, makers, kernel, kv_heads)
            return [mine.run(number, step, states) for number, step in enumerate(STEPS)]

    by_rank = RankThreads.run(shards.num_ranks, body, patience_s=60)
    return [torch.cat(parts, dim=2) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "interleave", "kernel", "kv_heads"),
    [(2, 1, 4, 1), (2, 4, 2, 1), (3, 2, 4, 2), (4, 1, 1, 3), (4, 4, 4, 1)],
)
def test_steps_over_ranks_equal_those_of_one(
    hand_builders: Makers, ranks: int, interleave: int, kernel: int, kv_heads: int
) -> None:
    """I5.2, R5.22, R1.45: what one step writes, each rank its own tokens, later ones read; sinks count once."""
    expected = over_ranks(ContextShards(1), hand_builders, kernel=kernel, kv_heads=kv_heads)
    found = over_ranks(ContextShards(ranks, interleave), hand_builders, kernel=kernel, kv_heads=kv_heads)
    for step, (one, several) in enumerate(zip(expected, found, strict=True)):
        assert not one.isnan().any()
        assert torch.allclose(several, one, rtol=2e-5, atol=2e-5), f"step {step}: {(several - one).abs().max()}"


def test_a_wrong_place_is_found_out(hand_builders: Makers, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5.91: slots by another interleave than lengths, where the two give a rank different numbers of tokens."""
    expected = over_ranks(ContextShards(1), hand_builders)
    monkeypatch.setattr(
        ContextPlace,
        "local_offsets",
        lambda place, offsets: (
            ContextShards(2, 2).local_positions(offsets), ContextShards(2, 2).owners(offsets) == place.rank
        ),
    )  # fmt: skip
    found = over_ranks(ContextShards(2, 1), hand_builders)
    wrong = [step for step in range(len(STEPS)) if not torch.allclose(found[step], expected[step], atol=1e-3)]
    assert wrong


@given(shards=st.builds(ContextShards, st.integers(1, 4), st.sampled_from([1, 2, 4])), length=st.integers(0, 70))
def test_each_token_is_written_on_one_rank(shards: ContextShards, length: int) -> None:
    """R5.91: at its local position, in the block that stands at that position of the table."""
    offsets = np.arange(length)
    blocks, within = np.divmod(offsets, BLOCK * shards.num_ranks)
    seen = np.zeros(length, dtype=int)
    for rank in range(shards.num_ranks):
        local, is_held = ContextPlace(shards, rank).local_offsets(within)
        seen += is_held
        places = blocks[is_held] * BLOCK + local[is_held]
        assert places.tolist() == list(range(int(is_held.sum()))), "a rank's tokens fill its blocks one after another"
    assert (seen == 1).all()


def test_a_batch_says_what_is_where(hand_builders: Makers) -> None:
    """R5.22, R5.91: slots of the rank's own tokens alone, and lengths of the contexts before the step."""
    rank = Rank(ContextShards(2, 2), 1, Meeting(2), hand_builders, BLOCK, 1)
    rank.computed = [7, 0, 4]
    rows = [(slot, 1, rank.computed[slot], count, True) for slot, count in [(0, 6), (2, 1), (1, 3)]]
    record = rank.make_step(0, rows)
    batch = rank.inputs.build(record, pad_rows=3, pad_tokens=12)
    metadata, _ = rank.groups.build(batch, record)
    common = metadata["layer"]
    assert common.dcp_local_seq_lens_cpu.tolist() == common.dcp_local_seq_lens.tolist() == [3, 2, 0]
    assert common.dcp_local_seq_lens.dtype is torch.int32
    assert common.seq_lens_cpu.tolist() == [13, 5, 3]
    blocks = [rank.slots.tables[0].ids[0, column] * BLOCK for column in range(2)]
    # Positions 7 to 12 of the first row: rank 1 has 7, 10 and 11; nothing of position 4, and 2 of the first chunk.
    written = [blocks[0] + 3, UNWRITTEN_SLOT, UNWRITTEN_SLOT, blocks[1] + 0, blocks[1] + 1, UNWRITTEN_SLOT]
    first = rank.slots.tables[0].ids[1, 0] * BLOCK
    assert batch.slot_mappings[0].tolist() == [*written, -1, -1, -1, first, -1, -1]


def test_guesses_do_not_go_with_shares(hand_builders: Makers) -> None:
    """P5.8, R5.90."""
    rank = Rank(ContextShards(2), 0, Meeting(2), hand_builders, BLOCK, 1)
    record = rank.make_step(0, [(0, 1, 3, 2, True)])
    batch = rank.inputs.build(record)
    drafts = TokenUpdate(np.array([1], dtype=np.int32), np.array([4], dtype=np.int32))
    with pytest.raises(RuntimeError, match="brings draft tokens, but contexts are dealt out among ranks"):
        rank.groups.build(batch, msgspec.structs.replace(record, drafts=drafts))


def test_first_chunks_are_nobody_elses_business(hand_builders: Makers) -> None:
    """R5.90: without a context on any rank, nothing is exchanged: this rank meets nobody."""

    class Alone(Meeting):
        def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
            raise AssertionError("ranks were asked for what no one has")

    rank = Rank(ContextShards(2), 0, Alone(2), hand_builders, BLOCK, 1)
    states = [torch.randn(length, HEADS + 2, SIZE) for length in LENGTHS]
    assert not rank.run(0, [(0, 9), (1, 1)], states).isnan().any()
    with pytest.raises(AssertionError, match="what no one has"):
        rank.run(1, [(1, 1)], states)


class Bare(PlainAttentionBackend):
    """Accepts everything, and has nothing beside the usual methods."""

    class Computation(AttentionImpl):
        def forward(self, *given: Any) -> torch.Tensor:
            raise TypeError("it computes nothing")

        def write_kv(self, *given: Any) -> None:
            raise TypeError("not even this")

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return self.Computation()


def test_a_backend_without_the_methods_is_found_out_when_bound() -> None:
    """R5.5."""
    params = AttentionLayerParams("layer", 2, 1, SIZE, 1.0)
    ranks = ContextRanks(OneRank(Meeting(2), 0), 2, 0)
    with pytest.raises(TypeError, match="'plain' accepted layer 'layer', whose contexts.*lacks .* SharedContextImpl"):
        AttentionLayer(params, Bare(), None, ranks=ranks)
    with pytest.raises(TypeError, match="whose queries see selected keys only.*lacks .* SelectedKeysImpl"):
        AttentionLayer(params, Bare(), None, selects_keys=True)
    AttentionLayer(params, Bare(), None)


def test_a_layer_passes_its_selection_on() -> None:
    """R5.1, R5.12: and it is given one exactly if it was created for that."""
    problem = make_problem(AttentionShape(uses_sparse=True), [(17, 1), (3, 7), (0, 9)])
    backend = PlainAttentionBackend()
    metadata = backend.create_builder(problem.spec(), ["layer"], 8, 64, torch.device("cpu")).build(problem.common())
    layer = AttentionLayer(problem.params(), backend, problem.spec(), selects_keys=True)
    plain = AttentionLayer(problem.params(), backend, problem.spec())
    states = [each.flatten(1) for each in (problem.query, problem.key, problem.value)]
    context = ForwardContext(
        {"layer": metadata}, {"layer": problem.slot_mapping()}, {"layer": problem.kv_cache()}, problem.num_tokens
    )
    with set_forward_context(context):
        output = layer(*states, problem.selected)
        with pytest.raises(TypeError, match="was not given a selection of keys, but .* selects_keys=True"):
            layer(*states)
        with pytest.raises(TypeError, match="was given a selection of keys, but .* selects_keys=False"):
            plain(*states, problem.selected)
    torch.testing.assert_close(
        output.view_as(problem.query).double(), dense_attention(problem)[0], rtol=2e-5, atol=2e-5
    )
    with set_forward_context(ForwardContext(None, {}, {}, problem.num_tokens)):
        assert not layer(*states, problem.selected).any()


def test_heads_of_ranks_are_put_together_by_kv_head() -> None:
    """R5.22: what is gathered goes back to where it came from."""
    meeting, queries = Meeting(2), torch.randn(2, 5, 6, SIZE)

    def body(rank: int) -> tuple[torch.Tensor, Partial]:
        ranks = ContextRanks(OneRank(meeting, rank), 2, rank)
        with meeting.turn:
            everyone = ranks.gather_heads(queries[rank], 3)
            return everyone, ranks.merge_heads(Partial(everyone, torch.zeros(5, 12)), 3)

    for rank, (everyone, merged) in enumerate(RankThreads.run(2, body, patience_s=60)):
        by_kv_head = everyone.view(5, 3, 2, 2, SIZE)
        torch.testing.assert_close(by_kv_head[:, :, 1 - rank].flatten(1, 2), queries[1 - rank])
        torch.testing.assert_close(merged.output, queries[rank])
        torch.testing.assert_close(merged.lse, torch.full((5, 6), 2.0).log())


def config(*, ranks: int = 2, block_size: int = 4, **model: Any) -> WorkerConfig:
    plain = worker_config()
    fields = {"num_attention_heads": 4, "num_key_value_heads": 1, **model}
    return msgspec.structs.replace(
        plain,
        parallel=ParallelSlice(world_size=ranks, tensor_parallel_size=ranks),
        model=msgspec.structs.replace(plain.model, config=fields),
        block_size=block_size,
    )


def test_whose_contexts_can_be_shared() -> None:
    """R5.5: told before anything is allocated."""
    assert context_shards(config(), 1, 1) is None
    assert context_shards(config(), 2, 4) == ContextShards(2, 4)
    assert context_shards(config(num_key_value_heads=4, kv_lora_rank=16), 2, 1) == ContextShards(2)
    for wrong, interleave, reason in (
        (config(ranks=4), 1, "context_ranks is 2, .* tensor_parallel_size is 4; set both to the same number"),
        (config(ranks=1), 1, "tensor_parallel_size is 1"),
        (config(num_key_value_heads=2), 1, "has 2 key/value heads, of which ranks keep different ones"),
        (config(num_key_value_heads=None), 1, "has None key/value heads"),
        (config(), 3, "context_interleave is 3, which does not divide blocks of 4 tokens"),
    ):
        with pytest.raises(ConfigError, match=reason):
            context_shards(wrong, 2, interleave)
