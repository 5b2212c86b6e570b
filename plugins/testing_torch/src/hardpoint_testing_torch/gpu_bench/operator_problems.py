"""What operators compute, in plain torch, and large problems for them.

Arguments are those of the operators; sizes follow from ``Scale``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint_testing_torch.gpu_bench.records import Scale
from hardpoint_torch_runtime.sampling.constraints import apply_penalties as penalize
from hardpoint_torch_runtime.sampling.metadata import Penalties

__all__ = ["PROBLEMS", "OperatorProblem"]

EXPERTS, CHOICES = 8, 2
DRAFTS = 3
LARGEST_FP8 = 448.0


def _no_flops(*arguments: Any) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class OperatorProblem:
    """One operator.

    Attributes:
        plain: takes the operator's arguments and computes the same, in place where that does.
        large: arguments on a device, of a dtype where the operator leaves it open.
        rewrites: the first argument is read and written as a whole.
        flops: of products that arguments cannot do without.
    """

    plain: Callable[..., Any]
    large: Callable[[torch.device, torch.dtype, Scale], tuple[Any, ...]]
    rewrites: bool = False
    flops: Callable[..., float] = _no_flops


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def gelu_and_mul(gate_up: torch.Tensor, exact: bool) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="none" if exact else "tanh") * up


def rotate_neighbors(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
    part = heads[..., :rotary_size]
    swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    part.copy_(part * cos + swapped * sin)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scales = _scaled(x, 127.0)
    return scaled.round().clamp(-127, 127).to(torch.int8), scales


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, scales = _scaled(x, LARGEST_FP8)
    return scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn), scales


def _scaled(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.float().abs().amax(-1) / largest
    return x.float() / torch.where(scales > 0, scales, 1.0).unsqueeze(-1), scales


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    penalize(logits, Penalties(rows, repetition, frequency, presence, token_ids, is_output))


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
    """All rows at once; drafts must not be missing."""
    lengths = starts.diff()
    row = torch.repeat_interleave(torch.arange(len(bonus), device=drafts.device), lengths, output_size=len(drafts))
    offset = torch.arange(len(drafts), device=drafts.device) - starts[row]
    here = drafts.unsqueeze(1)
    p = target.gather(1, here).squeeze(1)
    q = torch.ones_like(p) if proposed is None else proposed.gather(1, here).squeeze(1)
    is_right = torch.where(is_greedy[row], drafts == best, (accept_uniforms * q < p) & (p > 0))
    accepted = lengths.scatter_reduce(0, row, torch.where(is_right, lengths[row], offset), "amin")
    excess = target.scatter(1, here, 0.0) if proposed is None else (target - proposed).clamp(min=0)
    sums = excess.double().cumsum(1)
    goal = redraw_uniforms.double()[row].unsqueeze(1) * sums[:, -1:]
    redrawn = torch.searchsorted(sums, goal, right=True).squeeze(1).clamp(max=target.shape[1] - 1)
    other = torch.where(is_greedy[row], best, redrawn)
    tokens = drafts.new_full((len(bonus), width), -1)
    kept = torch.where(offset < accepted[row], drafts, torch.where(offset == accepted[row], other, -1))
    tokens[row, offset] = kept
    last = torch.where(accepted == lengths, bonus, tokens.gather(1, accepted.unsqueeze(1)).squeeze(1))
    return tokens.scatter(1, accepted.unsqueeze(1), last.unsqueeze(1)), accepted + 1


def fused_moe(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Expert by expert, with SiLU."""
    output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in range(len(gate_up)):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (hidden[token] @ gate_up[expert].T).chunk(2, dim=-1)
        result = (F.silu(gate) * up) @ down[expert].T
        output.index_add_(0, token, result.float() * weights[token, choice].unsqueeze(1))
    return output.to(hidden.dtype)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    named = (sources >= 0) & (targets >= 0)
    cache[targets[named]] = cache[sources[named]]


def zero_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    cache[blocks[blocks >= 0]] = 0


def _gated(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    return _normal(device, dtype, scale.tokens, 2 * scale.width), True


def _rotations(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    size = min(128, scale.width)
    angles = _normal(device, torch.float32, scale.tokens, 1, size // 2).repeat_interleave(2, dim=-1)
    signs = torch.tensor([-1.0, 1.0], device=device).repeat(size // 2)
    heads = _normal(device, dtype, scale.tokens, max(1, scale.width // size), size)
    return heads, angles.cos(), angles.sin() * signs, size


def _rows(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    return (_normal(device, dtype, scale.tokens, scale.width),)


def _penalties(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    count, vocabulary = max(1, scale.tokens // 128), 32 * scale.width
    tokens = torch.randint(vocabulary, (count, scale.context), device=device)
    factors = (1 + _normal(device, torch.float32, count).abs() for _ in range(3))
    logits = _normal(device, torch.float32, count, vocabulary)
    return logits, torch.arange(count, device=device), tokens, tokens % 2 == 0, *factors


def _drafts(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    count, vocabulary = max(1, scale.tokens // 256), 32 * scale.width
    total = DRAFTS * count
    target, proposed = (_normal(device, torch.float32, total, vocabulary).softmax(-1) for _ in range(2))
    starts = torch.arange(0, total + 1, DRAFTS, device=device)
    ids, bonus = (torch.randint(vocabulary, (size,), device=device) for size in (total, count))
    uniforms = (torch.rand(size, device=device) for size in (total, count))
    is_greedy = torch.arange(count, device=device) % 2 == 1
    return ids, starts, is_greedy, target.argmax(-1), target, proposed, bonus, *uniforms, DRAFTS + 1


def _mixture(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    width, inner = scale.width, max(1, scale.width // 2)
    gate_up = _normal(device, dtype, EXPERTS, 2 * inner, width) / width**0.5
    down = _normal(device, dtype, EXPERTS, width, inner) / inner**0.5
    scores = _normal(device, torch.float32, scale.tokens, EXPERTS).softmax(-1)
    weights, chosen = scores.topk(CHOICES)
    return _normal(device, dtype, scale.tokens, width), gate_up, down, weights, chosen, "silu"


def _mixture_flops(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *rest: Any) -> float:
    chosen = rest[1]
    return 2.0 * chosen.numel() * (gate_up[0].numel() + down[0].numel())


def _blocks(device: torch.device, dtype: torch.dtype, scale: Scale) -> torch.Tensor:
    # More than a device's last cache holds.
    return _normal(device, dtype, max(2, scale.tokens // 4), 8, 16, 2 * min(128, scale.width))


def _block_pairs(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    cache = _blocks(device, dtype, scale)
    half = len(cache) // 2
    return cache, torch.arange(half, device=device), torch.arange(half, 2 * half, device=device)


def _block_list(device: torch.device, dtype: torch.dtype, scale: Scale) -> tuple[Any, ...]:
    cache = _blocks(device, dtype, scale)
    return cache, torch.arange(len(cache), device=device)


PROBLEMS: Mapping[str, OperatorProblem] = {
    "gelu_and_mul": OperatorProblem(gelu_and_mul, _gated),
    "rotate_neighbors": OperatorProblem(rotate_neighbors, _rotations, rewrites=True),
    "quantize_int8": OperatorProblem(quantize_int8, _rows),
    "quantize_fp8": OperatorProblem(quantize_fp8, _rows),
    "apply_penalties": OperatorProblem(apply_penalties, _penalties, rewrites=True),
    "rejection_sample": OperatorProblem(rejection_sample, _drafts),
    "fused_moe": OperatorProblem(fused_moe, _mixture, flops=_mixture_flops),
    "copy_blocks": OperatorProblem(copy_blocks, _block_pairs),
    "zero_blocks": OperatorProblem(zero_blocks, _block_list),
}
"""By the names of operators; a distribution whose operator of such a name computes something else is told wrong."""
