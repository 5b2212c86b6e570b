"""Every kind of KV cache spec keeps the contract of its plugin kind, with managers that keep all, some or no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from hardpoint.interfaces import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
)
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite

# One kit for each of many variants; the managers' own tests are quick.
pytestmark = pytest.mark.slow

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": "float16"}


class TestShardedAttention(KVCacheSpecSuite):
    """R1.34: tokens of a sequence dealt out among ranks take fewer positions; here one rank keeps them all."""

    plugin: ClassVar[str | None] = "full_attention"

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [FullAttentionSpec(block_size=size, context_shards=1, **HEADS) for size in (4, 16)]


class TestMla(KVCacheSpecSuite):
    """R1.30."""

    plugin: ClassVar[str | None] = "mla"

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [MLASpec(block_size=size, num_kv_heads=1, head_size=576, dtype="bfloat16") for size in (4, 64)]


class TestSlidingWindow(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "sliding_window"
    keeps_all: ClassVar[bool] = False
    window: ClassVar[int] = 8

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [SlidingWindowSpec(block_size=size, sliding_window=self.window, **HEADS) for size in (4, 16)]


class TestShortWindow(TestSlidingWindow):
    """Each token reads itself and two others: windows begin in the middle of a block."""

    window: ClassVar[int] = 3


class TestLongWindow(TestSlidingWindow):
    window: ClassVar[int] = 21


class TestChunkedLocal(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "chunked_local"
    keeps_all: ClassVar[bool] = False

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [ChunkedLocalAttentionSpec(block_size=size, chunk_size=5 * size, **HEADS) for size in (4, 16)]


class TestCrossAttention(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "cross_attention"

    def create_specs(self) -> Sequence[KVCacheSpec]:
        return [CrossAttentionSpec(block_size=size, max_encoder_tokens=100, **HEADS) for size in (4, 16)]


class TestEncoderOnly(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "encoder_only"


class TestRunningState(KVCacheSpecSuite):
    """R1.33: mode none."""

    plugin: ClassVar[str | None] = "mamba"
    keeps_all: ClassVar[bool] = False
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.NONE}

    def create_specs(self) -> Sequence[KVCacheSpec]:
        fields = {"shapes": ((3, 5), (2, 4)), "dtypes": ("bfloat16", "float32"), **self.state}
        return [MambaSpec(block_size=size, **fields) for size in (4, 16)]


class TestRunningStateWithDrafts(TestRunningState):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.NONE, "num_speculative_blocks": 3}


class TestStatePerBlock(TestRunningState):
    """R1.33: mode all."""

    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALL}


class TestStatePerBlockWithDrafts(TestRunningState):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALL, "num_speculative_blocks": 2}


class TestAlignedState(TestRunningState):
    """R1.33: mode align."""

    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALIGN}


class TestAlignedStateWithDrafts(TestRunningState):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALIGN, "num_speculative_blocks": 2}


class TestAlignedStateWithCheckpoints(TestRunningState):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALIGN, "num_checkpoint_blocks": 1}
