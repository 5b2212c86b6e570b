"""The attention layer: which backend calls it makes, in which order, and what it tells the cache planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
    KVWriteMode,
)
from hardpoint.interfaces.kv_cache_specs import (
    AttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from hardpoint.interfaces.kv_dtypes import KVQuantization
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint.interfaces.platform import ThreadPlan
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime import ForwardContext, LayerToolkit, set_forward_context
from hardpoint_torch_runtime.layers import RopeParameters, UnquantizedLinearMethod

T, HEADS, KV_HEADS, SIZE = 3, 4, 2, 8


class RecordingImpl(AttentionImpl):
    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params
        self.calls: list[tuple[str, Any]] = []

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        self.calls.append(("forward", (tuple(query.shape), tuple(key.shape), kv_cache, metadata)))
        return output.fill_(0 if metadata is None else 1)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self.calls.append(("write", (kv_cache, slot_mapping)))


class RecordingBackend(AttentionBackend):
    name = "recording"

    def refuse(self, need: AttentionNeed) -> str | None:
        return None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return BlockSizeRule(multiple_of=1)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        raise TypeError("layers never build metadata")

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return RecordingImpl(params)


class FusedBackend(RecordingBackend):
    kv_write_mode = KVWriteMode.FUSED


def config(**changes: Any) -> WorkerConfig:
    artifact = ModelArtifact(name="m", root="/m", files=(), source="test")
    info = ModelInfo(
        artifact=artifact, architecture="A", config={}, max_position=64, vocab_size=8, dtype="float32", loader="none"
    )
    settings: dict[str, Any] = {
        "model": info,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "threads": ThreadPlan(compute_threads=1),
    }
    return WorkerConfig(**{**settings, **changes})


def toolkit(backend: AttentionBackend | None = None, **changes: Any) -> LayerToolkit:
    return LayerToolkit.create(
        config(**changes),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        attention_backend=backend or RecordingBackend(),
    )


def run(backend: AttentionBackend, context: ForwardContext, **layer: Any) -> tuple[torch.Tensor, RecordingImpl]:
    tools = toolkit(backend)
    attention = tools.attention("l0", num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=1.0, **layer)
    states = torch.randn(T, (HEADS + 2 * KV_HEADS) * SIZE)
    query, key, value = states.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], dim=-1)
    with set_forward_context(context):
        output = attention(query, key, value)
    assert isinstance(attention.impl, RecordingImpl)
    return output, attention.impl


def context(metadata: dict[str, Any] | None, name: str = "l0") -> ForwardContext:
    return ForwardContext(
        attention_metadata=metadata,
        slot_mapping={name: torch.zeros(T, dtype=torch.int64)},
        kv_caches={name: torch.zeros(1)},
        num_tokens=T,
    )


def test_the_cache_is_written_before_it_is_read() -> None:
    """R5.1, R5.70."""
    given = context({"l0": "metadata"})
    output, impl = run(RecordingBackend(), given)
    assert [name for name, _ in impl.calls] == ["write", "forward"]
    assert impl.calls[0][1][1] is given.slot_mapping["l0"]
    shape_q, shape_k, cache, metadata = impl.calls[1][1]
    assert (shape_q, shape_k) == ((T, HEADS, SIZE), (T, KV_HEADS, SIZE))
    assert cache is given.kv_caches["l0"]
    assert metadata == "metadata"
    assert output.shape == (T, HEADS * SIZE)
    assert bool((output == 1).all())


def test_a_fused_backend_writes_by_itself() -> None:
    _, impl = run(FusedBackend(), context({"l0": "metadata"}))
    assert [name for name, _ in impl.calls] == ["forward"]


def test_without_metadata_no_cache_is_touched() -> None:
    """R5.40."""
    output, impl = run(RecordingBackend(), ForwardContext(None, {}, {}, T))
    assert [name for name, _ in impl.calls] == ["forward"]
    assert impl.calls[0][1][2] is None
    assert not output.any()


def test_an_encoder_layer_has_no_cache() -> None:
    """R5.46."""
    _, impl = run(RecordingBackend(), ForwardContext({"l0": "metadata"}, {}, {}, T), kind=AttentionKind.ENCODER_ONLY)
    assert [name for name, _ in impl.calls] == ["forward"]
    assert impl.calls[0][1][2] is None


@pytest.mark.parametrize("missing", ["kv_caches", "slot_mapping", "attention_metadata"])
def test_a_missing_entry_names_field_and_layer(missing: str) -> None:
    given = context({"l0": "metadata"})
    getattr(given, missing).clear()
    with pytest.raises(RuntimeError, match=f"{missing} has no entry for layer 'l0'"):
        run(RecordingBackend(), given)


def test_specs_come_from_the_layers_in_order() -> None:
    tools = toolkit(kv_cache_dtype="auto")
    for name, window in (("a", None), ("b", 7)):
        tools.attention(name, num_heads=4, num_kv_heads=2, head_size=8, scale=1.0, sliding_window=window)
    tools.attention("enc", num_heads=4, num_kv_heads=2, head_size=8, scale=1.0, kind=AttentionKind.ENCODER_ONLY)
    assert list(tools.attention_layers) == ["a", "b", "enc"]
    assert tools.kv_cache_specs() == {
        "a": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16"),
        "b": SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16", sliding_window=7),
        "enc": EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="bfloat16"),
    }


def test_the_cache_may_have_its_own_dtype() -> None:
    tools = toolkit(kv_cache_dtype="float16")
    spec = tools.attention("a", num_heads=4, num_kv_heads=2, head_size=8, scale=1.0).spec
    assert isinstance(spec, AttentionSpec)
    assert spec.dtype == "float16"


def test_a_quantized_cache_is_resolved_from_its_name_once() -> None:
    """R1.25, R1.67: the spec holds the storage dtype, the mode for kernels and the bytes of scales, never the name."""
    spec = (
        toolkit(kv_cache_dtype="int8_per_token_head")
        .attention("a", num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
        .spec
    )
    assert isinstance(spec, AttentionSpec)
    assert (spec.dtype, spec.quantization) == ("int8", KVQuantization.PER_TOKEN_HEAD)
    assert spec.content_bytes == 2 * 8 + 8
    with pytest.raises(ConfigError, match="'int3' is unknown; allowed: .*fp8, "):
        toolkit(kv_cache_dtype="int3").attention("a", num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)


def test_layer_names_are_unique() -> None:
    tools = toolkit()
    tools.attention("a", num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)
    with pytest.raises(ValueError, match="'a' exists already"):
        tools.attention("a", num_heads=4, num_kv_heads=2, head_size=8, scale=1.0)


def test_equal_rotary_tables_are_shared() -> None:
    tools = toolkit()
    assert tools.rotary(8, RopeParameters()) is tools.rotary(8, RopeParameters())
    assert tools.rotary(8, RopeParameters()) is not tools.rotary(8, RopeParameters(theta=5.0))
    assert tools.rotary(8, RopeParameters()).max_position == 64


class OnlyMlp(QuantizationMethod):
    name = "only_mlp"

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        return None

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        return MarkedMethod(torch.bfloat16, torch.device("cpu")) if layer_name.endswith("mlp") else None


class MarkedMethod(UnquantizedLinearMethod):
    pass


def test_the_quantization_method_chooses_per_layer() -> None:
    tools = LayerToolkit.create(
        config(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        attention_backend=RecordingBackend(),
        quantization=OnlyMlp(),
    )
    assert isinstance(tools.column_linear("a.mlp", 4, 4).method, MarkedMethod)
    plain = tools.row_linear("a.o_proj", 4, 4)
    assert type(plain.method) is UnquantizedLinearMethod
    assert plain.get_parameter("weight").dtype == torch.bfloat16
