"""What the tests on a real device go through; the tests of the benchmark try the same on a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points

import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint_testing_torch.attention_problems import AttentionProblem, make_problem
from hardpoint_testing_torch.attention_shape import AttentionShape

__all__ = ["BATCHES", "SHAPES", "installed", "problems"]

_PLAIN = AttentionShape(num_heads=8, num_kv_heads=2, head_size=64, block_size=16)

SHAPES: Mapping[str, AttentionShape] = {
    "grouped": _PLAIN,
    "heads of 128": replace(_PLAIN, head_size=128),
    "heads of 256": replace(_PLAIN, head_size=256),
    "no groups": replace(_PLAIN, num_kv_heads=8),
    "one KV head": replace(_PLAIN, num_kv_heads=1),
    "blocks of 64": replace(_PLAIN, block_size=64),
    "window": replace(_PLAIN, sliding_window=19),
    "window and prompt": replace(_PLAIN, sliding_window=7, keeps_prompt=True),
    "chunks": replace(_PLAIN, chunk_size=24),
    "soft cap": replace(_PLAIN, logits_soft_cap=5.0),
    "slopes": replace(_PLAIN, uses_alibi=True),
    "sinks": replace(_PLAIN, uses_sinks=True),
    "ranges": replace(_PLAIN, uses_mm_prefix=True),
    "causality by row": replace(_PLAIN, uses_row_causality=True),
    "encoder": replace(_PLAIN, kind=AttentionKind.ENCODER_ONLY, causal=False),
    "encoder and decoder": replace(_PLAIN, kind=AttentionKind.ENCODER_DECODER),
    "fp8 cache": replace(_PLAIN, kv_cache_dtype="fp8"),
    "int8 cache": replace(_PLAIN, kv_cache_dtype="int8_per_token_head"),
    "latent": replace(_PLAIN, num_heads=16, num_kv_heads=1, head_size=576, latent_values=512),
}

BATCHES: Sequence[Sequence[tuple[int, int]]] = (
    ((17, 1), (5, 1), (0, 9), (12, 1), (3, 7), (30, 1)),
    ((0, 1),),
    ((15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (65, 1), (511, 1), (1025, 1)),
    ((0, 70), (40, 33), (64, 1), (0, 1)),
    ((0, 300), (1000, 200)),
)
"""(context, query) by row: mixed, alone, around the ends of blocks and long, chunks, and large."""


def problems(shape: AttentionShape, dtype: torch.dtype) -> list[AttentionProblem]:
    """One per batch; encoders have no context."""
    rows = BATCHES
    if shape.kind is AttentionKind.ENCODER_ONLY:
        rows = [[(0, context + query) for context, query in batch] for batch in BATCHES]
    return [make_problem(replace(shape, dtype=dtype), batch, seed) for seed, batch in enumerate(rows)]


def installed(kind: str) -> list[str]:
    """Names of plugins, without importing them."""
    return sorted(entry_points(group=f"hardpoint.{kind}.v1").names)
