"""Linear layers: fused parts, bias, hooks, and the arithmetic of every tensor-parallel split."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_torch_runtime.layers import (
    ColumnParallelLinear,
    LinearFactory,
    LMHead,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    TensorParallel,
    UnquantizedLinearMethod,
    VocabEmbedding,
)

CPU = torch.device("cpu")


@dataclass
class Recorder:
    """A communicator that keeps what each rank contributed; the test combines it."""

    reduced: list[torch.Tensor]
    gathered: list[torch.Tensor]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == -1
        self.gathered.append(tensor)
        return tensor

    def close(self) -> None: ...


def plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


def factory(rank: int = 0, size: int = 1, recorder: Recorder | None = None) -> LinearFactory:
    return LinearFactory(plain, TensorParallel(rank, size, recorder), torch.float32, CPU)


def weight_of(module: torch.nn.Module) -> torch.Tensor:
    return module.get_parameter("weight").data


def load(
    layer: ParallelLinear | VocabEmbedding, shard: str | None, weight: torch.Tensor, parameter: str = "weight"
) -> None:
    placement = layer.place(parameter, shard)
    assert placement.stored_shape == tuple(weight.shape)
    placement.target(getattr(layer, parameter).data).copy_(placement.source(weight))


def test_fused_projections_equal_separate_ones() -> None:
    layer = QKVParallelLinear("qkv", factory(), 12, num_heads=4, num_kv_heads=2, head_size=3, bias=True)
    weights = {"q": torch.randn(12, 12), "k": torch.randn(6, 12), "v": torch.randn(6, 12)}
    biases = {part: torch.randn(weight.shape[0]) for part, weight in weights.items()}
    for part, weight in weights.items():
        load(layer, part, weight)
        load(layer, part, biases[part], "bias")
    x = torch.randn(5, 12)
    expected = torch.cat([F.linear(x, weights[part], biases[part]) for part in ("q", "k", "v")], dim=-1)
    torch.testing.assert_close(layer(x), expected)


def test_an_unknown_part_is_named() -> None:
    layer = MergedColumnParallelLinear("mlp", factory(), 4, {"gate": 8, "up": 8})
    with pytest.raises(KeyError, match=r"no part 'down'; its parts are gate, up"):
        layer.place("weight", "down")
    with pytest.raises(KeyError, match="not fused"):
        RowParallelLinear("o", factory(), 4, 4).place("weight", "q")


@given(size=st.sampled_from([1, 2, 4]), bias=st.booleans(), seed=st.integers(0, 99))
def test_column_splits_together_are_the_whole(size: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(8, 6, generator=generator), torch.randn(3, 6, generator=generator)
    bias_values = torch.randn(8, generator=generator)
    recorder = Recorder([], [])
    for rank in range(size):
        layer = ColumnParallelLinear("c", factory(rank, size, recorder), 6, 8, bias=bias, gather_output=True)
        load(layer, None, weight)
        if bias:
            load(layer, None, bias_values, "bias")
        output = layer(x)
    whole = torch.cat(recorder.gathered, dim=-1) if size > 1 else output
    torch.testing.assert_close(whole, F.linear(x, weight, bias_values if bias else None))


@given(size=st.sampled_from([1, 2, 4]), bias=st.booleans(), seed=st.integers(0, 99))
def test_row_splits_sum_to_the_whole_with_the_bias_once(size: int, bias: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(5, 8, generator=generator), torch.randn(3, 8, generator=generator)
    bias_values = torch.randn(5, generator=generator)
    recorder = Recorder([], [])
    for rank in range(size):
        layer = RowParallelLinear("r", factory(rank, size, recorder), 8, 5, bias=bias)
        load(layer, None, weight)
        if bias:
            load(layer, None, bias_values, "bias")
        output = layer(x.chunk(size, dim=-1)[rank])
    whole = torch.stack(recorder.reduced).sum(0) if size > 1 else output
    torch.testing.assert_close(whole, F.linear(x, weight, bias_values if bias else None))


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 2), (2, 4), (1, 4)])
def test_query_and_key_heads_stay_together_over_ranks(kv_heads: int, size: int) -> None:
    """Each rank's queries find their key/value head locally, also where a head is repeated over ranks."""
    heads, head_size = 8, 2
    query = torch.arange(heads).repeat_interleave(head_size).float().unsqueeze(1).expand(-1, 3).contiguous()
    key = torch.arange(kv_heads).repeat_interleave(head_size).float().unsqueeze(1).expand(-1, 3).contiguous()
    for rank in range(size):
        layer = QKVParallelLinear(
            "qkv", factory(rank, size, Recorder([], [])), 3, num_heads=heads, num_kv_heads=kv_heads, head_size=head_size
        )
        for part, weight in {"q": query, "k": key, "v": key}.items():
            load(layer, part, weight)
        q, k, _ = weight_of(layer)[:, 0].split(layer.shape.output_sizes)
        local_q, local_k = q[::head_size], k[::head_size]
        assert len(local_q) == layer.num_heads
        assert len(local_k) == layer.num_kv_heads
        group = layer.num_heads // layer.num_kv_heads
        for index, head in enumerate(local_q.tolist()):
            assert local_k[index // group].item() == head // (heads // kv_heads)


def test_indivisible_sizes_are_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        QKVParallelLinear("qkv", factory(0, 3), 8, num_heads=4, num_kv_heads=2, head_size=2)
    with pytest.raises(ConfigError, match="3 key/value heads cannot be repeated"):
        QKVParallelLinear("qkv", factory(0, 4), 8, num_heads=12, num_kv_heads=3, head_size=2)


def test_several_ranks_need_a_communicator() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2"):
        TensorParallel.from_slice(ParallelSlice(world_size=2, tensor_parallel_size=2))
    assert TensorParallel.from_slice(ParallelSlice()) == TensorParallel()


def test_one_rank_never_asks_the_communicator() -> None:
    recorder = Recorder([], [])
    row = RowParallelLinear("r", factory(0, 1, recorder), 4, 4)
    row(torch.randn(2, 4))
    assert recorder.reduced == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_vocabulary_splits_with_a_ragged_end(size: int) -> None:
    """7 tokens over 2 or 3 ranks: the last share is partly padding."""
    weight, ids, hidden = torch.randn(7, 4), torch.arange(7), torch.randn(2, 4)
    recorder = Recorder([], [])
    for rank in range(size):
        parallel = TensorParallel(rank, size, recorder)
        embedding = VocabEmbedding("e", 7, 4, parallel, torch.float32, CPU)
        load(embedding, None, weight)
        embedded = embedding(ids)
        head = LMHead("h", factory(rank, size, recorder), 7, 4)
        assert head.projection is not None
        torch.nn.init.zeros_(weight_of(head.projection))
        load(head.projection, None, weight)
        tied = LMHead("h", factory(rank, size, recorder), 7, 4, tied_to=embedding)
        logits, tied_logits = head(hidden), tied(hidden)
    if size > 1:
        embedded = torch.stack(recorder.reduced).sum(0)
        logits = torch.cat(recorder.gathered[0::2], dim=-1)[:, :7]
        tied_logits = torch.cat(recorder.gathered[1::2], dim=-1)[:, :7]
    torch.testing.assert_close(embedded, weight)
    torch.testing.assert_close(logits, hidden @ weight.T)
    torch.testing.assert_close(tied_logits, hidden @ weight.T)


def test_a_tied_head_lists_no_parameter_of_its_own() -> None:
    embedding = VocabEmbedding("e", 7, 4, TensorParallel(), torch.float32, CPU)
    assert list(LMHead("h", factory(), 7, 4, tied_to=embedding).parameters()) == []


def test_an_adapter_sees_input_and_output() -> None:
    layer = ColumnParallelLinear("c", factory(), 4, 4)
    torch.nn.init.eye_(weight_of(layer))
    layer.adapter = lambda x, output: output + 10 * x
    torch.testing.assert_close(layer(torch.ones(1, 4)), torch.full((1, 4), 11.0))


class HalvedMethod(LinearMethod):
    """Stores a scale beside the weight, to show that methods own their parameters."""

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        weight = torch.ones(shape.output_size, shape.input_size)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        layer.register_parameter("scale", torch.nn.Parameter(torch.tensor([0.5]), requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.weight * layer.scale, bias)  # type: ignore[operator]


def test_the_linear_method_decides_storage_and_arithmetic() -> None:
    seen: list[tuple[str, LinearShape]] = []

    def choose(name: str, shape: LinearShape) -> LinearMethod:
        seen.append((name, shape))
        return HalvedMethod()

    made = LinearFactory(choose, TensorParallel(), torch.bfloat16, CPU)
    layer = MergedColumnParallelLinear("model.mlp", made, 4, {"gate": 2, "up": 3})
    assert seen == [("model.mlp", LinearShape(4, (2, 3), "bfloat16"))]
    torch.testing.assert_close(layer(torch.ones(1, 4)), torch.full((1, 5), 2.0))
