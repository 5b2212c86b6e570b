"""State space recurrence with a scalar decay per head (SSD), by chunks and token by token. All in float32.

For each head, with ``a = exp(step * decay)``, and B and C those of the head's group::

    state = a * state + step * outer(x, B)        y = state @ C + skip * x

Legend: T tokens, R rows, H heads, P head size, G groups of H / G neighboring heads, N state size, Q places of a chunk.
States are [R, H, P, N].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardpoint_torch_runtime.layers.recurrent import Rows, scan_waves, starting_states
from hardpoint_torch_runtime.layers.state_plan import DecodeRows, ScanRows, ScanWave

__all__ = ["SSMInputs", "ssm"]


@dataclass(frozen=True, slots=True)
class SSMInputs:
    """float32. ``x`` [T, H, P], ``steps`` [T, H] (positive), ``b`` and ``c`` [T, G, N], ``decay`` [H] (negative)."""

    x: torch.Tensor
    steps: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    decay: torch.Tensor

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.x.shape[1], self.x.shape[2], self.b.shape[2]


def ssm(inputs: SSMInputs, states: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    """All tokens of ``rows``: float32 [T, H, P], without the skip.

    ``states`` [blocks, H, P, N] are read and written; None: rows start from nothing, and nothing is kept.
    """
    start = starting_states(states, rows, inputs.state_shape, inputs.x.device)
    return _decode(inputs, start, states, rows) if isinstance(rows, DecodeRows) else _scan(inputs, start, states, rows)


def _decode(inputs: SSMInputs, state: torch.Tensor, states: torch.Tensor | None, rows: DecodeRows) -> torch.Tensor:
    num_rows = len(inputs.x)
    heads, size, state_size = inputs.state_shape
    groups = inputs.b.shape[1]
    state.mul_(torch.exp(inputs.steps * inputs.decay)[:, :, None, None])
    by_group = state.view(num_rows * groups, heads // groups * size, state_size)
    x = (inputs.x * inputs.steps.unsqueeze(-1)).reshape(num_rows * groups, -1, 1)
    by_group.baddbmm_(x, inputs.b.reshape(num_rows * groups, 1, state_size))
    if states is not None:
        states[rows.writes] = state
    return torch.bmm(by_group, inputs.c.reshape(num_rows * groups, state_size, 1)).view(num_rows, heads, size)


def _scan(inputs: SSMInputs, start: torch.Tensor, states: torch.Tensor | None, rows: ScanRows) -> torch.Tensor:
    def compute(wave: ScanWave, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = _Chunk.of(inputs, wave)
        return chunk.outputs(before), chunk.state_after(before)

    return scan_waves(start, states, rows, torch.empty_like(inputs.x), compute)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One wave. ``x`` [n, H, Q, P] is multiplied by the steps; ``b`` and ``c`` [n, G, Q, N].

    ``fall`` float64 [n, H, Q] is the logarithm of all decay from the chunk's start up to and with a place. Differences
    of it are exponents, and behind a steep fall float32 would leave nothing of a gentle one.
    """

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    fall: torch.Tensor

    @classmethod
    def of(cls, inputs: SSMInputs, wave: ScanWave) -> _Chunk:
        shape = (len(wave.rows), -1)
        steps = inputs.steps[wave.tokens].unflatten(0, shape)
        if wave.is_padding is not None:
            # Padding neither decays nor adds.
            steps = steps.masked_fill(wave.is_padding.unsqueeze(-1), 0.0)
        x = inputs.x[wave.tokens].unflatten(0, shape) * steps.unsqueeze(-1)
        return cls(
            x.transpose(1, 2),
            inputs.b[wave.tokens].unflatten(0, shape).transpose(1, 2),
            inputs.c[wave.tokens].unflatten(0, shape).transpose(1, 2),
            (steps * inputs.decay).transpose(1, 2).double().cumsum(-1),
        )

    def outputs(self, before: torch.Tensor) -> torch.Tensor:
        """[n, Q, H, P], given the states before the chunk [n, H, P, N]."""
        (num_rows, heads, places, size), groups = self.x.shape, self.b.shape[1]
        is_later = torch.ones(places, places, dtype=torch.bool, device=self.x.device).triu_(1)
        exponents = (self.fall.unsqueeze(-1) - self.fall.unsqueeze(-2)).masked_fill_(is_later, -torch.inf)
        weights = exponents.float().exp_().unflatten(1, (groups, -1))
        weights.mul_((self.c @ self.b.transpose(-1, -2)).unsqueeze(2))
        within = weights.flatten(1, 2) @ self.x
        by_group = before.view(num_rows, groups, heads // groups * size, -1)
        carried = (self.c @ by_group.transpose(-1, -2)).unflatten(-1, (-1, size))
        carried = carried.transpose(2, 3).flatten(1, 2) * self.fall.float().exp_().unsqueeze(-1)
        return (within + carried).transpose(1, 2)

    def state_after(self, before: torch.Tensor) -> torch.Tensor:
        """[n, H, P, N]."""
        groups = self.b.shape[1]
        whole = self.fall[..., -1:]
        x = self.x * (whole - self.fall).float().exp_().unsqueeze(-1)
        # [n, G, H / G * P, Q] @ [n, G, Q, N]
        added = x.transpose(2, 3).unflatten(1, (groups, -1)).flatten(2, 3) @ self.b
        return added.view_as(before) + before * whole.float().exp_().unsqueeze(-1)
