"""A norm over features that ranks share out is the norm over all of them."""

from __future__ import annotations

import pytest
import torch

from hardpoint_testing_torch.rank_threads import RankMeeting, RankThreads, ThreadCommunicator
from hardpoint_torch_runtime.layers import OutputPart, RMSNorm, ShardedRMSNorm, TensorParallel

CPU = torch.device("cpu")
HEAD = 6


def part_of(heads: int, rank: int, size: int) -> OutputPart:
    """As the fused projection of queries, keys and values divides heads, repeating those that are too few."""
    share = max(heads // size, 1)
    first = rank * share if heads >= size else rank * heads // size
    return OutputPart(heads * HEAD, first * HEAD, share * HEAD)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_together_normalize_over_the_whole(size: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Queries, and keys of which several ranks hold the same head; both with one exchange."""
    torch.manual_seed(kv_heads)
    heads = {"q": 4, "k": kv_heads}
    inputs = {name: torch.randn(5, count * HEAD).to(dtype) * 3 for name, count in heads.items()}
    stored = {name: torch.randn(count * HEAD).to(dtype) for name, count in heads.items()}
    meeting = RankMeeting(size)

    def rank_work(rank: int) -> list[torch.Tensor]:
        parallel = TensorParallel(rank, size, ThreadCommunicator(meeting, rank) if size > 1 else None)
        parts = {name: part_of(count, rank, size) for name, count in heads.items()}
        norms = [ShardedRMSNorm(part, 1e-5, dtype, CPU, parallel) for part in parts.values()]
        for norm, weight in zip(norms, stored.values(), strict=True):
            placement = norm.place("weight", None)
            assert placement.stored_shape == tuple(weight.shape)
            placement.target(norm.weight).copy_(placement.source(weight))
        mine = [inputs[name].narrow(1, part.start, part.length) for name, part in parts.items()]
        return ShardedRMSNorm.all_of(norms, mine)

    outputs = RankThreads.run(size, rank_work, patience_s=30)
    assert meeting.num_meetings == (1 if size > 1 else 0)
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (1.6e-2, 1e-2)
    for index, (name, count) in enumerate(heads.items()):
        whole = RMSNorm(count * HEAD, 1e-5, dtype, CPU)
        whole.weight.data.copy_(stored[name])
        expected = whole(inputs[name])
        for rank in range(size):
            part = part_of(count, rank, size)
            found = outputs[rank][index]
            assert found.dtype is dtype
            torch.testing.assert_close(found, expected.narrow(1, part.start, part.length), rtol=rtol, atol=atol)


def test_one_norm_alone_is_called_like_any_other() -> None:
    norm = ShardedRMSNorm(OutputPart(12, 0, 12), 1e-6, torch.float32, CPU, TensorParallel())
    x = torch.randn(3, 12)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (12,), eps=1e-6))
    with pytest.raises(KeyError, match="whole 'weight'"):
        norm.place("weight", "q")
