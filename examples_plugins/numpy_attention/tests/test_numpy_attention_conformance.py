"""The backend keeps the rules of its kind: what it accepts it computes, what it refuses it explains."""

from __future__ import annotations

from hardpoint_testing_torch import AttentionBackendSuite


class TestNumpyAttention(AttentionBackendSuite):
    plugin = "numpy"
