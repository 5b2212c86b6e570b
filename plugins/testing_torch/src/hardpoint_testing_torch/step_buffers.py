"""A step's tensors as a runner keeps them: in place from step to step, and out of the host's sight.

Legend: R rows, B blocks per row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hardpoint.interfaces.attention import CommonAttentionMetadata
from hardpoint_testing_torch.attention_problems import AttentionProblem

__all__ = ["HostBlind", "StepBuffers"]

READS = frozenset(
    [
        *("item", "numpy", "cpu", "tolist", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("__contains__", "nonzero", "argwhere", "unique", "masked_select", "is_nonzero", "equal", "allclose"),
    ]
)
"""What makes a host wait until a device has computed a value or a shape."""


class HostBlind(torch.Tensor):
    """Lies on the CPU and behaves as if it did not: whatever would wait for a device raises ``AssertionError``."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostBlind:
        """The same memory."""
        blind: HostBlind = tensor.as_subclass(cls)
        return blind

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        counts = (*args[1:2], kwargs.get("repeats"))
        if name in READS or (name == "repeat_interleave" and isinstance(counts[0], torch.Tensor)):
            raise AssertionError(f"building reads a tensor of the device with {name}(); use the host's copy of it")
        if name == "to" and "cpu" in map(str, (*args[1:], *kwargs.values())):
            raise AssertionError("building copies a tensor of the device to the host; use the host's copy of it")
        if name == "__getitem__" and _has_mask(args[1]):
            raise AssertionError("building indexes by a mask, whose size only the device knows")
        return super().__torch_function__(func, types, args, kwargs)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


class StepBuffers:
    """Room for steps of up to ``rows`` decodes, with ``columns`` blocks each."""

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.block_size = block_size
        self.query_start_loc = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((rows,), -1, device=device)

    def common(self, problem: AttentionProblem) -> CommonAttentionMetadata:
        """The step of ``problem`` for a graph of all rows: those it lacks are empty and of the null block.

        What the host says of it holds for all such steps. Raises ``ValueError`` for rows of more than one query.
        """
        if any(query != 1 for _, query in problem.rows) or len(problem.rows) > self.rows:
            raise ValueError(f"{problem.rows} are not up to {self.rows} decodes")
        common = problem.padded(0, num_rows=self.rows - len(problem.rows)).common()
        self.query_start_loc.copy_(common.query_start_loc)
        self.seq_lens.copy_(common.seq_lens)
        self.block_table.zero_()[:, : common.block_table.shape[1]] = common.block_table
        self.slot_mapping.fill_(-1)[: len(common.slot_mapping)] = common.slot_mapping
        return replace(
            common,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            max_seq_len=self.block_table.shape[1] * self.block_size,
            for_graph=True,
        )

    def addresses(self) -> set[int]:
        """Where the buffers lie."""
        parts = (self.query_start_loc, self.seq_lens, self.block_table, self.slot_mapping)
        return {part.untyped_storage().data_ptr() for part in parts}
