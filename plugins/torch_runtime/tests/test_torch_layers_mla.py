"""Latent attention over a paged cache, against every head's own keys and values computed in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import CommonAttentionMetadata
from hardpoint.interfaces.kv_cache_specs import MLASpec
from hardpoint.interfaces.kv_dtypes import KVQuantization
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint.interfaces.platform import ThreadPlan
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import ParallelSlice, WorkerConfig
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_torch_runtime import ForwardContext, LayerToolkit, set_forward_context
from hardpoint_torch_runtime.layers import LatentAttention, LatentSizes, RopeParameters, ShardedModule

BLOCK = 4
ROPE = RopeParameters(theta=100.0)
SIZES = LatentSizes(
    hidden_size=12, num_heads=6, query_rank=10, latent_rank=7, plain_size=5, rotary_size=4, value_size=3
)
EPS = 1e-6


@dataclass
class Recorder:
    """A communicator that keeps what each rank contributed; the test adds it up."""

    reduced: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError(f"nothing to gather along {dim}: {tensor.shape}")


class Doubling(LinearMethod):
    """Stores half of the weight, transposed: nobody can take it for the matrix."""

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        halved = torch.empty(shape.input_size, shape.output_size)
        layer.register_parameter("halved", torch.nn.Parameter(halved, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        halved: Any = layer.halved
        return torch.nn.functional.linear(x, 2 * halved.T, bias)


class DoublesUpProjections(QuantizationMethod):
    name = "doubling"

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        return None

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return Doubling() if layer_name.endswith("kv_b_proj") else None


def toolkit(ranks: int = 1, rank: int = 0, communicator: Any = None, **changes: Any) -> LayerToolkit:
    artifact = ModelArtifact(name="m", root="/m", files=(), source="test")
    info = ModelInfo(
        artifact=artifact, architecture="A", config={}, max_position=64, vocab_size=8, dtype="float32", loader="none"
    )
    config = WorkerConfig(
        model=info,
        dtype="float32",
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"),
        block_size=BLOCK,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        threads=ThreadPlan(compute_threads=1),
        parallel=ParallelSlice(world_size=ranks, rank=rank, tensor_parallel_size=ranks),
    )
    return LayerToolkit.create(
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attention_backend=PlainAttentionBackend(),
        communicator=communicator,
        **changes,
    )


def create(sizes: LatentSizes = SIZES, tools: LayerToolkit | None = None, **changes: Any) -> LatentAttention:
    tools = tools or toolkit()
    neighbors = changes.pop("pairs_are_neighbors", True)
    rotary = tools.rotary(sizes.rotary_size, ROPE, pairs_are_neighbors=neighbors)
    given: dict[str, Any] = {"rotary": rotary, "scale": sizes.query_size**-0.5, "norm_eps": EPS, **changes}
    return tools.latent_attention("l0", sizes, **given)


def fill(layer: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))


def run(layer: LatentAttention, hidden: torch.Tensor, chunks: Sequence[int], seed: int = 0) -> torch.Tensor:
    """[T, C] of one sequence, in chunks over a cache of NaN whose blocks lie anywhere."""
    num_blocks = -(-len(hidden) // BLOCK)
    order = 1 + torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(seed))
    cache = torch.full((num_blocks + 3, 1, BLOCK, layer.sizes.latent_size), torch.nan)
    outputs, begin = [], 0
    for count in chunks:
        positions = torch.arange(begin, begin + count)
        starts, lengths = np.array([0, count], dtype=np.int32), np.array([begin + count], dtype=np.int32)
        slots = order[positions // BLOCK] * BLOCK + positions % BLOCK
        common = CommonAttentionMetadata(
            num_rows=1,
            num_tokens=count,
            max_query_len=count,
            max_seq_len=begin + count,
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(lengths),
            seq_lens_cpu=lengths,
            block_table=order[None, :num_blocks].int(),
            slot_mapping=slots,
            block_size=BLOCK,
        )
        name = layer.attn.name
        context = ForwardContext({name: common}, {name: slots}, {name: cache}, count)
        with torch.inference_mode(), set_forward_context(context):
            outputs.append(layer(hidden[positions], layer.rotary.lookup(positions)))
        begin += count
    return torch.cat(outputs)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: torch.Tensor, pairs_are_neighbors: bool) -> torch.Tensor:
    """[T, ..., R] by the angles of positions 0 to T - 1, pair by pair."""
    size = x.shape[-1]
    result = x.clone()
    for position in range(len(x)):
        for pair in range(size // 2):
            first, second = (2 * pair, 2 * pair + 1) if pairs_are_neighbors else (pair, pair + size // 2)
            angle = torch.tensor(position * ROPE.theta ** (-2 * pair / size), dtype=torch.float64)
            a, b = x[position, ..., first], x[position, ..., second]
            result[position, ..., first] = a * angle.cos() - b * angle.sin()
            result[position, ..., second] = b * angle.cos() + a * angle.sin()
    return result


@torch.no_grad()
def by_hand(layer: LatentAttention, hidden: torch.Tensor, scale: float, pairs_are_neighbors: bool) -> torch.Tensor:
    """float64 [T, C]: keys and values of every head spelled out, one sequence, no cache."""
    sizes, x = layer.sizes, hidden.double()
    weights = {name: parameter.double() for name, parameter in layer.named_parameters()}

    def linear(name: str, values: torch.Tensor) -> torch.Tensor:
        return values @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros((), dtype=torch.float64))

    if sizes.query_rank is None:
        queries = linear("q_proj", x)
    else:
        queries = linear("q_b_proj", norm(linear("q_a_proj", x), weights["q_a_layernorm.weight"]))
    queries = queries.view(len(x), sizes.num_heads, sizes.query_size)
    compressed = linear("kv_a_proj_with_mqa", x)
    latents = norm(compressed[:, : sizes.latent_rank], weights["kv_a_layernorm.weight"])
    expanded = linear("kv_b_proj", latents).view(len(x), sizes.num_heads, sizes.plain_size + sizes.value_size)
    shared = rotate(compressed[:, sizes.latent_rank :], pairs_are_neighbors)
    turned = rotate(queries[..., sizes.plain_size :], pairs_are_neighbors)
    answers = []
    for head in range(sizes.num_heads):
        keys = torch.cat((expanded[:, head, : sizes.plain_size], shared), dim=-1)
        asked = torch.cat((queries[:, head, : sizes.plain_size], turned[:, head]), dim=-1)
        scores = (asked @ keys.T * scale).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        answers.append(scores.softmax(-1) @ expanded[:, head, sizes.plain_size :])
    return linear("o_proj", torch.cat(answers, dim=-1))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sizes_in_any_chunks_equal_keys_and_values_spelled_out(data: st.DataObject) -> None:
    sizes = LatentSizes(
        hidden_size=data.draw(st.integers(1, 9)),
        num_heads=data.draw(st.integers(1, 4)),
        query_rank=data.draw(st.one_of(st.none(), st.integers(1, 7))),
        latent_rank=data.draw(st.integers(1, 9)),
        plain_size=data.draw(st.integers(1, 5)),
        rotary_size=data.draw(st.sampled_from([2, 4, 6])),
        value_size=data.draw(st.integers(1, 6)),
    )
    neighbors, scale, seed = data.draw(st.booleans()), data.draw(st.sampled_from([0.3, 1.1])), data.draw(st.integers(0))
    layer = create(sizes, bias=data.draw(st.booleans()), pairs_are_neighbors=neighbors, scale=scale)
    fill(layer, seed % 1000)
    chunks = data.draw(st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=5))
    hidden = torch.randn(sum(chunks), sizes.hidden_size, generator=torch.Generator().manual_seed(seed % 1000))
    assert_close(run(layer, hidden, chunks, seed % 1000), by_hand(layer, hidden, scale, neighbors))


def test_one_vector_per_token_is_all_that_is_kept() -> None:
    tools = toolkit()
    create(tools=tools)
    assert tools.kv_cache_specs() == {"l0.attn": MLASpec(block_size=4, num_kv_heads=1, head_size=11, dtype="float32")}
    assert tools.kv_cache_specs()["l0.attn"].page_size_bytes == 4 * 11 * 4
    with pytest.raises(ValueError, match=r"'l0\.attn' exists already"):
        create(tools=tools)


def test_a_narrow_cache_keeps_narrow_latents() -> None:
    tools = toolkit(kv_cache_dtype="bfloat16")
    create(tools=tools)
    (spec,) = tools.kv_cache_specs().values()
    assert isinstance(spec, MLASpec)
    assert (spec.dtype, spec.quantization) == ("bfloat16", KVQuantization.NONE)


@pytest.mark.parametrize("query_rank", [None, 10])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_are_the_whole(ranks: int, query_rank: int | None) -> None:
    """Heads are split, latents are not: every rank keeps all of them, and one sum makes the whole."""
    sizes = replace(SIZES, query_rank=query_rank)
    whole = create(sizes, bias=True)
    fill(whole)
    hidden = torch.randn(11, 12)
    recorder = Recorder()
    for rank in range(ranks):
        tools = toolkit(ranks, rank, recorder)
        part = create(sizes, tools, bias=True)
        share(whole, part)
        run(part, hidden, [11])
        assert part.attn.params.num_heads == 6 // ranks
        assert tools.kv_cache_specs() == {"l0.attn": whole.attn.spec}
    assert len(recorder.reduced) == ranks
    total = torch.stack(recorder.reduced).sum(0)
    assert_close(total, run(whole, hidden, [4, 7]))


def share(whole: torch.nn.Module, part: torch.nn.Module) -> None:
    """Load ``part`` from the parameters of ``whole``, as from a file."""
    for name, module in part.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            stored = whole.get_parameter(f"{name}.{parameter_name}")
            assert isinstance(module, ShardedModule)
            placement = module.place(parameter_name, None)
            assert placement.stored_shape == tuple(stored.shape)
            placement.target(parameter.data).copy_(placement.source(stored))


def test_heads_that_cannot_be_split_are_named() -> None:
    with pytest.raises(ConfigError, match="l0: number of heads is 6 .*size=4"):
        create(tools=toolkit(4, 0, Recorder()))


def test_a_quantized_up_projection_is_unpacked_once_it_is_loaded() -> None:
    plain, tools = create(), toolkit(quantization=DoublesUpProjections())
    packed = create(tools=tools)
    fill(plain)
    for name, parameter in plain.named_parameters():
        if name == "kv_b_proj.weight":
            packed.get_parameter("kv_b_proj.halved").data.copy_(parameter.T / 2)
        else:
            packed.get_parameter(name).data.copy_(parameter)
    hidden = torch.randn(6, 12)
    with pytest.raises(RuntimeError, match=r"'l0\.kv_b_proj' has no weight yet"):
        run(packed, hidden, [6])
    packed.kv_b_proj.finish_loading()
    assert_close(run(packed, hidden, [5, 1]), run(plain, hidden, [6]))


def test_a_plain_up_projection_is_not_stored_twice() -> None:
    layer = create()
    layer.kv_b_proj.finish_loading()
    weight: Any = layer.kv_b_proj.weight
    for matrix in layer.kv_b_proj.matrices():
        assert matrix.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_an_adapter_that_would_be_passed_over_is_refused() -> None:
    layer = create()
    fill(layer)
    layer.kv_b_proj.adapter = lambda x, output: output
    with pytest.raises(RuntimeError, match=r"'l0\.kv_b_proj' is absorbed into attention and takes no adapter"):
        run(layer, torch.randn(2, 12), [2])


def test_it_can_be_profiled_without_a_cache() -> None:
    """R5.40."""
    layer = create()
    fill(layer)
    with torch.inference_mode(), set_forward_context(ForwardContext(None, {}, {}, 5)):
        output = layer(torch.randn(5, 12), layer.rotary.lookup(torch.arange(5)))
    assert output.shape == (5, 12)
    assert not output.any()
