"""What steps of one shape share, and rows of blocks that a kernel looks up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_cpu.attention_backend import CpuPagedBuilder
from hardpoint_cpu.linear_method import take_over_rows
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_testing_torch import AttentionShape, make_problem
from hardpoint_torch_runtime.layers import GGUFPart, GGUFWeight, StoredWeight, TensorParallel, VocabEmbedding

INPUTS, ROWS = 64, 5


class Stored(LinearMethod):
    """Keeps ``parts`` and looks nothing up itself."""

    def __init__(self, *parts: GGUFPart) -> None:
        self.parts = parts

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None: ...

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("not called")

    def stored(self, layer: torch.nn.Module) -> StoredWeight:
        return GGUFWeight(self.parts, INPUTS, int8_activations=True)

    def release(self, layer: torch.nn.Module) -> None: ...


def embedding(method: LinearMethod | None) -> VocabEmbedding:
    cpu = torch.device("cpu")
    return VocabEmbedding("e", ROWS, INPUTS, TensorParallel(0, 1), torch.float32, cpu, method=method)


def halves(rows: int) -> torch.Tensor:
    """Q8_0 rows: in each block of 34 bytes a scale of one half, then 32 signed bytes."""
    blocks = torch.randint(0, 256, (rows, INPUTS // 32, 34), dtype=torch.uint8)
    blocks[..., :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    return blocks.flatten(1)


def test_rows_of_blocks_are_looked_up_by_a_kernel(best_native: NativeLibrary) -> None:
    table = halves(ROWS)
    layer = embedding(Stored(GGUFPart("Q8_0", table)))
    take_over_rows(layer, best_native)
    signed = table.view(ROWS, -1, 34)[..., 2:].contiguous().view(torch.int8).flatten(1)
    ids = torch.tensor([4, 0, 4])
    assert torch.equal(layer(ids), signed[ids] / 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: embedding(None),
        lambda: embedding(Stored(GGUFPart("IQ2_XS", halves(ROWS)))),
        lambda: embedding(Stored(GGUFPart("Q8_0", halves(2)), GGUFPart("Q8_0", halves(3)))),
    ],
    ids=["dense", "no kernel", "two parts"],
)
def test_other_rows_stay_with_the_embedding(make: Callable[[], VocabEmbedding], best_native: NativeLibrary) -> None:
    layer = make()
    take_over_rows(layer, best_native)
    assert layer.rows is None


def test_metadata_is_built_again_only_where_rows_lie_elsewhere() -> None:
    common = make_problem(AttentionShape(num_heads=2, num_kv_heads=1, head_size=8), [(1, 5), (1, 9)]).common()
    builder = CpuPagedBuilder()
    first = builder.build(common)
    assert builder.build(replace(common, max_seq_len=10, seq_lens_cpu=common.seq_lens_cpu + 1)) is first
    for changes in (
        {"num_rows": 1},
        {"seq_lens": common.seq_lens.clone()},
        {"query_start_loc": common.query_start_loc.clone()},
        {"block_table": common.block_table.clone()},
        {"causal": False},
        {"block_size": common.block_size // 2},
    ):
        before, changed = builder.build(common), replace(common, **changes)
        found = builder.build(changed)
        assert found is not before
        assert found.rows.block_table is changed.block_table
        assert (found.rows.struct.rows, found.rows.struct.causal) == (changed.num_rows, int(changed.causal is True))
        assert found.rows.struct.seq_lens == changed.seq_lens.data_ptr()
