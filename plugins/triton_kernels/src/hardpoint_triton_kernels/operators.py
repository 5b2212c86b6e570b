"""Operators where the worker declares no seam: the ``custom_op`` plugin ``triton_ops``.

Implementations import their kernels when they are called, so that the plugin can be listed without Triton; then each
operator exists by name and says what to install.
"""

from __future__ import annotations

import torch

from hardpoint.interfaces.custom_op import CustomOperator, CustomOps
from hardpoint.interfaces.plugin import NoOptions, ProbeStatus, plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_triton_kernels import samples
from hardpoint_triton_kernels.availability import device_types, probe

__all__ = ["create_ops"]


def gelu_and_mul(gate_up: torch.Tensor, exact: bool) -> torch.Tensor:
    """[..., 2 M] (gate first) to [..., M]; ``exact``: by the Gaussian error function, else its tanh approximation."""
    from hardpoint_triton_kernels.kernels.activation import act_and_mul

    return act_and_mul(gate_up, "gelu" if exact else "gelu_tanh")


def rotate_neighbors(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
    """Pairs (2 i, 2 i + 1) of the first ``rotary_size`` values of [T, H, D], in place."""
    from hardpoint_triton_kernels.kernels import rotary

    rotary.rotate_neighbors(heads, cos, sin, rotary_size)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., C] and float32 scales [...], each row by itself."""
    from hardpoint_triton_kernels.kernels import quantize

    return quantize.quantize_int8(x)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [..., C] and float32 scales [...], each row by itself."""
    from hardpoint_triton_kernels.kernels import quantize

    return quantize.quantize_fp8(x)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """See :func:`hardpoint_triton_kernels.kernels.penalties.apply_penalties`."""
    from hardpoint_triton_kernels.kernels import penalties

    penalties.apply_penalties(logits, rows, token_ids, is_output, repetition, frequency, presence)


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
    """See :func:`hardpoint_triton_kernels.kernels.rejection.rejection_sample`."""
    from hardpoint_triton_kernels.kernels import rejection

    return rejection.rejection_sample(
        drafts, starts, is_greedy, best, target, proposed, bonus, accept_uniforms, redraw_uniforms, width
    )


def fused_moe(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """See :func:`hardpoint_triton_kernels.kernels.moe.fused_moe`."""
    from hardpoint_triton_kernels.kernels import moe

    return moe.fused_moe(hidden, gate_up, down, weights, chosen, activation)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Blocks ``sources`` int64 [N] of [B, ...] over ``targets`` int64 [N]; pairs with a negative number are skipped."""
    from hardpoint_triton_kernels.kernels import blocks

    blocks.copy_blocks(cache, sources, targets)


def zero_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Clears ``blocks`` int64 [N] of [B, ...]; negative numbers are skipped."""
    from hardpoint_triton_kernels.kernels import blocks as kernels

    kernels.zero_blocks(cache, blocks)


def _fake_half(gate_up: torch.Tensor, exact: bool) -> torch.Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_verdict(
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
    return drafts.new_empty(len(bonus), width), drafts.new_empty(len(bonus))


def _fake_mixture(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _fake_nothing(*arguments: object) -> None:
    """Of operators that only write to an argument."""


_DESCRIPTIONS = (
    (gelu_and_mul, _fake_half, samples.gated, ()),
    (rotate_neighbors, _fake_nothing, samples.rotations, ("heads",)),
    (quantize_int8, _fake_int8, samples.rows, ()),
    (quantize_fp8, _fake_fp8, samples.rows, ()),
    (apply_penalties, _fake_nothing, samples.penalties, ("logits",)),
    (rejection_sample, _fake_verdict, samples.drafts, ()),
    (fused_moe, _fake_mixture, samples.mixtures, ()),
    (copy_blocks, _fake_nothing, samples.block_pairs, ("cache",)),
    (zero_blocks, _fake_nothing, samples.block_lists, ("cache",)),
)


@plugin("custom_op", probe=probe)
def create_ops(ctx: WorkerContext, options: NoOptions) -> CustomOps:
    """Without Triton the operators are described all the same, as absent."""
    kernel = None
    if probe().status is ProbeStatus.AVAILABLE:
        from hardpoint_triton_kernels.kernels.activation import act_and_mul_kernel

        kernel = act_and_mul_kernel
    devices = sorted(device_types(kernel))
    return CustomOps(
        tuple(
            CustomOperator(
                function.__name__, dict.fromkeys(devices, function), fake, inputs, mutates=written, probe=probe
            )
            for function, fake, inputs, written in _DESCRIPTIONS
        )
    )
