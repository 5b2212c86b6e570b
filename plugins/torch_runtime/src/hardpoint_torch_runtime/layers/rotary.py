"""Rotary position embedding with cosines and sines precomputed in float32.

Legend: T tokens, H heads, D head size, R rotated part of D (the rest passes through), P positions.
Pairs are (i, i + R/2), the layout of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hardpoint.errors import ModelFormatError
from hardpoint_torch_runtime.layers.rope_parameters import RopeParameters
from hardpoint_torch_runtime.ops import reference

__all__ = ["RotaryEmbedding", "rotary_frequencies"]


def rotary_frequencies(rope: RopeParameters, rotary_size: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32 [R/2], factor on cosines and sines) for ``rope``."""
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, rotary_size)
    return plain, 1.0


def _llama3(rope: RopeParameters, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended linearly in frequency."""
    # Full turns within the original context; by way of the wavelength, which rounds as checkpoints were trained.
    turns = rope.original_length / (2 * math.pi / plain)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeParameters, plain: torch.Tensor, rotary_size: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn more than ``beta_fast`` times keep their frequency, below ``beta_slow`` are stretched."""
    original = rope.original_length

    def dimension_with(turns: float) -> float:
        return rotary_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    span = high - low if high != low else 0.001
    stretch = ((torch.arange(rotary_size // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain * (1 - stretch) + plain / rope.factor * stretch, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeParameters) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RotaryEmbedding(torch.nn.Module):
    """Table of rotations for positions ``[0, max_position)``, looked up once per step and applied per layer.

    ``cos`` and ``sin`` are float32 [P, R/2]. ``kernel`` is that of the seam ``rotary_embedding``.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        head_size: int,
        max_position: int,
        rope: RopeParameters,
        device: torch.device,
        kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = reference.rotary_embedding,
    ) -> None:
        super().__init__()
        self._kernel = kernel
        self.head_size = head_size
        self.rotary_size = int(head_size * rope.partial_factor)
        self.max_position = max_position
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ModelFormatError(
                f"rotary embedding turns pairs, but {self.rotary_size} of a head's {head_size} values would rotate; "
                "check head_dim and partial_rotary_factor in the model's config.json"
            )
        frequencies, scale = rotary_frequencies(rope, self.rotary_size)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self.register_buffer("cos", (angles.cos() * scale).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(device), persistent=False)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors float32 [T, 1, R] for int64 [T]; compute once per step and hand to every layer."""
        cos, sin = self.cos[positions], self.sin[positions]
        # Full width: x * cos + swap_halves(x) * sin, hence the sign on the first half.
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate [T, H, D] in place (queries and keys may share one tensor) and return it."""
        return self._kernel(heads, cos, sin, self.rotary_size)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query [T, H, D] and key [T, K, D] in place for int64 positions [T]; returns both."""
        cos, sin = self.lookup(positions)
        return self.rotate_(query, cos, sin), self.rotate_(key, cos, sin)
