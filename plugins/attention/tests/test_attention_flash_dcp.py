"""FlashAttention over contexts that are dealt out among ranks: two ranks, one after the other in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from flash_cases import FlashCase, flash_backend
from flash_double import FlashDouble
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec
from hardpoint_attention.dcp import ContextShards
from hardpoint_attention.flash import CommunicatorRanks, ContextRanks
from hardpoint_attention.flash.metadata import FlashMetadata
from hardpoint_attention.merge import Partial, merge_partials
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem
from hardpoint_testing_torch.rank_threads import RankThreads

RANKS = 2
SHAPE = AttentionShape(num_heads=4, num_kv_heads=1, dtype=torch.bfloat16, block_size=16)
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype="bfloat16", context_shards=RANKS)
ROWS = [(17, 1), (1, 1), (0, 5), (33, 4)]


@dataclass(slots=True)
class Exchange:
    """What ranks that take turns leave for each other; complete from the second round on."""

    queries: list[torch.Tensor]
    partials: list[Partial | None] = field(default_factory=lambda: [None] * RANKS)


@dataclass(slots=True)
class OneRank:
    rank: int
    exchange: Exchange
    num_ranks: int = RANKS

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        assert query is self.exchange.queries[self.rank]
        return torch.cat(self.exchange.queries, dim=1)

    def merge_heads(self, partial: Partial) -> Partial:
        self.exchange.partials[self.rank] = partial
        merged = merge_partials([each for each in self.exchange.partials if each is not None])
        heads = slice(self.rank * 2, self.rank * 2 + 2)
        return Partial(merged.output[:, heads], merged.lse[:, heads])


@pytest.fixture
def double() -> Iterator[FlashDouble]:
    with FlashDouble().installed() as installed:
        yield installed


def local_cache(problem: AttentionProblem, shards: ContextShards, rank: int) -> torch.Tensor:
    """What the rank's cache holds: its share of each context, in the row's blocks from the first on; NaN elsewhere."""
    cache = torch.full((problem.num_blocks, 1, 16, 32), torch.nan, dtype=torch.bfloat16)
    for row, (keys, values) in enumerate(problem.history):
        positions = np.arange(len(keys))
        mine = positions[shards.owners(positions) == rank]
        local = torch.from_numpy(shards.local_positions(mine))
        blocks = problem.block_table[row].long()[local // 16]
        cache.transpose(1, 2)[blocks, local % 16] = torch.cat((keys, values), dim=-1)[torch.from_numpy(mine)]
    return cache


def on_rank(
    generation: int,
    problem: AttentionProblem,
    shards: ContextShards,
    rank: int,
    exchange: Exchange,
    ranks: ContextRanks | None = None,
) -> torch.Tensor:
    """Output [T, H / N, D] of the rank's heads."""
    ranks = ranks or OneRank(rank, exchange)
    case = FlashCase.create(generation, replace(SHAPE, num_heads=2), spec=SPEC, ranks=ranks)
    contexts = np.array([context for context, _ in problem.rows], dtype=np.int32)
    local = shards.local_lengths(contexts, rank)
    common = replace(problem.common(), dcp_local_seq_lens=torch.from_numpy(local), dcp_local_seq_lens_cpu=local)
    metadata = case.builder.build(common)
    assert isinstance(metadata, FlashMetadata)
    query = exchange.queries[rank]
    output = torch.full_like(query, torch.nan)
    cache = local_cache(problem, shards, rank)
    return case.layers[0].forward(query, problem.key, problem.value, cache, metadata, output)


@pytest.mark.parametrize("generation", [3, 4])
@pytest.mark.parametrize("interleave", [1, 4])
def test_ranks_together_equal_one(double: FlashDouble, generation: int, interleave: int) -> None:
    """I5.2, R5.22: contexts by all ranks' heads, merged; then each rank's own heads over the step's tokens."""
    problem = make_problem(SHAPE, ROWS)
    shards = ContextShards(RANKS, interleave)
    exchange = Exchange([heads.contiguous() for heads in problem.query.split(2, dim=1)])
    for _ in range(2):
        outputs = [on_rank(generation, problem, shards, rank, exchange) for rank in range(RANKS)]
    expected, _ = dense_attention(problem)
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), expected, rtol=2e-2, atol=2e-2)
    own, shared = double.kernel_calls()[-2:]
    assert own["causal"] is True
    assert own["k"] is problem.key
    assert shared["causal"] is False
    assert shared["q"].shape[1] == 4


@dataclass(slots=True)
class Meeting:
    """Where the threads of a group meet: each leaves a tensor and takes all of them."""

    barrier: threading.Barrier
    left: dict[int, torch.Tensor] = field(default_factory=dict)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.left[rank] = tensor
        self.barrier.wait()
        found = [self.left[each] for each in range(RANKS)]
        # Nobody leaves the next tensor before all have taken these.
        self.barrier.wait()
        return found


@dataclass(slots=True)
class OneThread:
    """The communicator of one of the threads."""

    rank: int
    meeting: Meeting

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim=dim)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0)

    def close(self) -> None:
        """Threads leave nothing open."""


def test_ranks_over_a_communicator(double: FlashDouble) -> None:
    """I5.2, R5.22: two threads that exchange queries, log-sum-exps and sums of outputs."""
    problem = make_problem(SHAPE, ROWS)
    exchange = Exchange([heads.contiguous() for heads in problem.query.split(2, dim=1)])
    meeting = Meeting(threading.Barrier(RANKS, timeout=60))

    def body(rank: int) -> torch.Tensor:
        ranks = CommunicatorRanks(OneThread(rank, meeting), RANKS, rank)
        return on_rank(4, problem, ContextShards(RANKS), rank, exchange, ranks)

    outputs = RankThreads[torch.Tensor].run(RANKS, body, patience_s=60)
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), dense_attention(problem)[0], rtol=2e-2, atol=2e-2)


def test_steps_of_first_chunks_leave_contexts_out(double: FlashDouble) -> None:
    """R5.90: a decision of the host."""
    problem = make_problem(SHAPE, [(0, 5), (0, 3)])
    exchange = Exchange([heads.contiguous() for heads in problem.query.split(2, dim=1)])
    outputs = [on_rank(4, problem, ContextShards(RANKS), rank, exchange) for rank in range(RANKS)]
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), dense_attention(problem)[0], rtol=2e-2, atol=2e-2)
    assert len(double.kernel_calls()) == RANKS


def test_without_ranks_to_talk_to_it_is_refused(double: FlashDouble) -> None:
    """R5.90, R5.5: told at the start, and again should that have been passed by."""
    need = replace(SHAPE.need(), dcp_size=2)
    alone = flash_backend(3)
    assert alone.refuse(need) == "no ranks were given to it among which contexts could be dealt out"
    assert flash_backend(3, ranks=OneRank(0, Exchange([]))).refuse(need) is None
    case = FlashCase.create(3, SHAPE, spec=SPEC)
    problem = case.problem([(5, 1)])
    with pytest.raises(RuntimeError, match="none to talk to"):
        case.run(problem, dcp_local_seq_lens=torch.tensor([3], dtype=torch.int32))
