"""The Triton backend, through Triton's interpreter, passes the conformance suite of its kind."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch import AttentionBackendSuite, AttentionShape

pytest.importorskip("triton")


@pytest.mark.slow
class TestTriton(AttentionBackendSuite):
    """Sizes are small, since the interpreter takes a thousand times as long as a device."""

    plugin: ClassVar[str | None] = "triton"
    head_sizes: ClassVar[tuple[int, ...]] = (64, 80)
    latent_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((24, 16),)

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        """One KV head, and so half as many programs; those rules that are about heads have their own."""
        return AttentionShape(num_heads=3, num_kv_heads=1)
