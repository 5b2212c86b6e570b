"""Penalties for known tokens. Legend: S rows of logits, P rows with penalties, L known tokens at most, V vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import ceil_div, next_power_of_two

__all__ = ["apply_penalties", "count_kernel", "penalty_kernel"]

_WIDEST = 1024
_KNOWN = 1 << 30
"""The bit of a count that says that the token is known at all; counts of generated ones are below it."""


@triton.jit
def count_kernel(
    tokens: tl.tensor,
    is_output: tl.tensor,
    counts: tl.tensor,
    length: tl.tensor,
    size: tl.tensor,
    KNOWN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Add row p of ``tokens`` int64 [P, L] to ``counts`` int32 [P, V]. Tokens outside the vocabulary are padding."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = place < length
    token = tl.load(tokens + row * length + place, mask=inside, other=size)
    inside = inside & (token >= 0) & (token < size)
    is_generated = tl.load(is_output + row * length + place, mask=inside, other=0).to(tl.int32)
    tl.atomic_or(counts + row * size + token, KNOWN, mask=inside, sem="relaxed")
    tl.atomic_add(counts + row * size + token, is_generated, mask=inside, sem="relaxed")


@triton.jit
def penalty_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    KNOWN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Repetition over all known tokens, then frequency and presence over generated ones, in place."""
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = token < size
    place = logits + tl.load(rows + number) * row_stride + token
    x = tl.load(place, mask=inside, other=0.0)
    count = tl.load(counts + number * size + token, mask=inside, other=0)
    # Zero would make NaN of an excluded token; near zero, it is simply the best one.
    factor = tl.maximum(tl.load(repetition + number), 1.1754943508222875e-38)
    divided = tl.minimum(tl.div_rn(x, factor), 3.4028234663852886e38)
    x = tl.where(count >= KNOWN, tl.where(x > 0, divided, x * factor), x)
    generated = tl.where(count >= KNOWN, count - KNOWN, count)
    x = x - tl.load(frequency + number) * generated.to(tl.float32)
    x = x - tl.load(presence + number) * tl.where(generated > 0, 1.0, 0.0)
    tl.store(place, x, mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    is_output: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Write to ``rows`` int64 [P] (each at most once) of float32 ``logits`` [S, V].

    ``token_ids`` int64 [P, L] are all known tokens, V or more as padding; ``is_output`` bool [P, L] marks generated
    ones; ``repetition``, ``frequency``, ``presence`` float32 [P]. Raises ``ValueError`` for rows that are not
    contiguous.
    """
    if logits.stride(-1) != 1:
        raise ValueError(f"rows of logits must be contiguous, but the strides are {logits.stride()}")
    num_rows, size = len(rows), logits.shape[1]
    if not num_rows:
        return
    counts = torch.zeros(num_rows, size, dtype=torch.int32, device=logits.device)
    length = token_ids.shape[1]
    if length:
        width = min(_WIDEST, next_power_of_two(length))
        grid = (num_rows, ceil_div(length, width))
        count_kernel[grid](
            token_ids.contiguous(), is_output.contiguous(), counts, length, size, KNOWN=_KNOWN, WIDTH=width
        )
    width = min(_WIDEST, next_power_of_two(size))
    penalty_kernel[num_rows, ceil_div(size, width)](
        logits, rows, counts, repetition, frequency, presence, size, logits.stride(0), KNOWN=_KNOWN, WIDTH=width
    )
