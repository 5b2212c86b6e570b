"""Every plugin of this distribution is held to the kit of its kind, its kernels interpreted on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from hardpoint_testing_torch import CustomOpSuite, KernelOverrideSuite
from hardpoint_torch_runtime.sampling.constraints import apply_penalties
from hardpoint_torch_runtime.sampling.metadata import Penalties

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
        """In plain torch; tests of their own hold operators to more than their samples."""
        return PLAIN[operator]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no graphics processor; run `make test-gpu` where there is one"
)
class TestOperatorsOnADevice(TestOperators):
    """Compiled, where the same arithmetic rounds otherwise."""

    device: ClassVar[str] = "cuda"
    tolerance: ClassVar[float] = 1e-4


def gelu_and_mul(gate_up: torch.Tensor, exact: bool) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="none" if exact else "tanh") * up


def rotate_neighbors(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
    part = heads[..., :rotary_size]
    swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    part.copy_(part * cos + swapped * sin)


def rounded(x: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.abs().amax(-1) / largest
    scaled = x / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    return (scaled.round() if dtype == torch.int8 else scaled).clamp(-largest, largest).to(dtype), scales


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    apply_penalties(logits, Penalties(rows, repetition, frequency, presence, token_ids, is_output))


def rejection_sample(
    drafts: torch.Tensor,
    starts: torch.Tensor,
    is_greedy: torch.Tensor,
    best: torch.Tensor,
    target: torch.Tensor,
    proposed: torch.Tensor | None,
    bonus: torch.Tensor,
    accept_uniforms: torch.Tensor,
    redraw_uniforms: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, counts = drafts.new_full((len(bonus), width), -1), drafts.new_zeros(len(bonus))
    for row in range(len(bonus)):
        kept: list[int] = []
        following = int(bonus[row])
        for place in range(int(starts[row]), int(starts[row + 1])):
            draft = int(drafts[place])
            q = F.one_hot(drafts[place], target.shape[1]).double() if proposed is None else proposed[place].double()
            p = target[place].double()
            if bool(is_greedy[row]):
                is_right, other = draft == int(best[place]), int(best[place])
            else:
                excess = (p - q).clamp(min=0).cumsum(0)
                is_right = float(accept_uniforms[place]) * float(q[draft]) < float(p[draft])
                other = int(torch.searchsorted(excess, redraw_uniforms[row].double() * excess[-1], right=True))
            if not is_right:
                following = other
                break
            kept.append(draft)
        tokens[row, : len(kept) + 1] = tokens.new_tensor([*kept, following])
        counts[row] = len(kept) + 1
    return tokens, counts


def fused_moe(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    gate, up = torch.einsum("tc,tkmc->tkm", hidden, gate_up[chosen]).chunk(2, dim=-1)
    return torch.einsum("tk,tkm,tkcm->tc", weights, F.silu(gate) * up, down[chosen])


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    named = (sources >= 0) & (targets >= 0)
    cache[targets[named]] = cache[sources[named]]


def zero_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    cache[blocks[blocks >= 0]] = 0


PLAIN: Mapping[str, Callable[..., Any]] = {
    "gelu_and_mul": gelu_and_mul,
    "rotate_neighbors": rotate_neighbors,
    "quantize_int8": lambda x: rounded(x, torch.int8, 127),
    "quantize_fp8": lambda x: rounded(x, torch.float8_e4m3fn, 448),
    "apply_penalties": penalize,
    "rejection_sample": rejection_sample,
    "fused_moe": fused_moe,
    "copy_blocks": copy_blocks,
    "zero_blocks": zero_blocks,
}
