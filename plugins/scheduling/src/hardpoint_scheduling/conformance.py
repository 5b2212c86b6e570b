"""What the rules of their kind need to know of our KV cache specs: samples and who keeps all. Only the kit loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hardpoint.interfaces import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
)
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite

__all__ = ["TestChunkedLocal", "TestCrossAttention", "TestMamba", "TestSlidingWindow"]

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
BLOCK_SIZES = (4, 16)


class TestSlidingWindow(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "sliding_window"
    keeps_all: ClassVar[bool] = False
    window: ClassVar[int] = 8

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [SlidingWindowSpec(block_size=size, sliding_window=self.window, **HEADS) for size in BLOCK_SIZES]


class TestChunkedLocal(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "chunked_local"
    keeps_all: ClassVar[bool] = False

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [ChunkedLocalAttentionSpec(block_size=size, chunk_size=5 * size, **HEADS) for size in BLOCK_SIZES]


class TestCrossAttention(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "cross_attention"

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [CrossAttentionSpec(block_size=size, max_encoder_tokens=100, **HEADS) for size in BLOCK_SIZES]


class TestMamba(KVCacheSpecSuite):
    """Mode ``align``, which gives states up and finds prefixes; ``state`` sets the fields of other variants."""

    plugin: ClassVar[str | None] = "mamba"
    keeps_all: ClassVar[bool] = False
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALIGN}

    def create_specs(self) -> Sequence[KVCacheSpec]:
        fields = {"shapes": ((3, 5), (2, 4)), "dtypes": ("bfloat16", "float32"), **self.state}
        return [MambaSpec(block_size=size, **fields) for size in BLOCK_SIZES]
