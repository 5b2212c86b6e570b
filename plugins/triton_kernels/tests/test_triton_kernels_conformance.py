"""Every plugin of this distribution is held to the kit of its kind, its kernels interpreted on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

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

    def reference(self, operator: str) -> Callable[..., Any] | None:
        """Of those that are a line of torch; tests of their own hold the others to more than that."""
        return PLAIN.get(operator)


def gelu_and_mul(gate_up: torch.Tensor, exact: bool) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="none" if exact else "tanh") * up


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    named = (sources >= 0) & (targets >= 0)
    cache[targets[named]] = cache[sources[named]]


def zero_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    cache[blocks[blocks >= 0]] = 0


PLAIN: Mapping[str, Callable[..., Any]] = {
    "gelu_and_mul": gelu_and_mul,
    "copy_blocks": copy_blocks,
    "zero_blocks": zero_blocks,
}
