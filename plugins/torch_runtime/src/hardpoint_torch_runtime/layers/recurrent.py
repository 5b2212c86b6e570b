"""What layers that keep a state of each sequence have in common: where a step's states are, and how rows share a scan.

Legend: T tokens of the step (padding included), R rows, Q places of a wave's chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hardpoint.interfaces.kv_cache_specs import MambaSpec
from hardpoint_torch_runtime.forward_context import get_forward_context
from hardpoint_torch_runtime.layers.state_plan import DecodeRows, ScanRows, ScanWave, StateMetadata, whole_row
from hardpoint_torch_runtime.layers.uncompiled import UncompiledLayer

__all__ = ["RecurrentLayer", "Rows", "StepStates", "scan_waves", "starting_states"]

Rows = DecodeRows | ScanRows
"""Rows of one kind; both are read and written through ``reads`` and ``fresh``."""


def starting_states(
    states: torch.Tensor | None, rows: Rows, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """What rows go on from, float32 [R, *shape] to be overwritten; zero for those that are fresh.

    What the blocks of fresh rows hold is an earlier owner's, and may be no number. ``states`` None: all are fresh.
    """
    if states is None:
        return torch.zeros(len(rows.reads), *shape, dtype=torch.float32, device=device)
    return states[rows.reads].index_fill_(0, rows.fresh, 0.0)


def scan_waves(
    start: torch.Tensor,
    states: torch.Tensor | None,
    rows: ScanRows,
    output: torch.Tensor,
    compute: Callable[[ScanWave, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Fill ``output`` [tokens of the rows, ...] wave by wave, and keep the states that are to be kept.

    ``compute`` gets a wave and the states before its chunks [n, ...], and gives the chunks' results [n, Q, ...] and the
    states behind them. ``start`` [R, ...] is overwritten.
    """
    for wave in rows.waves:
        results, after = compute(wave, start[wave.rows])
        output[wave.tokens[wave.places]] = results.flatten(0, 1)[wave.places]
        start[wave.rows] = after
        if states is not None:
            states[wave.blocks] = after[wave.kept]
    return output


@dataclass(frozen=True, slots=True)
class StepStates:
    """One layer's part of a step.

    ``conv`` and ``recurrence`` are its states of all blocks, which are read and written; None while profiling, where
    rows start from nothing and nothing is kept.
    """

    rows: StateMetadata
    conv: torch.Tensor | None = None
    recurrence: torch.Tensor | None = None

    def over_rows(
        self, compute: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], width: int
    ) -> torch.Tensor:
        """float32 [T, width]: what ``compute(rows, *inputs)`` makes of each kind of rows and of its tokens' ``inputs``
        (each [T, ...]); zero for padding."""
        num_tokens, split = len(inputs[0]), self.rows.num_decodes
        parts: list[tuple[Rows, int, int]] = []
        if self.rows.decodes is not None:
            parts.append((self.rows.decodes, 0, split))
        if self.rows.scans is not None:
            parts.append((self.rows.scans, split, split + self.rows.scans.num_tokens))
        if len(parts) == 1 and parts[0][2] == num_tokens:
            return compute(parts[0][0], *inputs)
        output = torch.zeros(num_tokens, width, dtype=torch.float32, device=inputs[0].device)
        for rows, begin, end in parts:
            output[begin:end] = compute(rows, *(tensor[begin:end] for tensor in inputs))
        return output


class RecurrentLayer(UncompiledLayer):
    """A layer whose states, of a convolution and of a recurrence in this order, are kept in the KV cache.

    ``spec`` describes them.
    """

    spec: MambaSpec

    def step_states(self, num_tokens: int, device: torch.device) -> StepStates:
        """Of the step that is being computed. Raises ``RuntimeError`` for metadata of another kind of layer."""
        context = get_forward_context()
        if context.attention_metadata is None:
            return StepStates(whole_row(num_tokens, device))
        metadata = context.attention_metadata.get(self.name)
        if not isinstance(metadata, StateMetadata):
            raise RuntimeError(
                f"the forward context's attention_metadata has {type(metadata).__name__} for layer {self.name!r}; a "
                "recurrent layer needs StateMetadata"
            )
        conv, recurrence = context.states[self.name]
        return StepStates(metadata, conv, recurrence)
