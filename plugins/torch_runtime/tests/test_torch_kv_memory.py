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
from hardpoint.interfaces.attention import BlockSizeRule
from hardpoint.interfaces.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheTensor
from hardpoint_torch_runtime.runner.attention_groups import choose_kernel_block_size
from hardpoint_torch_runtime.runner.kv_memory import KVMemory

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
    return KVCacheConfig(num_blocks=blocks, groups=(), tensors=(tensor,))


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


def test_splitting_a_padded_or_block_outermost_layout_is_refused() -> None:
    """R1.46, P1.4: the message names layer, sizes and both ways out."""
    one = spec()
    config = plan(one, 2, 3, outermost="block")
    with pytest.raises(ConfigError, match=r"'l0'.*cannot be split into 2 kernel blocks.*--block-size 2 or choose"):
        KVMemory(config, dict.fromkeys(("l0", "l1"), one), CPU, {"l0": 2})


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
