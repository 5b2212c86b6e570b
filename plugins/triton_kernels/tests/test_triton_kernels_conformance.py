"""Every plugin of this distribution is held to the kit of its kind, its kernels interpreted on the host."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint_testing_torch import CustomOpSuite, KernelOverrideSuite

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


class TestSiluAndMul(KernelOverrideSuite):
    plugin: ClassVar[str | None] = "triton_silu_and_mul"


class TestRmsNorm(KernelOverrideSuite):
    plugin: ClassVar[str | None] = "triton_rms_norm"


class TestAddRmsNorm(KernelOverrideSuite):
    plugin: ClassVar[str | None] = "triton_add_rms_norm"


class TestRotaryEmbedding(KernelOverrideSuite):
    plugin: ClassVar[str | None] = "triton_rotary_embedding"


class TestTopKTopP(KernelOverrideSuite):
    plugin: ClassVar[str | None] = "triton_top_k_top_p"


class TestOperators(CustomOpSuite):
    plugin: ClassVar[str | None] = "triton_ops"
