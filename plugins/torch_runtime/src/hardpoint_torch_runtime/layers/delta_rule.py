"""Linear attention by the gated delta rule, by chunks and token by token. All in float32.

For each head, with ``a = exp(decay)``, and query and key those of the head's group::

    state = a * state
    state = state + outer(key, rate * (value - key @ state))        y = query @ state

Within a chunk the corrected values u are the solution of one triangular system (Yang et al., "Parallelizing linear
transformers with the delta rule over sequence length", 2024, with the decays of "Gated delta networks", 2024)::

    (1 + rate * L * (key @ key.T)) u = rate * (value - fall * (key @ state))        L[i, j] = fall[i] / fall[j], j < i

Legend: T tokens, R rows, n rows of a wave, H heads of size V, G groups of H / G neighboring heads, K key
size, Q places of a chunk. States are [R, H, K, V].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardpoint_torch_runtime.layers.recurrent import Rows, scan_waves, starting_states
from hardpoint_torch_runtime.layers.state_plan import DecodeRows, ScanRows, ScanWave

__all__ = ["DeltaInputs", "delta_rule"]


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """float32. ``query`` and ``key`` [T, G, K], ``value`` [T, H, V], ``decay`` [T, H] (logarithms, never above 0) and
    ``rate`` [T, H], between 0 and 1."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.value.shape[1], self.key.shape[2], self.value.shape[2]


def delta_rule(inputs: DeltaInputs, states: torch.Tensor | None, rows: Rows) -> torch.Tensor:
    """All tokens of ``rows``: float32 [T, H, V].

    ``states`` [blocks, H, K, V] are read and written; None: rows start from nothing, and nothing is kept.
    """
    start = starting_states(states, rows, inputs.state_shape, inputs.value.device)
    return _decode(inputs, start, states, rows) if isinstance(rows, DecodeRows) else _scan(inputs, start, states, rows)


def _decode(inputs: DeltaInputs, state: torch.Tensor, states: torch.Tensor | None, rows: DecodeRows) -> torch.Tensor:
    heads, key_size, size = inputs.state_shape
    per_group = heads // inputs.key.shape[1]
    state.mul_(torch.exp(inputs.decay)[:, :, None, None])
    by_head = state.view(-1, key_size, size)
    # Copied for each head of a group; states are K times as large.
    query, key = (part.repeat_interleave(per_group, dim=1).view(-1, 1, key_size) for part in (inputs.query, inputs.key))
    known = torch.bmm(key, by_head)
    correction = (inputs.value.reshape(-1, 1, size) - known) * inputs.rate.reshape(-1, 1, 1)
    by_head.baddbmm_(key.transpose(1, 2), correction)
    if states is not None:
        states[rows.writes] = state
    return torch.bmm(query, by_head).view(-1, heads, size)


def _scan(inputs: DeltaInputs, start: torch.Tensor, states: torch.Tensor | None, rows: ScanRows) -> torch.Tensor:
    def compute(wave: ScanWave, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Chunk.of(inputs, wave).pass_through(before)

    return scan_waves(start, states, rows, torch.empty_like(inputs.value), compute)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One wave. ``query`` and ``key`` [n, G, 1, Q, K], ``value`` [n, G, H / G, Q, V], ``rate`` [n, G, H / G, Q, 1].

    ``fall`` float64 [n, G, H / G, Q, 1] is the logarithm of all decay from the chunk's start up to and with a place.
    Differences of it are exponents, and behind a steep fall float32 would leave nothing of a gentle one.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rate: torch.Tensor
    fall: torch.Tensor

    @classmethod
    def of(cls, inputs: DeltaInputs, wave: ScanWave) -> _Chunk:
        shape = (len(wave.rows), -1)
        decay, rate = (tensor[wave.tokens].unflatten(0, shape) for tensor in (inputs.decay, inputs.rate))
        if wave.is_padding is not None:
            # Padding neither decays nor corrects.
            padding = wave.is_padding.unsqueeze(-1)
            decay, rate = decay.masked_fill(padding, 0.0), rate.masked_fill(padding, 0.0)
        query, key, value = (
            tensor[wave.tokens].unflatten(0, shape).transpose(1, 2)
            for tensor in (inputs.query, inputs.key, inputs.value)
        )
        groups = (inputs.key.shape[1], -1)
        return cls(
            query.unsqueeze(2),
            key.unsqueeze(2),
            value.unflatten(1, groups),
            rate.transpose(1, 2).unflatten(1, groups).unsqueeze(-1),
            decay.transpose(1, 2).double().cumsum(-1).unflatten(1, groups).unsqueeze(-1),
        )

    def pass_through(self, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs [n, Q, H, V], states behind the chunks [n, H, K, V]), given those before them."""
        places = self.fall.shape[-2]
        is_later = torch.ones(places, places, dtype=torch.bool, device=before.device).triu_(1)
        weights = (self.fall - self.fall.transpose(-1, -2)).masked_fill_(is_later, -torch.inf).float().exp_()
        fall, whole = self.fall.float().exp(), self.fall[..., -1:, :]
        state = before.unflatten(1, self.value.shape[1:3])
        wanted = torch.addcmul(self.value, self.key @ state, fall, value=-1.0).mul_(self.rate)
        # Of the system only what lies below the diagonal is read, which itself counts as ones.
        system = (self.key @ self.key.transpose(-1, -2)) * weights * self.rate
        corrected = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs = weights.mul_(self.query @ self.key.transpose(-1, -2)) @ corrected
        outputs.addcmul_(self.query @ state, fall)
        added = self.key.transpose(-1, -2) @ (corrected * (whole - self.fall).float().exp_())
        after = torch.addcmul(added, state, whole.float().exp_())
        return outputs.flatten(1, 2).transpose(1, 2), after.flatten(1, 2)
