"""State space recurrence with a decay of its own for every channel and state (Mamba-1). All in float32.

For each channel, with ``a = exp(step * decay)`` and B and C common to all channels::

    state = a * state + step * x * B        y = sum(state * C)

Decays differ within a state, so no product of matrices sums up a chunk. Instead neighboring steps are joined into one,
and those again: a chunk of Q tokens takes 2 log2(Q) operations on tensors, and less than three times the arithmetic of
going token by token (parallel prefix sums after Blelloch, 1990).

Legend: T tokens, R rows, n rows of a wave, I channels, N state size, Q places of a chunk. States are
[R, I, N].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hardpoint_torch_runtime.layers.recurrent import Rows, scan_waves, starting_states
from hardpoint_torch_runtime.layers.state_plan import DecodeRows, ScanRows, ScanWave

__all__ = ["SelectiveInputs", "linear_recurrence", "selective_scan"]

_MAX_ELEMENTS = 1 << 22
"""Of a tensor with all states of a wave, which exists several times; channels are independent and can be cut."""


@dataclass(frozen=True, slots=True)
class SelectiveInputs:
    """float32. ``x`` and ``steps`` (positive) [T, I], ``b`` and ``c`` [T, N], ``decay`` [I, N] (negative)."""

    x: torch.Tensor
    steps: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    decay: torch.Tensor


def selective_scan(inputs: SelectiveInputs, states: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    """All tokens of ``rows``: float32 [T, I], without the skip.

    ``states`` [blocks, I, N] are read and written; None: rows start from nothing, and nothing is kept.
    """
    start = starting_states(states, rows, tuple(inputs.decay.shape), inputs.x.device)
    return _decode(inputs, start, states, rows) if isinstance(rows, DecodeRows) else _scan(inputs, start, states, rows)


def _decode(
    inputs: SelectiveInputs, state: torch.Tensor, states: torch.Tensor | None, rows: DecodeRows
) -> torch.Tensor:
    state.mul_(torch.exp(inputs.steps.unsqueeze(-1) * inputs.decay))
    state.addcmul_((inputs.steps * inputs.x).unsqueeze(-1), inputs.b.unsqueeze(1))
    if states is not None:
        states[rows.writes] = state
    return torch.bmm(state, inputs.c.unsqueeze(-1)).squeeze(-1)


def _scan(inputs: SelectiveInputs, start: torch.Tensor, states: torch.Tensor | None, rows: ScanRows) -> torch.Tensor:
    def compute(wave: ScanWave, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _chunks(inputs, wave, before)

    return scan_waves(start, states, rows, torch.empty_like(inputs.x), compute)


def _chunks(inputs: SelectiveInputs, wave: ScanWave, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [n, Q, I], states behind the chunks [n, I, N]), given those before them."""
    shape = (len(wave.rows), -1)
    steps = inputs.steps[wave.tokens].unflatten(0, shape)
    if wave.is_padding is not None:
        # Padding neither decays nor adds.
        steps = steps.masked_fill(wave.is_padding.unsqueeze(-1), 0.0)
    x = inputs.x[wave.tokens].unflatten(0, shape) * steps
    b, c = (tensor[wave.tokens].unflatten(0, shape) for tensor in (inputs.b, inputs.c))
    outputs, after = torch.empty_like(x), torch.empty_like(before)
    for part in _channel_parts(x.shape[-1], x.shape[0] * x.shape[1] * b.shape[-1]):
        keep = torch.exp(steps[..., part].unsqueeze(-1) * inputs.decay[part])
        add = x[..., part].unsqueeze(-1) * b.unsqueeze(2)
        add[:, 0].addcmul_(keep[:, 0], before[:, part])
        reached = linear_recurrence(keep, add)
        outputs[..., part] = (reached @ c.unsqueeze(-1)).squeeze(-1)
        after[:, part] = reached[:, -1]
    return outputs, after


def _channel_parts(channels: int, elements_per_channel: int) -> Iterator[slice]:
    size = max(_MAX_ELEMENTS // elements_per_channel, 1)
    return (slice(begin, begin + size) for begin in range(0, channels, size))


def linear_recurrence(keep: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
    """All of ``s[t] = keep[t] * s[t - 1] + add[t]`` along dimension 1 with nothing before the first.

    Both are of one shape [n, Q, ...], as is the result.
    """
    count = add.shape[1]
    if count == 1:
        return add
    first, second = slice(0, count - 1, 2), slice(1, None, 2)
    joined = torch.addcmul(add[:, second], keep[:, second], add[:, first])
    behind_pairs = linear_recurrence(keep[:, first] * keep[:, second], joined)
    reached = torch.empty_like(add)
    reached[:, 0] = add[:, 0]
    reached[:, second] = behind_pairs
    inner = slice(2, None, 2)
    reached[:, inner] = torch.addcmul(add[:, inner], keep[:, inner], behind_pairs[:, : (count - 1) // 2])
    return reached
