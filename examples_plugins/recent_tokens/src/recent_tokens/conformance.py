"""What the rules need to know of this spec: that blocks are given up before a request ends."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite


class TestRecentTokens(KVCacheSpecSuite):
    plugin = "recent_tokens"
    keeps_all: ClassVar[bool] = False
