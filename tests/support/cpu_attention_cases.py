"""Attention problems run on the bindings, for the tests of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

from hardpoint_cpu.native import attention as kernels
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_testing_torch import AttentionProblem, AttentionShape

__all__ = ["LAYOUTS", "chunks", "facts", "laid_out", "rows_of", "run", "shape_of", "shapes"]

LAYOUTS = ("plain", "heads within tokens", "layers within blocks", "tokens outermost")


def facts(problem: AttentionProblem, parts: int = 0) -> kernels.LayerFacts:
    """The problem's layer."""
    shape = problem.shape
    return kernels.LayerFacts.make(
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        shape.head_size**-0.5,
        window=shape.sliding_window,
        soft_cap=shape.logits_soft_cap,
        alibi_slopes=problem.alibi_slopes,
        sinks=problem.sinks,
        parts=parts,
    )


def rows_of(problem: AttentionProblem) -> kernels.RowFacts:
    """The problem's rows over its cache."""
    common = problem.common()
    return kernels.RowFacts.make(
        common.query_start_loc, common.seq_lens, common.block_table, causal=problem.shape.causal
    )


def laid_out(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """``cache`` [B, K, S, 2 * D] with the strides of a KV layout, among NaN where other layers would lie."""
    if layout == "plain":
        return cache.clone()
    if layout == "heads within tokens":
        return cache.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "tokens outermost":
        return cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    layers = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    layers[:, 1] = cache
    return layers[:, 1]


def run(
    library: NativeLibrary,
    problem: AttentionProblem,
    *,
    layout: str = "plain",
    dtype: torch.dtype = torch.float32,
    parts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and log-sum-exp [T, H], after the step's keys and values were written."""
    layer, shape = facts(problem, parts), problem.shape
    cache = laid_out(problem.kv_cache().to(dtype), layout)
    view = kernels.cache_view(cache, shape.num_kv_heads, shape.head_size)
    kernels.write_kv(library, layer, problem.key, problem.value, problem.slot_mapping(), view)
    output = torch.full_like(problem.query, torch.nan)
    lse = torch.full(problem.query.shape[:2], torch.nan)
    kernels.attention(library, layer, rows_of(problem), view, problem.query, output, lse)
    return output[: problem.num_tokens], lse[: problem.num_tokens]


def chunks(whole: AttentionProblem, cuts: list[int]) -> list[AttentionProblem]:
    """A problem of one row without context, cut into steps."""
    length = whole.rows[0][1]
    return [
        replace(
            whole,
            rows=((begin, end - begin),),
            query=whole.query[begin:end],
            key=whole.key[begin:end],
            value=whole.value[begin:end],
            history=((whole.key[:begin], whole.value[:begin]),),
        )
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True)
    ]


def shape_of(**changes: object) -> AttentionShape:
    """Nine query heads over three, as in small decoders."""
    base = AttentionShape(num_heads=9, num_kv_heads=3, head_size=16, block_size=16)
    return replace(base, **changes)  # type: ignore[arg-type]


def shapes(groups: Sequence[int], sizes: Sequence[int], blocks: Sequence[int]) -> st.SearchStrategy[AttentionShape]:
    """Layers with one to three KV heads of so many query heads each, and every feature of the kernels."""
    return st.builds(
        lambda kv, group, size, block, window, cap, alibi, sinks, causal: AttentionShape(
            num_heads=kv * group,
            num_kv_heads=kv,
            head_size=size,
            block_size=block,
            sliding_window=window,
            logits_soft_cap=cap,
            uses_alibi=alibi and causal,
            uses_sinks=sinks,
            causal=causal,
        ),
        kv=st.integers(1, 3),
        group=st.sampled_from(groups),
        size=st.sampled_from(sizes),
        block=st.sampled_from(blocks),
        window=st.sampled_from([None, None, 1, 7, 128, 150]),
        cap=st.sampled_from([None, None, 3.0]),
        alibi=st.booleans(),
        sinks=st.booleans(),
        causal=st.sampled_from([True, True, False]),
    )
