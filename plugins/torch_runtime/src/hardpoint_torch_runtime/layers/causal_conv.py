"""Causal convolution over the tokens of each sequence, channel by channel, with the last inputs as its state.

Legend: T tokens, R rows, C channels of this rank, K width. A state is float32 [K - 1, C], the inputs before the next
token, oldest first; before a sequence's first token they are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hardpoint_torch_runtime.layers.placement import OutputPart, Placement, place_parts
from hardpoint_torch_runtime.layers.recurrent import Rows, starting_states
from hardpoint_torch_runtime.layers.state_plan import DecodeRows, ScanRows

__all__ = ["CausalConv"]


class CausalConv(torch.nn.Module):
    """``silu(conv(x))`` for the channels of ``segments``, which ranks divide one by one; computed in float32.

    Parameters: ``weight`` [C, 1, K], and ``bias`` [C] if there is one.
    """

    def __init__(
        self, segments: Sequence[OutputPart], width: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.segments = tuple(segments)
        self.width = width
        self.channels = sum(segment.length for segment in segments)
        empty = torch.empty(self.channels, 1, width, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)
        self.bias: torch.nn.Parameter | None = None
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(self.channels, dtype=dtype, device=device), requires_grad=False)

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.width - 1, self.channels

    def forward(self, rows: Rows, x: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """[T, C] of all tokens of ``rows`` to float32 [T, C]. ``states`` [blocks, K - 1, C] are read and written;
        without them rows start from nothing and nothing is kept."""
        return self._decode(x, states, rows) if isinstance(rows, DecodeRows) else self._scan(x, states, rows)

    def _decode(self, x: torch.Tensor, states: torch.Tensor | None, rows: DecodeRows) -> torch.Tensor:
        """One token of each row."""
        before = starting_states(states, rows, self.state_shape, x.device)
        window = torch.cat((before, x.float().unsqueeze(1)), dim=1)
        if states is not None:
            states[rows.writes] = window[:, 1:]
        return F.silu(self._weighted([window[:, place] for place in range(self.width)]))

    def _scan(self, x: torch.Tensor, states: torch.Tensor | None, rows: ScanRows) -> torch.Tensor:
        before = starting_states(states, rows, self.state_shape, x.device)
        back = self.width - 1
        # Each row's inputs behind those of its state: the window of token t begins at t + back * (its row).
        lanes = torch.arange(back, device=x.device)
        token_places = torch.arange(rows.num_tokens, device=x.device) + back * rows.row_of_token
        row_starts = rows.starts + back * torch.arange(len(rows.starts), device=x.device)
        line = torch.empty(
            rows.num_tokens + back * len(rows.starts), self.channels, dtype=torch.float32, device=x.device
        )
        line[(row_starts.unsqueeze(1) + lanes).flatten()] = before.flatten(0, 1)
        line[token_places + back] = x.float()
        if states is not None:
            ends = row_starts[rows.kept_rows] + rows.kept_lengths
            states[rows.blocks] = line[ends.unsqueeze(1) + lanes]
        count = len(line) - back
        convolved = self._weighted([line[place : place + count] for place in range(self.width)])
        return F.silu(convolved[token_places] if len(rows.starts) > 1 else convolved)

    def _weighted(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum of ``taps``, each [n, C], times the weights from the oldest to the newest, and the bias."""
        weights = self.weight[:, 0].float()
        total = taps[0] * weights[:, 0]
        for place in range(1, self.width):
            total = torch.addcmul(total, taps[place], weights[:, place])
        return total if self.bias is None else total + self.bias.float()

    def place(self, parameter: str, shard: str | None) -> Placement:
        if shard is not None or parameter not in ("weight", "bias"):
            raise KeyError(f"a convolution has a whole 'weight' and 'bias', not {parameter!r} / {shard!r}")
        return place_parts(self.segments, (1, self.width) if parameter == "weight" else ())

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}"
