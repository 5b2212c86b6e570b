"""From specs and a budget to a memory plan (spec 01 sections 1.2 and 1.3)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVPlanRequest,
    NoOptions,
    PluginContext,
    spec_from_wire,
)
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint_scheduling.kv_cache.grouping import group_layers, merge_specs
from hardpoint_scheduling.kv_cache.layouts import LayerOutermostLayout, create_layer_outermost
from sched_support import spec


def plan(specs: dict[str, KVCacheSpec], budget: int = 0, max_model_len: int = 8, **fields: Any) -> KVCacheConfig:
    return LayerOutermostLayout().plan(KVPlanRequest(specs, budget, max_model_len, max_num_batched_tokens=16, **fields))


def test_page_bytes_of_the_worked_example() -> None:
    """R1.22."""
    example = spec(16, num_kv_heads=32, head_size=128, dtype="float16")
    assert example.page_size_bytes == 262144


def test_one_tensor_holds_the_layers_of_a_group_one_after_another() -> None:
    """R1.40, R1.41."""
    config = plan({f"l{i}": spec(head_size=4) for i in range(3)}, budget=3 * 32 * 10 + 95)
    page = spec(head_size=4).page_size_bytes
    assert page == 32
    assert config.num_blocks == 10
    (tensor,) = config.tensors
    assert (tensor.size, tensor.layer_stride, tensor.block_stride, tensor.offset) == (3 * 320, 320, page, 0)
    assert tensor.layer_names == ("l0", "l1", "l2") == config.groups[0].layer_names


def test_layers_of_different_shape_form_their_own_groups_and_tensors() -> None:
    config = plan({"a": spec(), "b": spec(num_kv_heads=2), "c": spec()}, budget=8 * (8 + 16 + 8))
    assert [group.layer_names for group in config.groups] == [("a", "c"), ("b",)]
    assert config.num_blocks == 8
    assert sum(tensor.size for tensor in config.tensors) == 8 * (8 + 16 + 8)


def test_the_block_count_can_be_given() -> None:
    assert plan({"a": spec()}, budget=0, num_blocks=5).num_blocks == 5


def test_a_model_without_kv_needs_no_memory() -> None:
    assert plan({}) == KVCacheConfig(num_blocks=1, groups=(), tensors=())


def test_the_refusal_says_which_numbers_to_set() -> None:
    """One full-length sequence must fit, the null block included; every number named works."""
    specs: dict[str, KVCacheSpec] = {"a": spec(), "b": spec()}
    with pytest.raises(ConfigError) as caught:
        plan(specs, budget=16 * 4, max_model_len=100)
    text = str(caught.value)
    length = int(re.findall(r"set --max-model-len (\d+) or less", text)[0])
    memory = int(re.findall(r"--kv-cache-memory (\d+)", text)[0])
    assert (length, memory) == (12, 26 * 16)
    assert "needs 26 KV cache blocks" in text
    assert plan(specs, budget=64, max_model_len=length).num_blocks == 4
    assert plan(specs, budget=memory, max_model_len=100).num_blocks == 26
    with pytest.raises(ConfigError):
        plan(specs, budget=64, max_model_len=length + 1)
    with pytest.raises(ConfigError):
        plan(specs, budget=memory - 1, max_model_len=100)


def test_the_refusal_of_a_given_block_count_names_that_setting() -> None:
    with pytest.raises(ConfigError, match="--num-kv-blocks allows 2; set --max-model-len 4 or less, or set"):
        plan({"a": spec()}, num_blocks=2, max_model_len=9)


def test_a_budget_without_room_for_one_token_offers_no_shorter_length() -> None:
    with pytest.raises(ConfigError, match="holds 1; set --kv-cache-memory 24 or more") as caught:
        plan({"a": spec()}, budget=8, max_model_len=8)
    assert "--max-model-len 0" not in str(caught.value)


def test_the_plugin_factory_makes_the_layout() -> None:
    context = PluginContext(name="layer_outermost", api_version=1, roles=frozenset({ProcessRole.ENGINE}))
    assert isinstance(create_layer_outermost(context, NoOptions()), LayerOutermostLayout)


def test_windowed_and_plain_layers_merge_into_one_group() -> None:
    """R1.28, R1.29: all blocks are held for both."""
    specs: dict[str, KVCacheSpec] = {"a": spec(sliding_window=8), "b": spec(), "c": spec(sliding_window=8)}
    ((names, merged),) = group_layers(specs)
    assert names == ("a", "b", "c")
    assert isinstance(merged, FullAttentionSpec)
    assert (merged.sliding_window, merged.chunk_size) == (8, None)
    config = plan(specs, num_blocks=9)
    assert spec_from_wire(config.groups[0].spec, {"full_attention": FullAttentionSpec}) == merged
    plain = plan({"a": spec(), "b": spec(), "c": spec()}, num_blocks=9)
    assert (config.tensors, config.num_blocks) == (plain.tensors, plain.num_blocks)


@pytest.mark.parametrize(
    "specs",
    [
        [spec(sliding_window=8), spec(sliding_window=16)],
        [spec(chunk_size=8), spec(chunk_size=16)],
        [spec(sliding_window=8), spec(chunk_size=8)],
        [spec(), spec(dtype="float16")],
    ],
)
def test_what_cannot_be_merged_is_refused_or_grouped_apart(specs: list[KVCacheSpec]) -> None:
    """R1.29, R1.36."""
    with pytest.raises(ConfigError):
        merge_specs(specs)
    assert len(group_layers({f"l{i}": s for i, s in enumerate(specs)})) == 2


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 8), st.sampled_from(["int8", "float16"])), min_size=1, max_size=5
    ),
    st.integers(2, 6),
)
def test_cells_of_distinct_layers_and_blocks_never_overlap(shapes: list[tuple[int, int, str]], blocks: int) -> None:
    """I1.4: every page stays inside its tensor and all pages of a tensor are disjoint."""
    specs: dict[str, KVCacheSpec] = {
        f"l{i}": spec(num_kv_heads=heads, head_size=size, dtype=dtype) for i, (heads, size, dtype) in enumerate(shapes)
    }
    config = plan(specs, num_blocks=blocks + len(specs) * 2)
    for tensor in config.tensors:
        owner = np.full(tensor.size, -1)
        page = specs[tensor.layer_names[0]].page_size_bytes
        for layer in range(len(tensor.layer_names)):
            for block in range(config.num_blocks):
                start = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
                cells = owner[start : start + page]
                assert len(cells) == page
                assert (cells == -1).all()
                cells[:] = layer * config.num_blocks + block
        assert (owner >= 0).all()
    assert sorted(name for tensor in config.tensors for name in tensor.layer_names) == sorted(specs)
