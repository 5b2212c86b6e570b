"""Which layers each method takes and what it says of the others; vocabularies; what is handed to kernels."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
import torch
from pydantic import BaseModel

from hardpoint.interfaces.plugin import declaration_of
from hardpoint.interfaces.quantization import LinearShape
from hardpoint.interfaces.worker import ParallelSlice, WorkerContext
from hardpoint.roles import ProcessRole
from hardpoint_quantization import gguf, int4, int8
from hardpoint_quantization.int8 import Int8Linear
from hardpoint_testing_torch import PlainAttentionBackend, worker_config
from hardpoint_testing_torch.linear_bench import bench_info
from hardpoint_torch_runtime.layers import (
    ChannelInt8Weight,
    GroupedInt4Weight,
    LayerToolkit,
    LoadingObserver,
    OutputPart,
    SegmentedColumnLinear,
    StoredLinearMethod,
    StreamingLinearMethod,
    TableQuantization,
)

MODULES = {"int8": int8, "int4": int4, "gguf": gguf}
LOGGER = logging.getLogger("hardpoint.test.quantization")
SHAPE = LinearShape(64, (8,), "float32")
CPU = torch.device("cpu")


def method(name: str, **options: Any) -> Any:
    factory = MODULES[name].create
    declared = declaration_of(factory)
    assert declared is not None
    model: type[BaseModel] = declared.options
    context = WorkerContext(
        name=name, api_version=1, roles=frozenset({ProcessRole.WORKER}), rank=0, logger=LOGGER, device=CPU
    )
    return factory(context, model(**options))


def toolkit(quantization: Any, ranks: int = 1, rank: int = 0) -> LayerToolkit:
    share = ParallelSlice(rank=rank, world_size=ranks, tensor_parallel_size=ranks)
    config = msgspec.structs.replace(worker_config(bench_info()), parallel=share)
    communicator: Any = object() if ranks > 1 else None
    return LayerToolkit.create(
        config,
        device=CPU,
        dtype=torch.float32,
        attention_backend=PlainAttentionBackend(),
        quantization=quantization,
        communicator=communicator,
    )


def fill(layer: Any, dense: torch.Tensor) -> None:
    """As the loader does it: this rank's rows of the stored tensor."""
    placement = layer.place("weight", None)
    assert placement.stored_shape == tuple(dense.shape)
    with torch.no_grad():
        layer.method.load_dense(layer, placement, placement.source(dense))
    layer.finish_loading()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_checkpoints_that_are_quantized_already_are_refused(name: str) -> None:
    stored = msgspec.structs.replace(bench_info(), config={"quantization_config": {"quant_method": "awq"}})
    assert method(name).refuse(bench_info(), "cpu") is None
    assert "quantized already ({'quant_method': 'awq'})" in method(name).refuse(stored, "cpu")


def test_blocks_are_in_gguf_files_only() -> None:
    refusal = method("gguf").refuse(msgspec.structs.replace(bench_info(), loader="safetensors"), "cpu")
    assert "'safetensors'" in refusal
    assert "take int8 or int4" in refusal
    assert method("gguf").refuse(msgspec.structs.replace(bench_info(), loader="gguf"), "cpu") is None


@pytest.mark.parametrize("name", MODULES)
def test_methods_offer_what_kernels_and_the_loader_ask_for(name: str) -> None:
    made = method(name)
    offered: object = made
    assert isinstance(offered, TableQuantization)
    assert isinstance(offered, LoadingObserver)
    linear: object = made.linear_method("model.layers.0.mlp.down_proj", SHAPE)
    assert isinstance(linear, StoredLinearMethod)
    assert isinstance(linear, StreamingLinearMethod)


@pytest.mark.parametrize("name", MODULES)
def test_ignored_layers_stay_dense_and_patterns_without_one_are_told(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R10.9 and R10.14 (P10.1): exact names and patterns; what matched nothing is reported once with near names."""
    patterns = ("model.layers.0.mlp.gate_up_proj", "model.layers.*.self_attn.o_proj", "model.layers.0.mlp.down_prj")
    made = method(name, ignore=patterns)
    names = ["mlp.gate_up_proj", "mlp.down_proj", "self_attn.o_proj"]
    taken = [made.linear_method(f"model.layers.{layer}.{one}", SHAPE) is not None for layer in (0, 1) for one in names]
    assert taken == [False, True, False, True, True, False]
    with caplog.at_level(logging.INFO, LOGGER.name):
        made.loading_ended()
    told, warned = caplog.messages
    assert "3 layers quantized" in told
    assert "2 such as model.layers.0.self_attn.o_proj: ignored by 'model.layers.*.self_attn.o_proj'" in told
    assert "'model.layers.0.mlp.down_prj' (near: model.layers.0.mlp.down_proj" in warned


@pytest.mark.parametrize("name", MODULES)
def test_what_latent_attention_absorbs_stays_dense(name: str) -> None:
    """It is unpacked whole when loading ends, so a quantized copy would only be there besides."""
    made = method(name)
    assert made.linear_method("model.layers.0.self_attn.kv_b_proj", SHAPE) is None
    assert "absorbed" in made.selection.left_dense["model.layers.0.self_attn.kv_b_proj"]


def test_inputs_that_make_no_whole_groups_stay_dense() -> None:
    made = method("int4", group_size=64)
    assert made.linear_method("even", LinearShape(128, (8,), "float32")) is not None
    assert made.linear_method("odd", LinearShape(96, (8,), "float32")) is None
    assert "96 inputs make no whole groups of 64 (option group_size)" in made.selection.left_dense["odd"]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_vocabulary_is_kept_in_int8_unless_told_otherwise(name: str) -> None:
    wide = LinearShape(60, (8,), "float32")
    assert isinstance(method(name).linear_method("lm_head", wide), Int8Linear)
    assert isinstance(method(name).table_method("model.embed_tokens", wide), Int8Linear)
    dense = method(name, head="dense")
    assert dense.linear_method("lm_head", wide) is None
    assert dense.table_method("model.embed_tokens", wide) is None
    assert dense.selection.left_dense == {"lm_head": "head=dense", "model.embed_tokens": "head=dense"}
    assert method(name, ignore=("*embed*",)).table_method("model.embed_tokens", wide) is None


def test_a_tied_head_multiplies_the_rows_that_are_looked_up() -> None:
    layers = toolkit(method("int8", activations="float"))
    embedding = layers.embedding("model.embed_tokens", 50, 24)
    head = layers.lm_head("lm_head", 50, 24, tied_to=embedding)
    dense = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))
    fill(embedding, dense)
    rows = embedding(torch.arange(50))
    assert float((rows - dense).abs().max()) < float(dense.abs().max()) / 250
    hidden = torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(head(hidden), hidden @ rows.T)
    stored = head.stored()
    assert isinstance(stored, ChannelInt8Weight)
    assert stored.values is embedding.weight
    head.release()
    assert torch.equal(embedding(torch.tensor([7])), rows[7:8])


def test_ranks_share_a_vocabulary_and_the_last_one_has_zeros_left_over() -> None:
    dense = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    shares = []
    for rank in range(2):
        embedding = toolkit(method("int8"), ranks=2, rank=rank).embedding("model.embed_tokens", 5, 8)
        fill(embedding, dense)
        table: Any = embedding.method
        shares.append(table.look_up(embedding, torch.arange(3)))
    whole = torch.cat(shares)
    torch.testing.assert_close(whole[:5], dense, atol=0.02, rtol=0)
    assert not whole[5].any()


def test_a_dense_embedding_tells_its_weight_too() -> None:
    layers = toolkit(None)
    embedding = layers.embedding("model.embed_tokens", 5, 8)
    head = layers.lm_head("lm_head", 5, 8, tied_to=embedding)
    stored: Any = head.stored()
    assert stored.weight is embedding.weight


@pytest.mark.parametrize(("name", "record"), [("int8", ChannelInt8Weight), ("int4", GroupedInt4Weight)])
def test_stored_weights_can_be_handed_over(name: str, record: Any) -> None:
    layer: Any = toolkit(method(name)).column_linear("model.layers.0.up_proj", 64, 8)
    with pytest.raises(RuntimeError, match="not loaded yet"):
        layer.stored()
    fill(layer, torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    stored: Any = layer.stored()
    assert type(stored) is record
    assert stored.int8_activations
    layer.release()
    assert sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers())) == 0
    with pytest.raises(RuntimeError, match="released"):
        layer.stored()


def test_one_stored_tensor_of_several_segments_is_taken_apart() -> None:
    """Layers whose projections are stored in one piece work under tensor parallelism as well."""
    layers = toolkit(method("int8", activations="float"), ranks=2, rank=1)
    layer: Any = SegmentedColumnLinear("mixer.in_proj", layers.linear_factory, 4, [OutputPart(4, 2, 2)] * 2)
    dense = torch.arange(32.0).view(8, 4)
    fill(layer, dense)
    mine = torch.cat((dense[2:4], dense[6:8]))
    torch.testing.assert_close(layer(torch.eye(4)).T, mine, atol=0.2, rtol=0)
