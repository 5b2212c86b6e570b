"""Attention over whole buffers equals plain attention over what is there, and writes no cell but real ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionKind,
    AttentionLayerParams,
    AttentionNeed,
    CommonAttentionMetadata,
    GraphSupport,
)
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import PluginDeclaration
from hardpoint_testing_torch import AttentionBackendSuite, FixedShapeAttention, FixedShapeBackend

HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS, WIDTH = 4, 2, 6, 4, 40, 5


@pytest.mark.slow
class TestFixedShapes(AttentionBackendSuite):
    """The rules for metadata of graphs among them: this backend is made to be captured."""

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return FixedShapeBackend()

    @pytest.fixture
    def declaration(self) -> PluginDeclaration:
        return PluginDeclaration("attention_backend", capabilities={"block_sizes": {"multiple_of": 1}})


def step(lengths: list[int], num_queries: int, num_padded: int, *, for_graph: bool) -> CommonAttentionMetadata:
    """Rows of ``lengths`` tokens, of which the last ``num_queries`` are the step's, and ``num_padded`` without any."""
    num_rows, starts = len(lengths), [number * num_queries for number in range(len(lengths) + 1)]
    table = torch.zeros((num_rows + num_padded, WIDTH), dtype=torch.int32)
    order = np.random.default_rng(len(lengths)).permutation(NUM_BLOCKS - 1) + 1
    table[:num_rows] = torch.from_numpy(order[: num_rows * WIDTH].reshape(num_rows, WIDTH))
    seq_lens = np.array(lengths + [0] * num_padded, dtype=np.int32)
    starts_cpu = np.array(starts + starts[-1:] * num_padded, dtype=np.int32)
    slots = [
        int(table[row, place // BLOCK]) * BLOCK + place % BLOCK
        for row, length in enumerate(lengths)
        for place in range(length - num_queries, length)
    ]
    return CommonAttentionMetadata(
        num_rows=num_rows,
        num_tokens=starts[-1],
        max_query_len=num_queries,
        max_seq_len=WIDTH * BLOCK,
        query_start_loc=torch.from_numpy(starts_cpu),
        query_start_loc_cpu=starts_cpu,
        seq_lens=torch.from_numpy(seq_lens),
        seq_lens_cpu=seq_lens,
        block_table=table,
        slot_mapping=torch.tensor(slots + [-1] * num_padded * num_queries),
        block_size=BLOCK,
        for_graph=for_graph,
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(3, WIDTH * BLOCK), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([None, 1, 5]),
)
def test_it_equals_plain_attention(lengths: list[int], num_queries: int, num_padded: int, window: int | None) -> None:
    """R4.53, R4.54: whatever stale cells hold, and whatever the shape is padded to."""
    layer = FixedShapeAttention(AttentionLayerParams("a", HEADS, KV_HEADS, SIZE, 0.4, sliding_window=window))
    generator = torch.Generator().manual_seed(sum(lengths))
    cache = torch.full((NUM_BLOCKS, KV_HEADS, BLOCK, 2 * SIZE), torch.nan)
    cache[0] = 0
    plain, graph = (step(lengths, num_queries, num_padded, for_graph=is_graph) for is_graph in (False, True))
    for row, length in enumerate(lengths):
        for place in range(length):
            cell = cache[int(plain.block_table[row, place // BLOCK]), :, place % BLOCK]
            cell.copy_(torch.randn(cell.shape, generator=generator))
    num_tokens = len(plain.slot_mapping)
    query, key, value = (
        torch.randn(num_tokens, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    caches = [cache.clone(), cache.clone()]
    outputs = []
    for metadata, stored in zip((plain, graph), caches, strict=True):
        layer.write_kv(key, value, stored, metadata.slot_mapping)
        outputs.append(layer.forward(query, key, value, stored, metadata, torch.empty_like(query)))
    torch.testing.assert_close(caches[1], caches[0], equal_nan=True)
    real = plain.num_tokens
    torch.testing.assert_close(outputs[1][:real], outputs[0][:real], rtol=1e-5, atol=1e-5)
    # Null block and stale cells are as they were.
    assert not caches[1][0].any()
    assert int(caches[1].isnan().sum()) == int(cache.isnan().sum())


@pytest.mark.parametrize(
    "changes", [{"uses_sinks": True}, {"logits_soft_cap": 3.0}, {"kind": AttentionKind.ENCODER_ONLY}], ids=str
)
def test_other_layers_are_refused(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "device": DeviceDescription(device_type="cpu", name="here"),
    }
    backend = FixedShapeBackend()
    assert backend.refuse(AttentionNeed(**fields)) is None  # type: ignore[arg-type]
    assert "plain decoders" in (backend.refuse(AttentionNeed(**fields | changes)) or "")  # type: ignore[arg-type]


def test_rows_of_any_length_are_no_fixed_shape() -> None:
    with pytest.raises(ValueError, match="graphs of ALWAYS batches"):
        FixedShapeBackend(GraphSupport.ALWAYS)
