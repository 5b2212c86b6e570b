"""FlashAttention's layouts, strides, windows and masks by arithmetic alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_double import FlashDouble
from hardpoint.errors import ConfigError
from hardpoint_attention.flash.buffers import StagedBuffer, store_schedule
from hardpoint_attention.flash.masks import MaskShape, absolute_query, mask_for
from hardpoint_attention.flash.scheduling import plans_ahead, schedule_size, split_bound
from hardpoint_attention.flash.views import (
    FULL_WINDOW,
    cache_views,
    canonical_strides,
    canonicalized,
    symmetric_window,
    window_pair,
)


def test_views_of_the_cache_are_the_same_bytes() -> None:
    """R5.41: [N, K, B, 2 D] seen as keys and values [N, B, K, D], by strides alone."""
    cache = torch.arange(3 * 2 * 4 * 16, dtype=torch.float32).view(3, 2, 4, 16)
    keys, values = cache_views(cache, 8)
    assert keys.shape == values.shape == (3, 4, 2, 8)
    assert keys.stride() == values.stride() == (128, 16, 64, 1)
    assert (
        keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    )
    for block, head, token in ((0, 0, 0), (2, 1, 3), (1, 0, 2)):
        assert torch.equal(keys[block, token, head], cache[block, head, token, :8])
        assert torch.equal(values[block, token, head], cache[block, head, token, 8:])


@pytest.mark.parametrize(
    "cache", [torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 16, 4).transpose(2, 3), torch.zeros(3, 16)]
)
def test_another_layout_is_refused(cache: torch.Tensor) -> None:
    """P5.2: not silent garbage."""
    with pytest.raises(ValueError, match="side by side"):
        cache_views(cache, 8)


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "expected"),
    [
        ((3, 16, 1, 64), (2048, 128, 1, 1), 2, (2048, 128, 64, 1)),
        ((1, 16, 2, 64), (7, 256, 128, 1), 2, (4096, 256, 128, 1)),
        ((1, 1, 64), (3, 5, 1), 2, (64, 64, 1)),
        ((5, 1, 24), (24, 1, 1), 1, (24, 32, 1)),
        ((5, 4, 8), (32, 8, 1), 2, (32, 8, 1)),
        ((4, 1), (1, 9), 4, (1, 1)),
    ],
)
def test_canonical_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, expected: tuple[int, ...]
) -> None:
    """R5.42: only those of size-one dimensions change."""
    assert canonical_strides(shape, strides, itemsize) == expected


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    head=st.sampled_from([8, 64, 80]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    junk=st.integers(1, 7),
)
def test_canonical_tensors_hold_the_same_elements(sizes: list[int], head: int, dtype: torch.dtype, junk: int) -> None:
    """R5.42, P5.3: equal in value, and every stride but the last at a multiple of 16 bytes."""
    values = torch.randn(*sizes, head).to(dtype)
    odd = values.as_strided(
        values.shape,
        [junk if size == 1 else stride for size, stride in zip(values.shape, values.stride(), strict=True)],
    )
    result = canonicalized(odd)
    assert torch.equal(result, values)
    assert result.data_ptr() == values.data_ptr()
    assert all(stride * dtype.itemsize % 16 == 0 for stride in result.stride()[:-1])


def test_without_degenerate_dimensions_nothing_is_made() -> None:
    """P5.7: the very object comes back."""
    values = torch.zeros(2, 3, 8)
    assert canonicalized(values) is values


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        ((4, 0), False, (4, 4)),
        ((4, 0), True, (4, 0)),
        (FULL_WINDOW, False, FULL_WINDOW),
        ((4, 4), False, (4, 4)),
        ((0, 0), False, (0, 0)),
        ((4, 0), torch.tensor([True, True]), (4, 4)),
    ],
    ids=str,
)
def test_windows_become_symmetric_where_attention_is_not_causal(
    window: tuple[int, int], causal: bool | torch.Tensor, expected: tuple[int, int]
) -> None:
    """R5.44: causality that differs by row counts as not causal."""
    assert symmetric_window(window, causal) == expected


def test_a_window_counts_the_querys_own_position() -> None:
    """R5.44."""
    assert window_pair(5, True) == (4, 0)
    assert window_pair(5, False) == (4, 4)
    assert window_pair(1, True) == (0, 0)
    assert window_pair(None, True) == window_pair(None, False) == FULL_WINDOW


@pytest.mark.parametrize("generations", [{2}, {3}, {4}, {2, 3}, {3, 4}])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_when_tiles_are_laid_out_ahead(generations: set[int], fast: bool, batch_invariant: bool) -> None:
    """R5.31: exactly generation 3, not in a hurry, and free to depend on the batch."""
    expected = generations == {3} and not fast and not batch_invariant
    assert plans_ahead(frozenset(generations), fast=fast, batch_invariant=batch_invariant) is expected


@pytest.mark.parametrize(
    ("num_tokens", "for_graph", "batch_invariant", "expected"),
    [(64, True, False, 32), (65, True, False, 0), (64, False, False, 0), (1, False, True, 1), (64, True, True, 1)],
)
def test_the_bound_of_splits(num_tokens: int, for_graph: bool, batch_invariant: bool, expected: int) -> None:
    """R5.33: a bound for captured steps, 1 in batch-invariant mode, else the kernel's own choice."""
    bound = split_bound(
        configured=32, num_tokens=num_tokens, graph_tokens=64, for_graph=for_graph, batch_invariant=batch_invariant
    )
    assert bound == expected


@pytest.mark.parametrize(("rows", "size"), [(1, 17), (4, 17), (5, 33), (256, 1025)])
def test_the_size_of_the_schedule_buffer(rows: int, size: int) -> None:
    """R5.34."""
    assert schedule_size(rows) == size


def test_a_stored_schedule_leaves_nothing_behind() -> None:
    """R5.34, P5.1: the tail is zero, the address the same, the rest an error."""
    buffer = torch.zeros(9, dtype=torch.int32)
    long, short = torch.arange(1, 9, dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
    assert store_schedule(long, buffer).tolist() == long.tolist()
    used = store_schedule(short, buffer)
    assert used.tolist() == [5, 6]
    assert used.data_ptr() == buffer.data_ptr()
    assert buffer[2:].tolist() == [0] * 7
    with pytest.raises(ValueError, match="10 entries does not fit the 9"):
        store_schedule(torch.ones(10, dtype=torch.int32), buffer)


def test_staged_buffers_keep_their_address() -> None:
    """R5.38: what kernels read never moves; what an earlier upload may still read is not written to."""
    buffer = StagedBuffer((4,), torch.device("cpu"))
    first = buffer.stage()
    first[:] = (1, 2, 3, 4)
    uploaded = buffer.upload()
    second = buffer.stage()
    assert not np.shares_memory(first, second)
    second[:] = 7
    assert buffer.upload().data_ptr() == uploaded.data_ptr() == buffer.device.data_ptr()
    assert uploaded.tolist() == [7] * 4


shapes = st.builds(
    MaskShape,
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 8]),
    chunk_size=st.sampled_from([None, None, 4]),
    keeps_prompt=st.just(False),
    has_ranges=st.booleans(),
) | st.builds(MaskShape, window=st.sampled_from([1, 3, 8]), keeps_prompt=st.just(True), has_ranges=st.booleans())


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    shape=shapes,
    context=st.integers(0, 9),
    query_len=st.integers(1, 9),
    prompt_len=st.integers(0, 12),
    bounds=st.tuples(st.integers(0, 12), st.integers(1, 6)),
)
def test_masks_are_the_predicate_spelled_out(
    shape: MaskShape, context: int, query_len: int, prompt_len: int, bounds: tuple[int, int]
) -> None:
    """R5.50, R5.52, R5.55, R5.56, P5.6: over ranges, windows, chunks and later chunks of a prompt."""
    total = context + query_len
    begin, end = bounds[0], bounds[0] + bounds[1]
    for local in range(query_len):
        query = absolute_query(local, query_len, total)
        assert query == context + local
        inside = begin <= query < end
        for key in range(total):
            near = shape.window is None or (query - key if shape.causal else abs(query - key)) < shape.window
            expected = (not shape.causal or key <= query) and (near or (shape.keeps_prompt and key < prompt_len))
            if shape.chunk_size is not None:
                expected = expected and query // shape.chunk_size == key // shape.chunk_size
            expected = expected or (shape.has_ranges and inside and begin <= key < end)
            found = shape.sees(query, key, prompt_len, begin if inside else 0, end if inside else 0)
            assert bool(found) is expected, (query, key)


def test_equal_masks_are_one_object() -> None:
    """R5.53, P5.5: 100 calls, one factory run; other parameters, another mask."""
    mask_for.cache_clear()
    double = FlashDouble()
    with double.installed():
        masks = {id(mask_for(MaskShape(window=5, has_ranges=True))) for _ in range(100)}
        other = mask_for(MaskShape(window=6, has_ranges=True))
    assert len(masks) == 1
    assert id(other) not in masks
    assert double.num_mask_compilations == 2
    mask_for.cache_clear()


def test_masks_read_one_lane() -> None:
    """R5.54."""
    mask_for.cache_clear()
    with FlashDouble().installed():
        assert vars(mask_for(MaskShape(has_ranges=True)))["__vec_size__"] == 1
    mask_for.cache_clear()


def test_masks_need_the_kernels_language() -> None:
    mask_for.cache_clear()
    with pytest.raises(ConfigError, match="nvidia-cutlass-dsl"):
        mask_for(MaskShape(window=3))
