"""Every kind of KV cache spec keeps the contract of its plugin kind, with managers that keep all, some or no blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from hardpoint.interfaces import FullAttentionSpec, KVCacheSpec, MambaCacheMode, MLASpec
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite
from hardpoint_scheduling.conformance import TestChunkedLocal as TestChunkedLocal
from hardpoint_scheduling.conformance import TestCrossAttention as TestCrossAttention
from hardpoint_scheduling.conformance import TestMamba as TestMamba
from hardpoint_scheduling.conformance import TestSlidingWindow as TestSlidingWindow

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


class TestShortWindow(TestSlidingWindow):
    """Each token reads itself and two others: windows begin in the middle of a block."""

    window: ClassVar[int] = 3


class TestLongWindow(TestSlidingWindow):
    window: ClassVar[int] = 21


class TestEncoderOnly(KVCacheSpecSuite):
    plugin: ClassVar[str | None] = "encoder_only"


class TestRunningState(TestMamba):
    """R1.33: mode none."""

    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.NONE}


class TestRunningStateWithDrafts(TestMamba):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.NONE, "num_speculative_blocks": 3}


class TestStatePerBlock(TestMamba):
    """R1.33: mode all."""

    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALL}


class TestStatePerBlockWithDrafts(TestMamba):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALL, "num_speculative_blocks": 2}


class TestAlignedStateWithDrafts(TestMamba):
    """R1.33: mode align; without drafts it is the class of the plugin."""

    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALIGN, "num_speculative_blocks": 2}


class TestAlignedStateWithCheckpoints(TestMamba):
    state: ClassVar[dict[str, Any]] = {"mode": MambaCacheMode.ALIGN, "num_checkpoint_blocks": 1}
