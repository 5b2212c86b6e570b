"""Draws that do not depend on batch composition, preemption or anything that ran before.

A seeded row's draw is a pure function of (seed, number of tokens generated so far): there is no generator state to
keep, resume or roll back. One uniform number per row suffices, because tokens are drawn by inverting the cumulative
distribution.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["counter_uniforms", "draw"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MANTISSA_SHIFT, _MANTISSA_SCALE = np.uint64(11), 2.0**-53


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: a bijection of 64-bit words in which every input bit reaches every output bit."""
    values = (values ^ (values >> _SHIFTS[0])) * _MULTIPLIERS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return values ^ (values >> _SHIFTS[2])


def counter_uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1) from uint64 ``seeds`` and non-negative ``counters`` [N]: entry i is draw number
    ``counters[i]`` of stream ``seeds[i]``."""
    streams = _mix(seeds.astype(np.uint64) + _GOLDEN)
    words = _mix(streams + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words >> _MANTISSA_SHIFT).astype(np.float64) * _MANTISSA_SCALE


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample int64 [S] from float32 ``logits`` [S, V] with ``uniforms`` float64 [S]; V where a row holds NaN or +inf.

    A token of probability zero is never drawn: its cumulative value equals its neighbor's, and the first value *above*
    the target wins.
    """
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Rounding may lift u * total onto total, beyond the last token.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return torch.where(total.isfinite(), tokens, logits.shape[-1])
