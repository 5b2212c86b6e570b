"""FlashAttention over contexts that are dealt out among ranks: threads that exchange what their kernels computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest
import torch

from flash_cases import FlashCase
from flash_double import FlashDouble
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem
from hardpoint_testing_torch.attention_ranks import RankShare
from hardpoint_testing_torch.rank_threads import RankThreads
from hardpoint_torch_runtime.layers import ContextRanks, attend_over_ranks

RANKS = 2
SHAPE = AttentionShape(num_heads=4, num_kv_heads=1, dtype=torch.bfloat16, block_size=16)
ROWS = [(17, 1), (1, 1), (0, 5), (33, 4)]


@pytest.fixture
def double() -> Iterator[FlashDouble]:
    with FlashDouble().installed() as installed:
        yield installed


@dataclass(slots=True)
class Meeting:
    """Where the threads of a group meet: each leaves a tensor and takes all of them."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=60))
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


def on_all_ranks(generation: int, problem: AttentionProblem, interleave: int = 1) -> torch.Tensor:
    """Output [T, H, D]: each rank's own heads, side by side."""
    meeting, shape = Meeting(), replace(problem.shape, num_heads=problem.shape.num_heads // RANKS)

    def body(rank: int) -> torch.Tensor:
        share = RankShare(problem, rank, RANKS, interleave)
        case = FlashCase.create(generation, shape, spec=share.spec)
        query = problem.query.unflatten(1, (shape.num_kv_heads, RANKS, -1))[:, :, rank].flatten(1, 2)
        ranks = ContextRanks(OneThread(rank, meeting), RANKS, rank)
        states = query, problem.key, problem.value
        metadata, output = case.builder.build(share.common()), torch.full_like(query, torch.nan)
        return attend_over_ranks(case.layers[0], ranks, states, share.kv_cache(), metadata, output)

    own = [each.unflatten(1, (shape.num_kv_heads, 1, -1)) for each in RankThreads.run(RANKS, body, patience_s=60)]
    return torch.cat(own, dim=2).flatten(1, 3)


@pytest.mark.parametrize("generation", [3, 4])
@pytest.mark.parametrize(("interleave", "kv_heads"), [(1, 1), (4, 1), (3, 2)])
def test_ranks_together_equal_one(double: FlashDouble, generation: int, interleave: int, kv_heads: int) -> None:
    """I5.2, R5.22: contexts by all ranks' heads, merged; then each rank's own heads over the step's tokens."""
    problem = make_problem(replace(SHAPE, num_heads=4 * kv_heads, num_kv_heads=kv_heads), ROWS)
    output = on_all_ranks(generation, problem, interleave)
    torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=2e-2, atol=2e-2)
    own = [call for call in double.kernel_calls() if call["causal"]]
    shared = [call for call in double.kernel_calls() if not call["causal"]]
    assert [call["q"].shape[1] for call in own] == [2 * kv_heads] * RANKS
    assert [call["q"].shape[1] for call in shared] == [4 * kv_heads] * RANKS
    assert all(call["k"] is problem.key for call in own)


def test_steps_of_first_chunks_leave_contexts_out(double: FlashDouble) -> None:
    """R5.90: a decision of the host, by which nobody waits for anybody."""
    problem = make_problem(SHAPE, [(0, 5), (0, 3)])
    torch.testing.assert_close(on_all_ranks(4, problem).double(), dense_attention(problem)[0], rtol=2e-2, atol=2e-2)
    assert len(double.kernel_calls()) == RANKS


def test_shares_need_a_builder_that_was_told(double: FlashDouble) -> None:
    """R5.22, R5.5: a builder that plans whole contexts says nothing of shares."""
    case = FlashCase.create(3, SHAPE)
    problem = case.problem([(5, 1)])
    metadata = case.builder.build(RankShare(problem, 0, RANKS).common())
    with pytest.raises(ValueError, match="must be told of context_shards"):
        case.layers[0].context_partial(problem.query, problem.kv_cache(), metadata, problem.empty_output())
    told = FlashCase.create(3, SHAPE, spec=msgspec.structs.replace(problem.spec(), context_shards=RANKS))
    with pytest.raises(RuntimeError, match="holds a share of each context only"):
        told.run(problem, dcp_local_seq_lens=torch.tensor([3], dtype=torch.int32))
