"""The Triton backend, through Triton's interpreter, passes the conformance suite of its kind.

As it is installed, where every row is added up in one order, and as steps of decodes are made fast, in parts.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.triton import TritonBackend
from hardpoint_attention.triton.configs import TileConfig
from hardpoint_attention.triton.planning import LaunchPlan, LaunchQuestion
from hardpoint_testing_torch import AttentionBackendSuite, AttentionShape
from hardpoint_testing_torch.attention_lse_suite import AttentionLseRules

pytest.importorskip("triton")


@pytest.mark.slow
class TestTriton(AttentionBackendSuite):
    """Sizes are small, since the interpreter takes a thousand times as long as a device."""

    plugin: ClassVar[str | None] = "triton"
    head_sizes: ClassVar[tuple[int, ...]] = (64, 80)
    latent_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((24, 16),)

    @pytest.mark.parametrize("seed", [2])
    def test_whatever_is_accepted_is_computed(self, backend: AttentionBackend, base: AttentionShape, seed: int) -> None:
        super().test_whatever_is_accepted_is_computed(backend, base, seed)


def many_parts(question: LaunchQuestion) -> LaunchPlan:
    """More parts than some rows have tiles, so that a few of these are empty."""
    return LaunchPlan(TileConfig(32, 32), 4)


@pytest.mark.slow
class TestTritonInParts(AttentionLseRules):
    """What parts have to get right: log-sum-exps, sinks, windows that leave parts empty."""

    latent_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((24, 16),)

    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        del ctx
        return TritonBackend(plan=many_parts)
