"""Biases by distance and attention within sequences, against the plain formulas and ``transformers``."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from hardpoint.errors import ConfigError
from hardpoint_torch_runtime.layers import RelativeBias, TensorParallel, dense_attention
from hardpoint_torch_runtime.layers.relative_bias import distance_buckets

CPU = torch.device("cpu")
SHAPES = [(32, 128), (16, 40), (8, 20), (12, 17), (4, 3)]


def bias(num_buckets: int, max_distance: int, rank: int = 0, size: int = 1) -> RelativeBias:
    made = RelativeBias(num_buckets, 6, max_distance, TensorParallel(rank, size), torch.float32, CPU)
    weight = torch.randn(num_buckets, 6, generator=torch.Generator().manual_seed(num_buckets))
    placed = made.place("weight", None)
    made.weight.copy_(placed.source(weight))
    return made


@pytest.mark.parametrize(("num_buckets", "max_distance"), SHAPES)
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int) -> None:
    distances = torch.arange(600)
    wanted = T5Attention._relative_position_bucket(-distances, False, num_buckets, max_distance)
    assert torch.equal(distance_buckets(distances, num_buckets, max_distance), wanted)
    # One entry stands for all that are farther.
    assert wanted[max_distance:].unique().tolist() == [num_buckets - 1]


@pytest.mark.parametrize(("num_buckets", "max_distance"), SHAPES)
def test_both_sides_and_one(num_buckets: int, max_distance: int) -> None:
    made, length = bias(num_buckets, max_distance), 50
    offsets = torch.arange(length)[None] - torch.arange(length)[:, None]
    for is_both, table in ((True, made.both_sides(length)), (False, None)):
        buckets = T5Attention._relative_position_bucket(offsets, is_both, num_buckets, max_distance)
        wanted = made.weight[buckets].permute(2, 0, 1)
        if table is None:
            table = made.by_distance()[:, (-offsets).clamp(0, max_distance)]
            wanted = wanted.where(offsets <= 0, table)
        assert torch.equal(table, wanted)


def test_ranks_share_out_the_heads() -> None:
    whole = bias(12, 17)
    parts = [bias(12, 17, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.both_sides(9) for part in parts]), whole.both_sides(9))
    assert torch.equal(torch.cat([part.by_distance() for part in parts]), whole.by_distance())
    with pytest.raises(ConfigError, match="number of heads with relative biases is 6"):
        bias(12, 17, 0, 4)
    with pytest.raises(KeyError, match="only a whole 'weight'"):
        whole.place("bias", None)


@pytest.mark.parametrize("biased", [False, True])
def test_sequences_see_themselves_only(biased: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    lengths, made = [5, 1, 9], bias(12, 17)
    query, key, value = (torch.randn(15, 6, 8, generator=draw) for _ in range(3))
    found = dense_attention(query, key, value, lengths, 0.3, made.both_sides if biased else None)
    assert found.shape == (15, 48)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin := begin + length)
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), key[rows].double()) * 0.3
        scores = scores + made.both_sides(length).double() if biased else scores
        wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[rows].double()).flatten(1)
        assert torch.allclose(found[rows].double(), wanted, atol=1e-5)
