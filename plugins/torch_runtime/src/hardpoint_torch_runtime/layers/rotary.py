"""Rotary position embedding with cosines and sines precomputed in float32.

Legend: T tokens, H heads, D head size, R rotated part of D (the rest passes through), P positions.
Pairs are (i, i + R/2), the layout of most Hugging Face checkpoints, or neighbors (2 i, 2 i + 1).

Some scalings depend on how long a sequence is. Here that is ``max_model_len``, for every token of every sequence: keys
stay in the cache, so the frequencies they were turned by can never change. Hugging Face goes by the length at hand, and
agrees wherever that is on the same side of the trained context (``longrope``), or within it (``dynamic``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hardpoint.errors import ConfigError, ModelFormatError
from hardpoint_torch_runtime.layers.rope_parameters import NUM_AXES, RopeParameters
from hardpoint_torch_runtime.ops import reference

__all__ = ["RotaryEmbedding", "rotary_frequencies"]

MAX_TABLE_BYTES = 1 << 32
"""Of cosines and sines: a configuration may claim any context, and the table is made before anything else is sized."""


def rotary_frequencies(rope: RopeParameters, rotary_size: int, max_length: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32 [R/2], factor on cosines and sines) for sequences of up to ``max_length`` tokens.

    Raises ``ModelFormatError`` for scalings that do not fit R.
    """
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    if rope.rope_type == "longrope":
        return _longrope(rope, exponents, max_length)
    if rope.rope_type == "dynamic":
        return 1.0 / (_dynamic_base(rope, rotary_size, max_length) ** exponents), 1.0
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, rotary_size)
    return plain, 1.0


def _dynamic_base(rope: RopeParameters, rotary_size: int, max_length: int) -> float:
    """The base that stretches the slowest pair as far as the context, and the fastest not at all."""
    if rotary_size == 2:
        raise ModelFormatError(
            "rope_type 'dynamic' cannot spare the fastest pair where there is only one; check head_dim"
        )
    length = max(max_length, rope.original_length)
    stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
    try:
        return float(rope.theta * stretch ** (rotary_size / (rotary_size - 2)))
    except OverflowError:
        raise _endless(rope) from None


def _endless(rope: RopeParameters) -> ModelFormatError:
    return ModelFormatError(
        f"rotary settings in the model's config.json give angles that are not finite, with rope_type "
        f"{rope.rope_type!r}, rope_theta={rope.theta} and factor={rope.factor}; check them"
    )


def _longrope(rope: RopeParameters, exponents: torch.Tensor, max_length: int) -> tuple[torch.Tensor, float]:
    """Each pair is stretched by a factor of its own, found by search when the model was trained."""
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if len(factors) != len(exponents):
            raise ModelFormatError(
                f"rotary settings in the model's config.json: {name} has {len(factors)} entries, but "
                f"{len(exponents)} pairs rotate"
            )
    factors = rope.long_factors if max_length > rope.original_length else rope.short_factors
    scale = rope.attention_factor
    if scale is None:
        scale = 1.0
        if rope.factor > 1:
            scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents), scale


def _section_axes(rope: RopeParameters, num_pairs: int) -> torch.Tensor:
    """int64 [R/2], which of a token's positions each pair turns by. Raises ``ModelFormatError`` unless all pairs do."""
    if sum(rope.sections) != num_pairs:
        raise ModelFormatError(
            f"rotary settings in the model's config.json: mrope_section {list(rope.sections)} shares out "
            f"{sum(rope.sections)} pairs, but {num_pairs} rotate"
        )
    if not rope.sections_alternate:
        return torch.repeat_interleave(torch.arange(len(rope.sections)), torch.tensor(rope.sections))
    axes = torch.zeros(num_pairs, dtype=torch.int64)
    step = len(rope.sections)
    for axis, count in enumerate(rope.sections[1:], start=1):
        # Turns end where an axis has had all its pairs; what is left turns by time.
        axes[axis : count * step : step] = axis
    return axes


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


def _require_small_table(max_position: int, num_pairs: int) -> None:
    per_position = 2 * num_pairs * torch.float32.itemsize
    if max_position * per_position > MAX_TABLE_BYTES:
        raise ConfigError(
            f"a context of {max_position} tokens needs tables of rotations of "
            f"{max_position * per_position / 2**30:.0f} GiB, more than the "
            f"{MAX_TABLE_BYTES / 2**30:.0f} GiB that are made; set --max-model-len to at most "
            f"{MAX_TABLE_BYTES // per_position}"
        )


def _rotate_neighbors(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> torch.Tensor:
    """Rotate pairs (2 i, 2 i + 1) of [T, H, D] in place and return it."""
    part = heads[..., :rotary_size]
    exact = part.float()
    swapped = exact.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    part.copy_(exact * cos + swapped * sin)
    return heads


class RotaryEmbedding(torch.nn.Module):
    """Table of rotations for positions ``[0, max_position)``, looked up once per step and applied per layer.

    ``cos`` and ``sin`` are float32 [P, R/2]; ``axes`` int64 [R/2] where tokens may have several positions. ``kernel``
    is that of the seam ``rotary_embedding``; neighboring pairs do without.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    axes: torch.Tensor | None

    def __init__(
        self,
        head_size: int,
        max_position: int,
        rope: RopeParameters,
        device: torch.device,
        kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = reference.rotary_embedding,
        *,
        pairs_are_neighbors: bool = False,
    ) -> None:
        """``max_position`` is the longest sequence, and what scalings go by. Raises ``ModelFormatError`` for settings
        that do not fit the head, ``ConfigError`` for a table beyond ``MAX_TABLE_BYTES``."""
        super().__init__()
        self._kernel = _rotate_neighbors if pairs_are_neighbors else kernel
        self.pairs_are_neighbors = pairs_are_neighbors
        self.head_size = head_size
        self.rotary_size = int(head_size * rope.partial_factor)
        self.max_position = max_position
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ModelFormatError(
                f"rotary embedding turns pairs, but {self.rotary_size} of a head's {head_size} values would rotate; "
                "check head_dim and partial_rotary_factor in the model's config.json"
            )
        frequencies, scale = rotary_frequencies(rope, self.rotary_size, max_position)
        if not (frequencies.isfinite().all() and abs(scale) <= torch.finfo(torch.float32).max):
            raise _endless(rope)
        _require_small_table(max_position, len(frequencies))
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        axes = _section_axes(rope, len(frequencies)).to(device) if rope.sections else None
        # In place: a long context's table is large.
        self.register_buffer("cos", angles.cos().mul_(scale).to(device), persistent=False)
        self.register_buffer("sin", angles.sin_().mul_(scale).to(device), persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors float32 [T, 1, R] for int64 [T], or [axes, T] where the model has sections; compute once per step
        and hand to every layer. Raises ``ValueError`` for positions of another shape."""
        if positions.dim() == 1:
            cos, sin = self.cos[positions], self.sin[positions]
        elif self.axes is not None and positions.shape[0] == NUM_AXES:
            by_pair = positions[self.axes].T
            pairs = torch.arange(len(self.axes), device=positions.device)
            cos, sin = self.cos[by_pair, pairs], self.sin[by_pair, pairs]
        else:
            takes = "[T]" if self.axes is None else f"[T] or [{NUM_AXES}, T]"
            raise ValueError(f"positions have shape {list(positions.shape)}; this model's rotation takes {takes}")
        # Full width: x * cos + swap(x) * sin, hence the sign on the first of each pair.
        if self.pairs_are_neighbors:
            return cos.repeat_interleave(2, dim=-1).unsqueeze(1), torch.stack((-sin, sin), dim=-1).flatten(1).unsqueeze(
                1
            )
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate [T, H, D] in place (queries and keys may share one tensor) and return it."""
        return self._kernel(heads, cos, sin, self.rotary_size)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate query [T, H, D] and key [T, K, D] in place for positions as in :meth:`lookup`; returns both."""
        cos, sin = self.lookup(positions)
        return self.rotate_(query, cos, sin), self.rotate_(key, cos, sin)
