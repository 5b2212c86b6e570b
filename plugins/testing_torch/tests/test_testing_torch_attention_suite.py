"""The suite catches the usual faults: every mutant of a correct backend fails at least one of its tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint_testing_torch import (
    AttentionBackendSuite,
    AttentionProblem,
    AttentionShape,
    dense_attention,
    make_problem,
)


class PlainBuilder(AttentionMetadataBuilder):
    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CommonAttentionMetadata:
        return common


class PlainImpl(AttentionImpl):
    """Row by row, the shortest correct paged attention; knows windows and nothing else."""

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        assert kv_cache is not None
        for row in range(metadata.num_rows):
            begin, end = metadata.query_start_loc_cpu[row : row + 2]
            output[begin:end] = self.row(query[begin:end], kv_cache, metadata, row)
        return output

    def row(self, query: torch.Tensor, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        length = int(metadata.seq_lens_cpu[row])
        blocks = metadata.block_table[row, : -(-length // metadata.block_size)].long()
        states = cache[blocks].transpose(1, 2).flatten(0, 1)[: self.visible_length(length)]
        keys, values = states.float().chunk(2, dim=-1)
        group = self.params.num_heads // self.params.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys.repeat_interleave(group, 1)) * self.params.scale
        positions = torch.arange(length - len(query), length)[:, None]
        distance = positions - torch.arange(len(keys))[None]
        hidden = distance < 0
        if self.params.sliding_window is not None:
            hidden |= distance >= self.params.sliding_window
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).to(query.dtype)

    def visible_length(self, length: int) -> int:
        return length

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        real = (slot_mapping >= 0).nonzero().flatten()
        slots = slot_mapping[real]
        states = torch.cat((key[real], value[real]), dim=-1)
        kv_cache.transpose(1, 2)[slots // kv_cache.shape[2], slots % kv_cache.shape[2]] = states


class PlainBackend(AttentionBackend):
    name = "plain"
    impl: type[PlainImpl] = PlainImpl

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} heads over {need.num_kv_heads}"
        plain = need.kind.value == "decoder" and need.logits_soft_cap is None
        return None if plain and not (need.uses_alibi or need.uses_sinks) else "only plain decoders"

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return BlockSizeRule(multiple_of=1)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        return PlainBuilder()

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return self.impl(params)


class TestPlainBackend(AttentionBackendSuite):
    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return PlainBackend()


class WrongScale(PlainImpl):
    def __init__(self, params: AttentionLayerParams) -> None:
        super().__init__(replace(params, scale=params.scale * 1.05))


class WindowOffByOne(PlainImpl):
    def __init__(self, params: AttentionLayerParams) -> None:
        window = params.sliding_window
        super().__init__(replace(params, sliding_window=None if window is None else window + 1))


class StaleTail(PlainImpl):
    """Reads one entry that belongs to nobody."""

    def visible_length(self, length: int) -> int:
        return length + 1

    def row(self, query: torch.Tensor, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        return super().row(query, cache, metadata, row)


class WrongSlot(PlainImpl):
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        moved = torch.where(slot_mapping >= 0, slot_mapping ^ 1, slot_mapping)
        super().write_kv(key, value, kv_cache, moved)


class WritesPadding(PlainImpl):
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        super().write_kv(key, value, kv_cache, slot_mapping.clamp(min=0))


class NotCausal(PlainImpl):
    def row(self, query: torch.Tensor, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        last = super().row(query[-1:], cache, metadata, row)
        return last.expand_as(query)


MUTANTS = [WrongScale, WindowOffByOne, StaleTail, WrongSlot, WritesPadding, NotCausal]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[PlainImpl]) -> None:
    class Mutated(PlainBackend):
        impl = mutant

    suite, backend, base = AttentionBackendSuite(), Mutated(), AttentionShape()
    mixed = [(17, 1), (5, 1), (0, 9), (12, 1), (3, 7), (30, 1)]

    def run() -> None:
        suite.test_equals_the_dense_answer(backend, base, mixed, 4)
        suite.test_sliding_window(backend, base, 5)
        suite.test_writing_touches_exactly_the_addressed_slots(backend, base)

    with pytest.raises(AssertionError):
        run()


def test_the_oracle_agrees_with_torch_on_a_plain_prompt() -> None:
    problem = make_problem(AttentionShape(num_heads=2, num_kv_heads=2), [(0, 11)])
    expected = torch.nn.functional.scaled_dot_product_attention(
        problem.query.transpose(0, 1)[None],
        problem.key.transpose(0, 1)[None],
        problem.value.transpose(0, 1)[None],
        is_causal=True,
    )
    torch.testing.assert_close(dense_attention(problem)[0].float(), expected[0].transpose(0, 1))


def test_problems_are_what_they_say() -> None:
    problem: AttentionProblem = make_problem(AttentionShape(), [(5, 3), (0, 1)])
    assert problem.num_tokens == 4
    assert problem.slot_mapping().shape == (4,)
    slots = torch.cat([problem.slots(0, 0, 8), problem.slots(1, 0, 1)])
    assert len(set(slots.tolist())) == 9, "no slot belongs to two tokens"
    assert bool((slots >= problem.shape.block_size).all()), "block 0 belongs to nobody"
    assert int(torch.isnan(problem.kv_cache()).sum()) > 0
