"""From specs and a budget to a memory plan (spec 01 sections 1.2 and 1.3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    BlockSizeRule,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVPlanRequest,
    MambaCacheMode,
    MambaSpec,
    MixedSizeSpec,
    MLASpec,
    NoOptions,
    PluginContext,
    SlidingWindowSpec,
    spec_from_wire,
)
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.testing.kv_layout_suite import check_memory
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.grouping import merge_specs
from hardpoint_scheduling.kv_cache.layouts import (
    BlockOutermostLayout,
    LayerOutermostLayout,
    PagedLayout,
    create_block_outermost,
    create_layer_outermost,
)
from hardpoint_scheduling.kv_cache.registry import SpecRegistry
from sched_support import spec

LAYOUTS = (LayerOutermostLayout, BlockOutermostLayout)
USUAL: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 1, "dtype": "int8"}
LATENT = MLASpec(**USUAL)
CLASSES: dict[str, type[KVCacheSpec]] = {
    made.kind: made for made in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec, MLASpec)
}


def windowed(window: int, block_size: int = 4, **fields: Any) -> SlidingWindowSpec:
    return SlidingWindowSpec(**{**USUAL, "block_size": block_size, "sliding_window": window, **fields})


def plan(
    specs: Mapping[str, KVCacheSpec],
    budget: int = 0,
    max_model_len: int = 8,
    layout: type[PagedLayout] = LayerOutermostLayout,
    **fields: Any,
) -> KVCacheConfig:
    return layout().plan(KVPlanRequest(specs, budget, max_model_len, max_num_batched_tokens=16, **fields))


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


def test_layers_of_different_shape_share_a_table_when_they_need_the_same_slots() -> None:
    """R1.36: one group, described by the wrapper; each size has a tensor of its own, and no byte waits."""
    specs: dict[str, KVCacheSpec] = {"a": spec(), "b": spec(num_kv_heads=2), "c": spec()}
    config = plan(specs, budget=8 * (8 + 16 + 8))
    (group,) = config.groups
    assert group.layer_names == ("a", "b", "c")
    whole = spec_from_wire(group.spec, CLASSES)
    assert whole == MixedSizeSpec.of([specs[name] for name in "abc"])
    assert whole.page_size_bytes == 8 + 16 + 8
    assert config.num_blocks == 8
    assert [(t.layer_names, t.size, t.block_stride, t.buffer) for t in config.tensors] == [
        (("a", "c"), 8 * 16, 8, None),
        (("b",), 8 * 16, 16, None),
    ]


def test_the_block_count_can_be_given() -> None:
    assert plan({"a": spec()}, budget=0, num_blocks=5).num_blocks == 5


def test_a_model_without_kv_needs_no_memory() -> None:
    assert plan({}) == KVCacheConfig(num_blocks=1, groups=(), tensors=(), layout="layer_outermost")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [(), (("a",), ("b",))])
def test_encoders_need_no_memory(layout: type[PagedLayout], ranks: tuple[tuple[str, ...], ...]) -> None:
    """R1.34: they keep nothing, so neither a budget nor a longest sequence matters; their tables are empty."""
    encoder = EncoderOnlyAttentionSpec(**USUAL)
    config = plan({"a": encoder, "b": encoder}, budget=0, max_model_len=512, layout=layout, layers_by_rank=ranks)
    assert (config.num_blocks, config.tensors, config.tensors_of(0)) == (1, (), ())
    assert [group.layer_names for group in config.groups] == [("a", "b")]
    kv = KVCoordinator(config, SpecRegistry(), max_model_len=512, max_in_flight_tokens=512)
    assert kv.largest_sequence == 512


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


def test_the_plugin_factories_make_the_layouts() -> None:
    context = PluginContext(name="layer_outermost", api_version=1, roles=frozenset({ProcessRole.ENGINE}))
    assert isinstance(create_layer_outermost(context, NoOptions()), LayerOutermostLayout)
    assert isinstance(create_block_outermost(context, NoOptions()), BlockOutermostLayout)


def test_windowed_and_plain_layers_merge_into_one_group() -> None:
    """R1.28, R1.29: full specs with a window hold all blocks, so both need the same slots."""
    specs: dict[str, KVCacheSpec] = {"a": spec(sliding_window=8), "b": spec(), "c": spec(sliding_window=8)}
    config = plan(specs, num_blocks=9)
    assert [group.layer_names for group in config.groups] == [("a", "b", "c")]
    assert spec_from_wire(config.groups[0].spec, CLASSES) == spec(sliding_window=8)
    plain = plan({"a": spec(), "b": spec(), "c": spec()}, num_blocks=9)
    assert (config.tensors, config.num_blocks) == (plain.tensors, plain.num_blocks)


@pytest.mark.parametrize(
    ("specs", "what"),
    [
        ([spec(sliding_window=8), spec(sliding_window=16)], r"these have windows \[8, 16\]"),
        ([spec(chunk_size=8), spec(chunk_size=16)], r"chunk sizes \[8, 16\]"),
        ([spec(sliding_window=8), spec(chunk_size=8)], "one sliding window or one chunk size"),
        ([spec(), spec(dtype="float16")], "different KV cache specs cannot share a group"),
        ([spec(), LATENT], "latents .MLA. and keys with values"),
        ([spec(), windowed(8)], "different KV cache specs"),
    ],
)
def test_what_cannot_be_merged_is_refused(specs: list[KVCacheSpec], what: str) -> None:
    """R1.29: an explicit error; full attention does not merge with latents."""
    with pytest.raises(ConfigError, match=what):
        merge_specs(specs)
    assert merge_specs([LATENT, LATENT]) == LATENT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_windows_to_one_full_layer(layout: type[PagedLayout]) -> None:
    """R1.36, R1.48: groups of equal size that share memory, so that no block of one kind waits for another."""
    specs = {f"l{i}": spec() if i % 6 == 5 else windowed(8) for i in range(24)}
    config = plan(specs, num_blocks=64, layout=layout)
    assert [len(group.layer_names) for group in config.groups] == [4] * 6
    kinds = [group.spec.kind for group in config.groups]
    assert sorted(kinds) == ["full_attention", *["sliding_window"] * 5]
    full = config.groups[kinds.index("full_attention")]
    assert full.layer_names == ("l5", "l11", "l17", "l23")
    assert {record.buffer for record in config.tensors} == {0}
    assert {record.size for record in config.tensors} == {64 * 4 * spec().page_size_bytes}
    assert plan(specs, budget=64 * 4 * 8, layout=layout).num_blocks == 64


def test_few_layers_of_another_kind_do_not_split_all_others() -> None:
    """R1.36: 31 tables for one windowed layer would cost more than they save."""
    specs = {f"l{i}": windowed(4) if i == 7 else spec() for i in range(32)}
    config = plan(specs, num_blocks=1000, max_model_len=400)
    assert sorted(len(group.layer_names) for group in config.groups) == [1, 31]


def test_latents_share_a_table_with_keys_and_values() -> None:
    """R1.36, R1.63: both keep every token, and the grouping base says that one manager serves both."""
    wider = msgspec.structs.replace(LATENT, head_size=3)
    (group,) = plan({"a": spec(), "b": wider}, num_blocks=9).groups
    assert spec_from_wire(group.spec, CLASSES) == MixedSizeSpec.of([spec(), wider])


def test_different_windows_are_different_groups() -> None:
    """R1.36."""
    config = plan({"a": windowed(8), "b": windowed(16), "c": windowed(8)}, num_blocks=64)
    assert sorted(group.layer_names for group in config.groups) == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_the_hybrid_allocator_windows_hold_all_tokens(layout: type[PagedLayout]) -> None:
    """R1.28: one table with as many blocks as full attention needs; the window stays known to the layers."""
    full: dict[str, KVCacheSpec] = {f"l{i}": spec() for i in range(6)}
    mixed: dict[str, KVCacheSpec] = {name: windowed(8) if i < 5 else s for i, (name, s) in enumerate(full.items())}
    config = plan(mixed, num_blocks=9, max_model_len=32, hybrid=False, layout=layout)
    (group,) = config.groups
    merged = spec_from_wire(group.spec, CLASSES)
    assert merged == spec(sliding_window=8)
    assert merged.max_blocks(32, 16) == spec().max_blocks(32, 16) == 8
    assert config.tensors == plan(full, num_blocks=9, max_model_len=32, layout=layout).tensors
    assert config.layer_specs(mixed) == mixed
    two_windows = plan({"a": windowed(4), "b": windowed(8), "c": spec()}, num_blocks=9, hybrid=False, layout=layout)
    assert [group.layer_names for group in two_windows.groups] == [("a", "b", "c")]
    with pytest.raises(ConfigError, match="--num-kv-blocks allows 8"):
        plan(mixed, num_blocks=8, max_model_len=32, hybrid=False, layout=layout)


def test_chunked_layers_hold_all_tokens_too() -> None:
    """R1.28."""
    chunked = ChunkedLocalAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="int8", chunk_size=8)
    (group,) = plan({"a": chunked, "b": spec()}, num_blocks=9, hybrid=False).groups
    assert spec_from_wire(group.spec, CLASSES) == spec(chunk_size=8)


def test_layers_that_cannot_share_one_table_say_which_setting_to_leave() -> None:
    state = MambaSpec(block_size=4, shapes=((2,),), dtypes=("float32",))
    with pytest.raises(ConfigError, match=r"'b' \(MambaSpec\); do not turn off --hybrid-kv-cache"):
        plan({"a": spec(), "b": state}, num_blocks=9, hybrid=False)


def test_layers_of_a_role_form_groups_of_their_own() -> None:
    """R1.62: their manager may be another."""
    config = plan({"a": spec(), "d": spec(), "b": spec()}, num_blocks=9, roles={"d": "draft"})
    assert [(group.layer_names, group.role) for group in config.groups] == [
        (("a",), ""),
        (("b",), ""),
        (("d",), "draft"),
    ]


def test_a_recurrent_state_enlarges_the_attention_block() -> None:
    """R12.40 in a plan: the main block grows until its page covers the state, whose page is padded; R1.48."""
    state = MambaSpec(block_size=64, shapes=((250,),), dtypes=("float32",))
    specs: dict[str, KVCacheSpec] = {"a": spec(16, head_size=8), "s": state}
    rules = {"some_backend": BlockSizeRule(multiple_of=16)}
    config = plan(specs, num_blocks=64, block_size_rules=rules)
    granted = config.layer_specs(specs)
    assert granted["a"] == spec(64, head_size=8)
    assert granted["s"] == msgspec.structs.replace(state, padded_page_size=1024)
    assert {(t.buffer, t.block_stride, t.offset) for t in config.tensors} == {(0, 1024, 0)}
    exact = plan(specs, num_blocks=64, block_size_rules={"exact": BlockSizeRule(exact=(16,))}).layer_specs(specs)
    assert exact["a"] == spec(16, head_size=8, padded_page_size=1000)
    assert exact["s"] == state


def test_other_dtypes_enlarge_the_main_block() -> None:
    """R12.41 in a plan: quantized windows beside unquantized full layers, in one pool."""
    specs: dict[str, KVCacheSpec] = {f"w{i}": windowed(8, 16) for i in range(3)}
    specs["full"] = spec(16, dtype="float16")
    granted = plan(specs, num_blocks=64, block_size_rules={"any": BlockSizeRule(multiple_of=16)}).layer_specs(specs)
    assert {granted[f"w{i}"].block_size for i in range(3)} == {32}
    assert granted["full"] == specs["full"]
    assert {one.page_size_bytes for one in granted.values()} == {64}
    with pytest.raises(ConfigError, match=r"only: 16.*--block-size; or give all layers .* with --no-hybrid-kv-cache"):
        plan(specs, num_blocks=64, block_size_rules={"only": BlockSizeRule(exact=(16,))})


def test_alignment_of_one_kind_is_kept_by_all() -> None:
    """R1.31, P1.6: padding reaches a size that every spec accepts as a page."""
    latent = msgspec.structs.replace(LATENT, alignment=96)
    specs: dict[str, KVCacheSpec] = {"a": latent, "w": windowed(8), "w2": windowed(8)}
    granted = plan(specs, num_blocks=64).layer_specs(specs)
    assert len({one.page_size_bytes for one in granted.values()}) == 1
    assert granted["a"].page_size_bytes % 96 == 0


def test_ranks_of_a_pipeline_allocate_their_layers_only() -> None:
    """R1.40: one plan, so that block ids mean the same everywhere; the fullest rank bounds the number of blocks."""
    specs: dict[str, KVCacheSpec] = {f"l{i}": spec() for i in range(5)}
    config = plan(specs, budget=8 * 3 * 10, layers_by_rank=(("l0", "l1", "l2"), ("l3", "l4")))
    assert (config.num_blocks, config.tensors) == (10, ())
    assert [[t.layer_names for t in config.tensors_of(rank)] for rank in range(2)] == [
        [("l0", "l1", "l2")],
        [("l3", "l4")],
    ]
    assert [t.size for rank in range(2) for t in config.tensors_of(rank)] == [240, 160]
    with pytest.raises(ConfigError, match="keeps no KV; use fewer pipeline stages"):
        plan(specs, budget=1 << 20, layers_by_rank=(tuple(specs), ("norm",)))


def test_blocks_outermost_strides() -> None:
    """R1.41: a page from layer to layer, the pages of all layers from block to block."""
    config = plan({f"l{i}": spec(head_size=4) for i in range(3)}, num_blocks=10, layout=BlockOutermostLayout)
    (tensor,) = config.tensors
    assert (tensor.size, tensor.layer_stride, tensor.block_stride, tensor.offset) == (960, 32, 96, 0)
    assert tensor.order[0] == "block"
    mixed = plan({"a": spec(), "b": spec(num_kv_heads=2), "c": spec()}, num_blocks=10, layout=BlockOutermostLayout)
    assert [(t.layer_names, t.offset, t.layer_stride, t.block_stride, t.buffer) for t in mixed.tensors] == [
        (("a", "c"), 0, 8, 32, 0),
        (("b",), 16, 16, 32, 0),
    ]


SHAPES = st.tuples(
    st.integers(1, 4), st.integers(1, 8), st.sampled_from(["int8", "float16"]), st.sampled_from([0, 8, 9])
)


def random_plan(
    layout: type[PagedLayout], shapes: list[tuple[int, int, str, int]], hybrid: bool
) -> tuple[dict[str, KVCacheSpec], KVCacheConfig]:
    """Layers of these heads, head sizes, dtypes and windows (0: none), and a plan for them."""
    specs: dict[str, KVCacheSpec] = {}
    for i, (heads, size, dtype, window) in enumerate(shapes):
        fields: dict[str, Any] = {"num_kv_heads": heads, "head_size": size, "dtype": dtype}
        specs[f"l{i}"] = windowed(window, **fields) if window else spec(**fields)
    config = plan(specs, num_blocks=64, hybrid=hybrid, layout=layout)
    assert hybrid or len(config.groups) == 1
    return specs, config


def check_disjoint(layout: type[PagedLayout], shapes: list[tuple[int, int, str, int]], hybrid: bool) -> None:
    """Inside their buffer, and disjoint within a group; every page of every layer, byte by byte."""
    specs, config = random_plan(layout, shapes, hybrid)
    granted = config.layer_specs(specs)
    assert list(granted) == [name for group in config.groups for name in group.layer_names]
    place = {
        name: (t, t.layer_names.index(name), number)
        for number, t in enumerate(config.tensors)
        for name in t.layer_names
    }
    largest = max(t.size for t in config.tensors)
    for group in config.groups:
        owner = np.zeros((len(config.tensors), largest), dtype=bool)
        for name in group.layer_names:
            tensor, index, number = place[name]
            row = owner[number if tensor.buffer is None else 0]
            for block in range(config.num_blocks):
                start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                cells = row[start : start + granted[name].page_size_bytes]
                assert start + granted[name].page_size_bytes <= tensor.size
                assert not cells.any()
                cells[:] = True


RANDOM = given(layout=st.sampled_from(LAYOUTS), shapes=st.lists(SHAPES, min_size=1, max_size=7), hybrid=st.booleans())


@settings(max_examples=100, deadline=None)
@RANDOM
def test_pages_of_one_group_never_overlap(
    layout: type[PagedLayout], shapes: list[tuple[int, int, str, int]], hybrid: bool
) -> None:
    """I1.4."""
    check_disjoint(layout, shapes, hybrid)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None)
@RANDOM
def test_pages_of_one_group_never_overlap_in_many_models(
    layout: type[PagedLayout], shapes: list[tuple[int, int, str, int]], hybrid: bool
) -> None:
    """I1.4."""
    specs, config = random_plan(layout, shapes, hybrid)
    check_memory(config, specs)


KINDS: tuple[KVCacheSpec, ...] = (
    spec(),
    spec(8),
    windowed(5),
    windowed(9, 8),
    ChunkedLocalAttentionSpec(**USUAL, chunk_size=8),
    MambaSpec(block_size=4, shapes=((1,),), dtypes=("float32",)),
    MambaSpec(block_size=8, shapes=((2,),), dtypes=("int8",), mode=MambaCacheMode.ALL, num_speculative_blocks=1),
    CrossAttentionSpec(**USUAL, max_encoder_tokens=9),
)


@settings(max_examples=40, deadline=None)
@given(
    layers=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    longest=st.integers(1, 60),
    batch=st.integers(1, 20),
    layout=st.sampled_from(LAYOUTS),
)
def test_what_start_up_sizing_accepts_is_admitted_at_run_time(
    layers: list[KVCacheSpec], longest: int, batch: int, layout: type[PagedLayout]
) -> None:
    """R1.35: with exactly as many blocks as the refusal of a smaller pool names, the longest sequence fits."""
    wish = KVPlanRequest({f"l{i}": one for i, one in enumerate(layers)}, 0, longest, batch, num_blocks=1)
    with pytest.raises(ConfigError) as caught:
        layout().plan(wish)
    needed = int(re.findall(r"--num-kv-blocks (\d+) or more", str(caught.value))[0])
    config = layout().plan(replace(wish, num_blocks=needed))
    kv = KVCoordinator(config, SpecRegistry(), max_model_len=longest, max_in_flight_tokens=batch)
    assert kv.largest_sequence == longest
    with pytest.raises(ConfigError):
        layout().plan(replace(wish, num_blocks=needed - 1))
