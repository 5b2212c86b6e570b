"""Weights stored in another order than they are computed in: head by head, or with inputs before outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hardpoint.errors import ConfigError
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.layers import (
    GROUPED,
    TRANSPOSED,
    ColumnParallelLinear,
    LinearFactory,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    TensorParallel,
    TransposedPlacement,
    UnquantizedLinearMethod,
)

CPU = torch.device("cpu")
INPUT, HEAD = 6, 4


class Packed(LinearMethod):
    """Keeps codes that nobody can take apart."""

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        codes = torch.zeros(shape.output_size, shape.input_size, dtype=torch.int8)
        layer.register_parameter("weight", torch.nn.Parameter(codes, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.get_parameter("weight").float(), bias)


def plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


def packed(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return Packed()


def factory(rank: int = 0, size: int = 1) -> LinearFactory:
    return LinearFactory(plain, TensorParallel(rank, size), torch.float32, CPU)


def load(layer: ParallelLinear, shard: str | None, stored: torch.Tensor, parameter: str = "weight") -> torch.Tensor:
    placement = layer.place(parameter, shard)
    assert placement.stored_shape == tuple(stored.shape)
    target = layer.get_parameter(parameter).data
    placement.target(target).copy_(placement.source(stored))
    return target


def interleaved(parts: dict[str, torch.Tensor], num_kv_heads: int) -> torch.Tensor:
    """One stored tensor of queries, keys and values [heads * HEAD, ...], KV head by KV head."""
    query, key, value = (part.reshape(num_kv_heads, -1, *part.shape[1:]) for part in parts.values())
    return torch.cat([torch.cat(group) for group in zip(query, key, value, strict=True)])


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (4, 1), (8, 4)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_finds_its_heads_among_those_of_all(heads: tuple[int, int], size: int) -> None:
    num_heads, num_kv_heads = heads
    if num_heads % size or max(num_kv_heads, size) % min(num_kv_heads, size):
        return
    rows = {"q": num_heads * HEAD, "k": num_kv_heads * HEAD, "v": num_kv_heads * HEAD}
    weights = {part: torch.randn(count, INPUT) for part, count in rows.items()}
    biases = {part: torch.randn(count) for part, count in rows.items()}
    for rank in range(size):
        apart, together = (
            QKVParallelLinear(
                "qkv",
                factory(rank, size),
                INPUT,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=HEAD,
                bias=True,
            )
            for _ in range(2)
        )
        for part in rows:
            load(apart, part, weights[part])
            load(apart, part, biases[part], "bias")
        found = load(together, GROUPED, interleaved(weights, num_kv_heads))
        assert torch.equal(found, apart.get_parameter("weight"))
        assert torch.equal(
            load(together, GROUPED, interleaved(biases, num_kv_heads), "bias"), apart.get_parameter("bias")
        )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("make", [ColumnParallelLinear, RowParallelLinear])
def test_inputs_before_outputs(make: type[ColumnParallelLinear] | type[RowParallelLinear], size: int) -> None:
    weight = torch.randn(8, INPUT)
    for rank in range(size):
        upright, transposed = (make("linear", factory(rank, size), INPUT, 8) for _ in range(2))
        found = load(transposed, TRANSPOSED, weight.T.contiguous())
        assert torch.equal(found, load(upright, None, weight))


@pytest.mark.parametrize("size", [1, 2])
def test_a_fused_projection_with_inputs_before_outputs(size: int) -> None:
    weights = {part: torch.randn(2 * HEAD, INPUT) for part in ("q", "k", "v")}
    for rank in range(size):
        apart, together = (
            QKVParallelLinear("qkv", factory(rank, size), INPUT, num_heads=2, num_kv_heads=2, head_size=HEAD)
            for _ in range(2)
        )
        for part, weight in weights.items():
            load(apart, part, weight)
        found = load(together, TRANSPOSED, torch.cat(list(weights.values())).T.contiguous())
        assert torch.equal(found, apart.get_parameter("weight"))


def test_rows_come_in_one_piece_for_methods_that_convert_them() -> None:
    """What is stored transposed is a view with strides; kernels that repack rows read memory."""
    placement = ColumnParallelLinear("linear", factory(0, 2), INPUT, 8).place("weight", TRANSPOSED)
    values = placement.source(torch.randn(INPUT, 8))
    assert values.is_contiguous()
    assert (placement.dim, placement.target_start, placement.length) == (0, 0, 4)
    with pytest.raises(ValueError, match="without the upright one"):
        TransposedPlacement((2, 2), 0, 0, 0, 2).source(torch.zeros(2, 2))


def test_packed_weights_stay_in_their_order() -> None:
    made = LinearFactory(packed, TensorParallel(), torch.float32, CPU)
    qkv = QKVParallelLinear("qkv", made, INPUT, num_heads=2, num_kv_heads=1, head_size=HEAD)
    with pytest.raises(ConfigError, match=r"layer 'qkv' is stored in another order .* Packed cannot change"):
        qkv.place("weight", GROUPED)
    with pytest.raises(ConfigError, match=r"layer 'up' is stored in another order .* choose a dense checkpoint"):
        ColumnParallelLinear("up", made, INPUT, 8).place("weight", TRANSPOSED)
    assert qkv.place("weight", "q").stored_shape == (2 * HEAD, INPUT)


def test_other_layers_know_no_heads() -> None:
    with pytest.raises(KeyError, match="no part 'grouped'"):
        ColumnParallelLinear("up", factory(), INPUT, 8).place("weight", GROUPED)
