"""The Triton backend, through Triton's interpreter, passes the conformance suite of its kind.

Once as it is installed, where every row is added up in one order, and once as steps of decodes are made fast: small
blocks of queries, and keys in parts wherever there are enough of them for two.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.triton import TritonBackend
from hardpoint_attention.triton.configs import TileConfig
from hardpoint_attention.triton.planning import LaunchPlan, LaunchQuestion
from hardpoint_testing_torch import AttentionBackendSuite

pytest.importorskip("triton")


@pytest.mark.slow
class TestTriton(AttentionBackendSuite):
    plugin: ClassVar[str | None] = "triton"


def many_parts(question: LaunchQuestion) -> LaunchPlan:
    """More parts than some rows have tiles, so that a few of these are empty."""
    return LaunchPlan(TileConfig(16, 16), 4)


@pytest.mark.slow
class TestTritonInParts(AttentionBackendSuite):
    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        del ctx
        return TritonBackend(plan=many_parts)
