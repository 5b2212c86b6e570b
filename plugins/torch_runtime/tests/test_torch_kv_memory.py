"""Views over cache memory: every element sits at the address the plan prescribes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import MambaSpec, MLASpec
from hardpoint.interfaces.attention import BlockSizeRule
from hardpoint.interfaces.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheTensor
from hardpoint_torch_runtime.runner.attention_groups import choose_kernel_block_size
from hardpoint_torch_runtime.runner.kv_memory import DIMENSIONS, KVMemory, byte_strides, state_tensors

CPU = torch.device("cpu")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def spec(block_size: int = 4, heads: int = 2, head_size: int = 3, dtype: str = "float32") -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=dtype)


def plan(one: FullAttentionSpec, layers: int, blocks: int, *, outermost: str, padding: int = 0) -> KVCacheConfig:
    page = one.page_size_bytes + padding
    tensor = KVCacheTensor(
        size=page * layers * blocks,
        layer_names=tuple(f"l{i}" for i in range(layers)),
        layer_stride=page if outermost == "block" else page * blocks,
        block_stride=page * layers if outermost == "block" else page,
    )
    return KVCacheConfig(num_blocks=blocks, groups=(), tensors=(tensor,), layout=f"{outermost}_outermost")


@settings(max_examples=40, deadline=None)
@given(
    outermost=st.sampled_from(["layer", "block"]),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    heads=st.integers(1, 3),
    head_size=st.integers(1, 4),
    layers=st.integers(1, 3),
    padding=st.sampled_from([0, 8]),
)
def test_every_element_is_at_its_address(
    outermost: str, dtype: str, heads: int, head_size: int, layers: int, padding: int
) -> None:
    """R1.40-R1.44, R1.49, I1.4: against a brute-force address oracle; no two cells share a byte."""
    one = spec(heads=heads, head_size=head_size, dtype=dtype)
    config = plan(one, layers, 3, outermost=outermost, padding=padding)
    record = config.tensors[0]
    memory = KVMemory(config, dict.fromkeys(record.layer_names, one), CPU)
    base, item = memory.buffers[0].data_ptr(), ITEM_BYTES[dtype]
    seen: set[int] = set()
    for index, name in enumerate(record.layer_names):
        view = memory.views[name]
        assert view.shape == (3, heads, 4, 2 * head_size)
        assert view.dtype == getattr(torch, dtype)
        for block, head, state, cell in itertools.product(*(range(n) for n in view.shape)):
            address = (
                index * record.layer_stride
                + block * record.block_stride
                + ((head * 4 + state) * 2 * head_size + cell) * item
            )
            assert view[block, head, state, cell].data_ptr() - base == address
            assert address not in seen
            assert address + item <= record.size
            seen.add(address)


@pytest.mark.parametrize("outermost", ["layer", "block"])
def test_writing_through_a_view_changes_nothing_else(outermost: str) -> None:
    """R1.42."""
    one = spec()
    config = plan(one, 2, 3, outermost=outermost)
    memory = KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU)
    memory.views["l1"][2, 1, 3] = 1.5
    assert int((memory.buffers[0] != 0).sum()) == 2 * 3 * int((torch.tensor([1.5]).view(torch.int8) != 0).sum())
    assert not memory.views["l0"].any()
    assert int((memory.views["l1"] != 0).sum()) == 6


@pytest.mark.parametrize("kernel_block", [1, 2])
def test_split_blocks_are_consecutive_kernel_blocks(kernel_block: int) -> None:
    """R1.45: slot b * block size + i is kernel block slot // k, state slot % k, whatever the split."""
    one = spec()
    config = plan(one, 2, 3, outermost="layer")
    memory = KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU, dict.fromkeys(("l0", "l1"), kernel_block))
    view = memory.views["l1"]
    assert view.shape == (3 * 4 // kernel_block, 2, kernel_block, 6)
    view.view(3, -1)[1] = 7.0
    assert int((view != 0).sum()) == one.page_size_bytes // 4
    assert bool((view[4 // kernel_block : 8 // kernel_block] == 7).all())


@pytest.mark.parametrize(("outermost", "padding", "stride"), [("block", 0, 384), ("layer", 8, 200), ("block", 8, 400)])
def test_splitting_blocks_that_do_not_lie_back_to_back_is_refused(outermost: str, padding: int, stride: int) -> None:
    """R1.46, R1.47, P1.4: the message names layout, layer, both sizes and the ratio, and both ways out."""
    one = spec()
    config = plan(one, 2, 3, outermost=outermost, padding=padding)
    expected = (
        f"layer 'l0': KV layout '{outermost}_outermost' puts {stride} bytes from one block to the next, but a block "
        "holds 192, so blocks of 4 tokens cannot be split into 2 kernel blocks of 2 tokens (ratio 2); set "
        "--block-size 2, or choose a --kv-layout with contiguous layers such as layer_outermost"
    )
    with pytest.raises(ConfigError) as caught:
        KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU, {"l0": 2})
    assert str(caught.value) == expected
    assert KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU, {"l0": 4}).views["l0"].shape == (3, 2, 4, 6)


def test_a_padded_spec_cannot_be_split_either() -> None:
    """R1.47: its blocks lie a page apart, but the page is not dense."""
    one = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=3, dtype="float32", padded_page_size=256)
    config = plan(one, 2, 3, outermost="layer")
    with pytest.raises(ConfigError, match="puts 256 bytes .* a block holds 192"):
        KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU, {"l0": 2})
    assert KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU).views["l1"].stride(0) == 64


def test_one_layer_in_a_block_is_dense_in_every_layout() -> None:
    """R1.46: what counts is the stride, not the layout's name."""
    one = spec()
    memory = KVMemory(plan(one, 1, 3, outermost="block"), {"l0": one}, CPU, {"l0": 1})
    assert memory.views["l0"].shape == (12, 2, 1, 6)


@given(st.permutations(DIMENSIONS[:4]), st.lists(st.integers(1, 6), min_size=5, max_size=5), st.data())
def test_strides_are_walked_from_the_innermost_dimension(
    order: list[str], sizes: list[int], data: st.DataObject
) -> None:
    """R1.43: extents multiply outwards; a supplied stride replaces the computed one, and outer ones build on it."""
    extents = dict(zip(DIMENSIONS, sizes, strict=True))
    given_strides = data.draw(st.dictionaries(st.sampled_from(["layer", "block"]), st.none() | st.integers(1, 10_000)))
    strides = byte_strides((*order, "content"), extents, given_strides)
    assert strides["content"] == 1
    for inner, outer in itertools.pairwise(("content", *reversed(order))):
        wanted = given_strides.get(outer)
        assert strides[outer] == (strides[inner] * extents[inner] if wanted is None else wanted)


@pytest.mark.parametrize(
    "order", [("block", "head", "state", "content"), (*DIMENSIONS, "block"), ("content", *DIMENSIONS[:4])]
)
def test_an_order_names_every_dimension_once(order: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="must name each of layer, block, head, state, content once"):
        byte_strides(order, dict.fromkeys(DIMENSIONS, 1))


def test_all_orders_hold_the_same_content() -> None:
    """I1.5, R1.43: equal logical shapes; what is written through one view reads equal through that of another."""
    one = spec(heads=3)
    base = plan(one, 2, 3, outermost="layer").tensors[0]
    views = []
    for order in (
        base.order,
        ("layer", "block", "state", "head", "content"),
        ("block", "layer", "state", "head", "content"),
    ):
        by_block = order[0] == "block"
        page = one.page_size_bytes
        record = KVCacheTensor(
            size=base.size,
            layer_names=base.layer_names,
            layer_stride=page if by_block else 3 * page,
            block_stride=2 * page if by_block else page,
            order=order,
        )
        memory = KVMemory(KVCacheConfig(num_blocks=3, groups=(), tensors=(record,)), {"l0": one, "l1": one}, CPU)
        for number, view in enumerate(memory.views.values()):
            assert view.shape == (3, 3, 4, 6)
            view.copy_(torch.arange(view.numel(), dtype=torch.float32).view(view.shape) + 1000 * number)
        assert len(memory.buffers[0].view(torch.float32).unique()) == 2 * 3 * 3 * 4 * 6
        views.append(memory.views)
    for other in views[1:]:
        assert all(torch.equal(other[name], views[0][name]) for name in ("l0", "l1"))


def test_latents_have_no_values() -> None:
    """R1.30: the content is one latent; padding at the end of a page is no part of the view."""
    latent = MLASpec(block_size=4, num_kv_heads=1, head_size=6, dtype="bfloat16", alignment=64)
    config = plan(latent, 2, 3, outermost="layer")
    view = KVMemory(config, {"l0": latent, "l1": latent}, CPU).views["l1"]
    assert view.shape == (3, 1, 4, 6)
    assert view.stride(0) * 2 == latent.page_size_bytes == 64


def test_elements_must_be_aligned() -> None:
    """R1.44: content is bytes first; pages that would cut elements are refused, with what to change."""
    odd = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=2, dtype="float32", scale_bytes=1)
    with pytest.raises(ConfigError, match=r"float32 elements cannot start at every 17 bytes.*choose another"):
        KVMemory(plan(odd, 2, 3, outermost="layer"), {"l0": odd, "l1": odd}, CPU)


@pytest.mark.parametrize("outermost", ["layer", "block"])
def test_recurrent_states_are_bytes_seen_as_tensors(outermost: str) -> None:
    """R1.32, R1.44: a spec without dtype stays bytes; its tensors lie one after another, without a copy."""
    state = MambaSpec(block_size=16, shapes=((3, 4), (2, 2, 5)), dtypes=("float32", "bfloat16"), padded_page_size=96)
    config = plan(state, 2, 3, outermost=outermost)  # type: ignore[arg-type]
    memory = KVMemory(config, {"l0": state, "l1": state}, CPU)
    view = memory.views["l1"]
    assert (view.shape, view.dtype) == ((3, 1, 1, 88), torch.int8)
    conv, ssm = state_tensors(view, state)
    assert (conv.shape, conv.dtype) == ((3, 3, 4), torch.float32)
    assert (ssm.shape, ssm.dtype) == ((3, 2, 2, 5), torch.bfloat16)
    ssm[2] = 1.5
    assert int((view != 0).sum()) == int((memory.buffers[0] != 0).sum()) == 20 * 2
    assert not view[:, :, :, :48].any()
    unaligned = MambaSpec(block_size=16, shapes=((1,), (2,)), dtypes=("int8", "float32"))
    byte_view = torch.zeros((2, 1, 1, 9), dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"float32 tensor of shape \(2,\) begins at byte 1"):
        state_tensors(byte_view, unaligned)


def test_a_kernel_size_that_does_not_divide_is_refused() -> None:
    one = spec()
    with pytest.raises(ConfigError, match="block size 4 is no multiple of the attention kernel's 3"):
        KVMemory(plan(one, 1, 3, outermost="layer"), {"l0": one}, CPU, {"l0": 3})


def test_a_plan_that_is_too_small_names_the_layer() -> None:
    one = spec()
    good = plan(one, 2, 3, outermost="layer").tensors[0]
    short = KVCacheTensor(
        size=good.size - 1, layer_names=good.layer_names, layer_stride=good.layer_stride, block_stride=good.block_stride
    )
    with pytest.raises(ConfigError, match="'l1' needs"):
        KVMemory(KVCacheConfig(num_blocks=3, groups=(), tensors=(short,)), dict.fromkeys(("l0", "l1"), one), CPU)


def test_zeroing_touches_the_named_blocks_only() -> None:
    """R4.31, also where layers share a block's bytes."""
    one = spec()
    for outermost in ("layer", "block"):
        config = plan(one, 2, 4, outermost=outermost)
        memory = KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU)
        for view in memory.views.values():
            view.fill_(float("nan"))
        memory.zero_blocks(np.asarray([1, 3], dtype=np.int32))
        for view in memory.views.values():
            assert torch.isnan(view[0]).all()
            assert torch.isnan(view[2]).all()
            assert not view[1].any()
            assert not view[3].any()
        memory.zero_blocks(np.zeros(0, dtype=np.int32))


def test_copies_are_made_in_every_layer_and_in_their_order() -> None:
    """R3.64: a block that is the second of one pair can be the first of the next."""
    one = spec()
    for outermost in ("layer", "block"):
        memory = KVMemory(plan(one, 2, 5, outermost=outermost), dict.fromkeys(("l0", "l1"), one), CPU)
        for layer, view in enumerate(memory.views.values()):
            for block in range(5):
                view[block] = 10 * layer + block
        memory.copy_blocks(np.asarray([[1, 3], [3, 4]], dtype=np.int32))
        for layer, view in enumerate(memory.views.values()):
            assert [int(view[block].min()) for block in range(5)] == [10 * layer + n for n in (0, 1, 2, 1, 1)]
            assert [int(view[block].max()) for block in range(5)] == [10 * layer + n for n in (0, 1, 2, 1, 1)]


def test_records_with_one_buffer_number_share_memory() -> None:
    """R1.48: groups may alias the same bytes; a rank takes its own records."""
    one = spec()
    page = one.page_size_bytes
    records = tuple(
        KVCacheTensor(size=3 * page, layer_names=(name,), layer_stride=0, block_stride=page, buffer=number)
        for name, number in (("a", 4), ("b", 4), ("c", None))
    )
    config = KVCacheConfig(num_blocks=3, groups=(), tensors=(), tensors_by_rank=((), records))
    memory = KVMemory(config, dict.fromkeys("abc", one), CPU, rank=1)
    memory.views["a"][1] = 3.0
    assert torch.equal(memory.views["a"], memory.views["b"])
    assert not memory.views["c"].any()
    assert KVMemory(config, {}, CPU, rank=0).views == {}


def test_unused_cache_costs_no_memory() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one = spec(block_size=16, heads=8, head_size=64)
    memory = KVMemory(plan(one, 1, 4096, outermost="layer"), {"l0": one}, CPU)
    assert memory.buffers[0].numel() == 256 << 20
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 << 10


@pytest.mark.parametrize(
    ("block_size", "rule", "expected"),
    [
        (16, BlockSizeRule(16), 16),
        (32, BlockSizeRule(None, (16,)), 16),
        (64, BlockSizeRule(None, (64, 16)), 64),
        (48, BlockSizeRule(None, (16, 24)), 24),
    ],
)
def test_the_largest_accepted_divisor_is_the_kernel_block(block_size: int, rule: Any, expected: int) -> None:
    """R5.15."""
    assert choose_kernel_block_size(block_size, rule, "some") == expected


def test_no_acceptable_kernel_block_lists_what_is_accepted() -> None:
    with pytest.raises(
        ConfigError, match="'some' cannot work with blocks of 8 tokens; it accepts multiples of 16 and 64"
    ):
        choose_kernel_block_size(8, BlockSizeRule(16, (64,)), "some")
