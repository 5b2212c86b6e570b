"""Mixtures of experts and cache blocks against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from hardpoint_triton_kernels.kernels.blocks import copy_blocks, zero_blocks
from hardpoint_triton_kernels.kernels.moe import TILES, choose_tile, fused_moe
from hardpoint_triton_kernels.kernels.moe_align import align_experts

# The interpreter computes with numpy, which remarks on what devices just round to infinity or to no number.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
EACH_DTYPE = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def choices(tokens: int, experts: int, chosen: int) -> torch.Tensor:
    """int64 [T, K], a token's experts all different."""
    generator = torch.Generator().manual_seed(tokens + experts)
    return torch.rand(tokens, experts, generator=generator).topk(chosen).indices


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "experts", "chosen", "rows"), [(1, 1, 1, 16), (5, 4, 2, 16), (600, 7, 3, 32)])
def test_blocks_hold_every_pair_once_with_its_expert(tokens: int, experts: int, chosen: int, rows: int) -> None:
    """Pairs of an expert in order, no block mixed, padding only behind an expert's pairs."""
    picked = choices(tokens, experts, chosen)
    picked[0, 0] = -1
    found = align_experts(picked, experts, rows)
    num_pairs = tokens * chosen
    by_block = found.pairs.view(-1, rows)
    assert len(by_block) == len(found.experts)
    dealt: list[int] = []
    for expert, block in zip(found.experts.tolist(), by_block.tolist(), strict=True):
        pairs = [pair for pair in block if pair < num_pairs]
        if expert < 0:
            assert pairs == []
            continue
        assert pairs, "a block of nothing costs a program"
        assert block[: len(pairs)] == pairs
        assert {int(picked.flatten()[pair]) for pair in pairs} == {expert}
        dealt += pairs
    assert sorted(dealt) == [pair for pair in range(num_pairs) if picked.flatten()[pair] >= 0]
    order = [int(picked.flatten()[pair]) * num_pairs + pair for pair in dealt]
    assert order == sorted(order)


def plain(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Token by token, in float64."""
    output = torch.zeros(hidden.shape, dtype=torch.float64)
    for token in range(len(hidden)):
        for weight, expert in zip(weights[token].tolist(), chosen[token].tolist(), strict=True):
            if 0 <= expert < len(gate_up):
                gate, up = (gate_up[expert].double() @ hidden[token].double()).chunk(2)
                output[token] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return output


@pytest.mark.slow
@EACH_DTYPE
def test_mixtures(dtype: torch.dtype) -> None:
    """Odd sizes, one token and several tiles of each configuration, experts of other ranks left out."""
    for tokens, experts, chosen, size, inner in ((1, 3, 1, 10, 6), (9, 4, 2, 70, 34), (50, 2, 2, 24, 40)):
        hidden = normal(tokens, size + 2, dtype=dtype)[:, :size]
        gate_up = normal(experts, 2 * inner, size, dtype=dtype) / size**0.5
        down = normal(experts, size, inner, dtype=dtype) / inner**0.5
        weights = normal(tokens, chosen, seed=1).softmax(-1)
        picked = choices(tokens, experts, chosen)
        picked[-1, 0] = experts
        found = fused_moe(hidden, gate_up, down, weights, picked, "silu")
        assert found.dtype == dtype
        exact = plain(hidden, gate_up, down, weights, picked)
        torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.slow
def test_a_token_alone_gives_what_it_gives_among_others() -> None:
    """Tiles go by the batch, so only closeness is promised; what is left out is exactly zero."""
    gate_up, down = normal(4, 24, 16), normal(4, 16, 12)
    hidden, weights, picked = normal(20, 16), normal(20, 2).softmax(-1), choices(20, 4, 2)
    together = fused_moe(hidden, gate_up, down, weights, picked, "gelu_tanh")
    alone = fused_moe(hidden[3:4], gate_up, down, weights[3:4], picked[3:4], "gelu_tanh")
    torch.testing.assert_close(alone[0], together[3], rtol=1e-5, atol=1e-5)
    nobody = torch.full_like(picked, -1)
    assert not fused_moe(hidden, gate_up, down, weights, nobody, "gelu_tanh").any()


def test_mixtures_without_tokens_and_of_other_dtypes() -> None:
    gate_up, down, weights = torch.zeros(2, 8, 6), torch.zeros(2, 6, 4), torch.zeros(0, 2)
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert fused_moe(torch.zeros(0, 6), gate_up, down, weights, none, "silu").shape == (0, 6)
    with pytest.raises(ValueError, match="float64 cannot be multiplied with experts of torch.float32"):
        fused_moe(torch.zeros(0, 6, dtype=torch.float64), gate_up, down, weights, none, "silu")
    with pytest.raises(ValueError, match="rows of experts must be contiguous"):
        fused_moe(torch.zeros(0, 6), gate_up.transpose(1, 2), down, weights, none, "silu")


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    assert choose_tile(8, 8, 2) is TILES[2][0]
    assert choose_tile(8 * 20, 8, 2) is TILES[2][1]
    assert choose_tile(8 * 400, 8, 2) is TILES[2][2]
    assert choose_tile(8 * 400, 8, 4) is TILES[4][1]
    for tiles in TILES.values():
        assert tiles[-1].most_rows is None, "the largest tile has no limit"


CACHES = {
    "float16": normal(6, 2, 4, 8, dtype=torch.float16),
    "bytes of odd length": torch.arange(6 * 15, dtype=torch.uint8).view(6, 3, 5),
    "bfloat16 of odd length": normal(6, 3, 5, dtype=torch.bfloat16),
    "fp8": normal(6, 3, 16).to(torch.float8_e4m3fn),
    "blocks among others": normal(6, 2, 40)[:, 1],
    "one layer of several": normal(6, 4, 24)[:, 1:3],
    "large blocks": normal(6, 5000),
}
EACH_CACHE = pytest.mark.parametrize("title", CACHES)


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8)


@pytest.mark.slow
@EACH_CACHE
def test_blocks_are_copied_bit_by_bit(title: str) -> None:
    cache = CACHES[title].as_strided(CACHES[title].shape, CACHES[title].stride()).clone()
    whole = torch.empty_strided(cache.shape, CACHES[title].stride(), dtype=cache.dtype)
    whole.copy_(cache)
    sources, targets = torch.tensor([0, 5, -1, 2]), torch.tensor([3, 1, 4, -1])
    expected = bits(whole).clone()
    expected[3], expected[1] = expected[0].clone(), expected[5].clone()
    copy_blocks(whole, sources, targets)
    assert torch.equal(bits(whole), expected)


@pytest.mark.slow
@EACH_CACHE
def test_blocks_are_cleared_whatever_is_in_them(title: str) -> None:
    """R4.31: NaN of an earlier use as well."""
    cache = torch.empty_strided(CACHES[title].shape, CACHES[title].stride(), dtype=CACHES[title].dtype)
    cache.copy_(CACHES[title])
    if cache.dtype.is_floating_point and cache.element_size() > 1:
        cache[2] = torch.nan
    expected = bits(cache).clone()
    expected[[0, 2]] = 0
    zero_blocks(cache, torch.tensor([2, -1, 0]))
    assert torch.equal(bits(cache), expected)


def test_nothing_to_copy_and_other_layouts() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    cache = torch.ones(3, 4)
    copy_blocks(cache, none, none)
    zero_blocks(cache, none)
    zero_blocks(torch.zeros(0, 4), none)
    assert cache.all()
    with pytest.raises(ValueError, match="blocks must be contiguous"):
        zero_blocks(torch.zeros(2, 3, 4).transpose(1, 2), torch.tensor([0]))


@pytest.mark.slow
def test_what_lies_between_blocks_is_not_touched() -> None:
    whole = normal(4, 3, 8)
    before = whole.clone()
    zero_blocks(whole[:, 1], torch.tensor([1]))
    copy_blocks(whole[:, 1], torch.tensor([0]), torch.tensor([3]))
    before[1, 1] = 0
    before[3, 1] = before[0, 1]
    assert torch.equal(whole, before)
