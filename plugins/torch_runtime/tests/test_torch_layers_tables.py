"""Small tables that every rank holds whole."""

from __future__ import annotations

import pytest
import torch

from hardpoint_torch_runtime.layers import EmbeddingTable

CPU = torch.device("cpu")


def test_rows_are_looked_up() -> None:
    table = EmbeddingTable("positions", 5, 3, torch.float32, CPU)
    table.weight.data.copy_(torch.arange(15.0).view(5, 3))
    rows = torch.tensor([4, 0, 4])
    torch.testing.assert_close(table(rows), table.weight[rows])
    assert table(rows[:0]).shape == (0, 3)
    assert not table.weight.requires_grad


def test_the_whole_table_is_stored() -> None:
    table = EmbeddingTable("positions", 5, 3, torch.bfloat16, CPU)
    placement = table.place("weight", None)
    assert placement.stored_shape == (5, 3)
    stored = torch.randn(5, 3)
    placement.target(table.weight).copy_(placement.source(stored))
    torch.testing.assert_close(table.weight.data, stored.bfloat16())
    for wrong in (("bias", None), ("weight", "q")):
        with pytest.raises(KeyError, match="table 'positions' has only a whole 'weight'"):
            table.place(*wrong)
