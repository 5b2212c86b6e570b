"""The rules for selected keys and for contexts that ranks share have mutants of a correct backend, and each fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hardpoint.interfaces.attention import (
    AttentionImpl,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import AttentionBackendSuite, PlainAttention, PlainAttentionBackend
from hardpoint_torch_runtime.layers import Partial

Metadata = CommonAttentionMetadata
Answer = tuple[torch.Tensor, torch.Tensor]

WHOLE = "test_ranks_make_the_whole"
FEATURES = "test_ranks_make_the_whole_of_other_layers"
SHARE = "test_each_rank_attends_to_its_own_share"


class CountsTheStep(PlainAttention):
    """Takes what will be on this rank for what is."""

    def local_lengths(self, metadata: Metadata) -> np.ndarray:
        return super().local_lengths(metadata) + 1


class LosesTheLast(PlainAttention):
    def local_lengths(self, metadata: Metadata) -> np.ndarray:
        return np.maximum(super().local_lengths(metadata) - 1, 0)


class TakesContextsForItsOwn(PlainAttention):
    """Reads as much as all ranks hold together."""

    def local_lengths(self, metadata: Metadata) -> np.ndarray:
        lengths = super().local_lengths(metadata)
        wanted: np.ndarray = metadata.seq_lens_cpu - np.diff(metadata.query_start_loc_cpu)
        return wanted if lengths.any() else lengths


class BoundsByAnotherInterleave(PlainAttention):
    """As if one token were dealt out at a time, among the three ranks that the rule has."""

    def local_lengths(self, metadata: Metadata) -> np.ndarray:
        contexts = metadata.seq_lens_cpu - np.diff(metadata.query_start_loc_cpu)
        return np.minimum(super().local_lengths(metadata), -(-contexts // 3))


class LooksBackInContexts(PlainAttention):
    """Keeps the share causal, as if its last key were the query's own."""

    def is_causal(self, metadata: Metadata, row: int) -> bool:
        return True


class SeesTheWholeStep(PlainAttention):
    def step_partial(self, *given: Any) -> Partial:
        query, key, value, metadata, output = given
        return super().step_partial(query, key, value, replace(metadata, causal=False), output)


class NoLogSumExp(PlainAttention):
    """Leaves the correction out: all ranks weigh the same."""

    def context_partial(self, *given: Any) -> Partial:
        partial = super().context_partial(*given)
        return Partial(partial.output, partial.lse.clamp(-1e9, 1e9).mul(0))


class BinaryLogarithm(PlainAttention):
    def context_partial(self, *given: Any) -> Partial:
        partial = super().context_partial(*given)
        return Partial(partial.output, partial.lse / torch.log(torch.tensor(2.0)))


class SinksOnEveryRank(PlainAttention):
    def without_sinks(self) -> PlainAttention:
        return self


class SinksOfNobody(PlainAttention):
    def step_partial(self, *given: Any) -> Partial:
        other = self.without_sinks()
        return PlainAttention.step_partial(other, *given)


class EmptySharesWeigh(PlainAttention):
    """Zero is a fair log-sum-exp for one key, and not for none."""

    def context_partial(self, *given: Any) -> Partial:
        partial = super().context_partial(*given)
        return Partial(partial.output, torch.where(partial.lse == -torch.inf, 0.0, partial.lse))


class DecidesByItsShare(PlainAttention):
    def has_context(self, metadata: Metadata) -> bool:
        return bool(self.local_lengths(metadata).any())


class AlwaysExchanges(PlainAttention):
    def has_context(self, metadata: Metadata) -> bool:
        return True


class HeadsRankByRank(PlainAttention):
    """Takes the heads of several ranks for those of one after those of the other."""

    def attend(self, query: torch.Tensor, *rest: torch.Tensor) -> Answer:
        heads, kv_heads = query.shape[1], self.params.num_kv_heads
        ranks = heads // self.params.num_heads
        order = torch.arange(heads).view(ranks, kv_heads, -1).transpose(0, 1).flatten()
        output, lse = super().attend(query[:, order], *rest)
        back = order.argsort()
        return output[:, back], lse[:, back]


class AnswersAlone(PlainAttention):
    def require_whole(self, metadata: Metadata) -> None:
        """Whatever this rank has will do."""


class GuessesShares(PlainAttention):
    def local_lengths(self, metadata: Metadata) -> np.ndarray:
        known = metadata.dcp_local_seq_lens_cpu
        return metadata.seq_lens_cpu // 2 if known is None else known


RANK_FAULTS: dict[type[PlainAttention], str] = {
    CountsTheStep: WHOLE,
    LosesTheLast: WHOLE,
    TakesContextsForItsOwn: WHOLE,
    BoundsByAnotherInterleave: SHARE,
    LooksBackInContexts: FEATURES,
    SeesTheWholeStep: "test_a_step_sees_its_own_tokens",
    NoLogSumExp: WHOLE,
    BinaryLogarithm: SHARE,
    SinksOnEveryRank: FEATURES,
    SinksOfNobody: FEATURES,
    EmptySharesWeigh: "test_a_rank_may_hold_nothing",
    DecidesByItsShare: "test_all_ranks_agree_on_whether_there_is_a_context",
    AlwaysExchanges: "test_all_ranks_agree_on_whether_there_is_a_context",
    HeadsRankByRank: "test_heads_of_several_ranks",
    AnswersAlone: "test_a_share_is_no_answer",
    GuessesShares: "test_shares_have_to_be_told",
}


class IgnoresTheSelection(PlainAttention):
    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return torch.ones(len(selected), num_keys, dtype=torch.bool)


class OffByOne(PlainAttention):
    """Counts positions from 1 on."""

    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return super().chosen(selected - 1, num_keys)


class NextKeys(PlainAttention):
    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return super().chosen(torch.where(selected < 0, selected, selected + 1), num_keys)


class PaddingIsTheFirstKey(PlainAttention):
    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return super().chosen(selected.clamp(min=0), num_keys)


class PaddingIsTheLastKey(PlainAttention):
    """As indices do that count from the end."""

    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return super().chosen(torch.where(selected < 0, num_keys - 1, selected), num_keys)


class StopsAtPadding(PlainAttention):
    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        is_over = (selected < 0).cumsum(dim=1) > 0
        return super().chosen(torch.where(is_over, -1, selected), num_keys)


class CutsAtTheEnd(PlainAttention):
    """Positions beyond the row's end become its last key."""

    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return super().chosen(selected.clamp(max=num_keys - 1), num_keys)


class OneSelectionPerRow(PlainAttention):
    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        return super().chosen(selected[-1:].expand_as(selected), num_keys)


class SelectedAreVisible(PlainAttention):
    """What the index names is seen, whatever causality and windows say."""

    def forward_selected(self, *given: Any) -> torch.Tensor:
        query, key, value, cache, metadata, *rest = given
        free = self if metadata is None else type(self)(replace(self.params, sliding_window=None, chunk_size=None))
        changed = None if metadata is None else replace(metadata, causal=False, mm_ranges=None)
        changed_call = (query, key, value, cache, changed, *rest)
        return PlainAttention.forward_selected(free, *changed_call)


class ForgetsWindows(PlainAttention):
    def forward_selected(self, *given: Any) -> torch.Tensor:
        free = PlainAttention(replace(self.params, sliding_window=None))
        return free.forward_selected(*given)


class GathersTwice(PlainAttention):
    """Weighs a key as often as it is named."""

    def _rows(self, *given: Any) -> torch.Tensor:
        self.selected = given[5] if len(given) > 5 else None
        return super()._rows(*given)

    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        self.times = (selected[:, :, None] == torch.arange(num_keys)).sum(1)
        return super().chosen(selected, num_keys)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> Answer:
        most = 1 if self.selected is None else int(self.times.max())
        repeated = [visible & (self.times > time) for time in range(most)] if most > 1 else [visible]
        return super().attend(query, keys.repeat(most, 1, 1), values.repeat(most, 1, 1), torch.cat(repeated, dim=1))


class KeepsTheFirstSelection(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        super().__init__(params)
        self.kept: torch.Tensor | None = None

    def forward_selected(self, *given: Any) -> torch.Tensor:
        self.kept = given[5] if self.kept is None else self.kept
        changed_call = (*given[:5], self.kept, given[6])
        return super().forward_selected(*changed_call)


class NothingMeansAll(PlainAttention):
    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        chosen = super().chosen(selected, num_keys)
        return chosen | ~chosen.any(dim=1, keepdim=True)


class NothingIsNaN(PlainAttention):
    def attend(self, *given: torch.Tensor) -> Answer:
        output, lse = super().attend(*given)
        return torch.where(lse[..., None] == -torch.inf, torch.nan, output), lse


class SelectsFromShares(PlainAttention):
    def forward_selected(self, *given: Any) -> torch.Tensor:
        metadata = None if given[4] is None else replace(given[4], dcp_local_seq_lens=None)
        changed_call = (*given[:4], metadata, *given[5:])
        return super().forward_selected(*changed_call)


class LeavesOutputWithoutMetadata(PlainAttention):
    def forward_selected(self, *given: Any) -> torch.Tensor:
        output: torch.Tensor = given[6]
        return output if given[4] is None else super().forward_selected(*given)


SELECTION_FAULTS: dict[type[PlainAttention], str] = {
    IgnoresTheSelection: "test_only_selected_keys_count",
    OffByOne: "test_the_best_keys_of_an_index",
    NextKeys: "test_only_selected_keys_count",
    PaddingIsTheFirstKey: "test_the_best_keys_of_an_index",
    PaddingIsTheLastKey: "test_the_best_keys_of_an_index",
    StopsAtPadding: "test_order_and_padding_mean_nothing",
    CutsAtTheEnd: "test_selected_keys_stay_causal",
    OneSelectionPerRow: "test_only_selected_keys_count",
    SelectedAreVisible: "test_selected_keys_stay_causal",
    ForgetsWindows: "test_selections_narrow_what_is_visible",
    GathersTwice: "test_a_key_named_twice_counts_once",
    KeepsTheFirstSelection: "test_each_call_has_a_selection_of_its_own",
    NothingMeansAll: "test_queries_with_nothing_selected",
    NothingIsNaN: "test_queries_with_nothing_selected",
    SelectsFromShares: "test_shares_of_contexts_are_not_selected_from",
    LeavesOutputWithoutMetadata: "test_without_metadata_there_are_zeros",
}


class SharesBuilder(AttentionMetadataBuilder):
    """The common metadata, with shares that are at least as long as those of any step before."""

    def __init__(self) -> None:
        self.kept = np.zeros(64, dtype=np.int32)

    def build(self, common: Metadata, *, fast: bool = False) -> Metadata:
        local = common.dcp_local_seq_lens_cpu
        if local is None:
            return common
        self.kept[: len(local)] = np.maximum(self.kept[: len(local)], local)
        return replace(common, dcp_local_seq_lens_cpu=self.kept[: len(local)].copy())


class WaitingBuilder(AttentionMetadataBuilder):
    def build(self, common: Metadata, *, fast: bool = False) -> Metadata:
        if common.dcp_local_seq_lens is not None:
            common.dcp_local_seq_lens.cpu()
        return common


class KeepsLongerShares(PlainAttentionBackend):
    builder: ClassVar[type[AttentionMetadataBuilder]] = SharesBuilder

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        return self.builder()


class WaitsForTheDevice(KeepsLongerShares):
    builder = WaitingBuilder


class PromisesOnly(PlainAttentionBackend):
    """Accepts what its computation has no methods for."""

    class Bare(AttentionImpl):
        def forward(self, *given: Any) -> torch.Tensor:
            raise TypeError("not even this")

        def write_kv(self, *given: Any) -> None:
            raise TypeError("not even this")

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return self.Bare()


class SelectsEverywhere(PlainAttentionBackend):
    def refuse(self, need: AttentionNeed) -> str | None:
        return super().refuse(replace(need, uses_sparse=False))


BACKEND_FAULTS: list[tuple[type[PlainAttentionBackend], str]] = [
    (KeepsLongerShares, "test_small_shares_after_large_ones"),
    (WaitsForTheDevice, "test_building_waits_for_no_device"),
    (PromisesOnly, "test_a_rank_may_hold_nothing"),
    (PromisesOnly, "test_selecting_everything_is_plain_attention"),
    (SelectsEverywhere, "test_selections_are_among_a_decoders_keys"),
    (SelectsEverywhere, "test_shares_of_contexts_are_not_selected_from"),
]


def failures(backend_class: type[PlainAttentionBackend], rule: str) -> set[str]:
    class Mutated(AttentionBackendSuite):
        @pytest.fixture
        def backend(self) -> PlainAttentionBackend:
            return backend_class()

    return set(run_suite(Mutated, only=rule).failed)


def of_kernel(mutant: type[PlainAttention]) -> type[PlainAttentionBackend]:
    class Mutated(PlainAttentionBackend):
        impl = mutant

    return Mutated


@pytest.mark.slow
@pytest.mark.parametrize("mutant", RANK_FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_share_fails(mutant: type[PlainAttention]) -> None:
    """I5.2, R5.22, R5.90, R5.91, P5.8: lengths, interleave, log-sum-exps, sinks and heads."""
    assert RANK_FAULTS[mutant] in failures(of_kernel(mutant), RANK_FAULTS[mutant])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SELECTION_FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_selection_fails(mutant: type[PlainAttention]) -> None:
    """R5.12, I5.3: ignored, moved by one, padded, counted twice, seen through causality or kept from another call."""
    assert SELECTION_FAULTS[mutant] in failures(of_kernel(mutant), SELECTION_FAULTS[mutant])


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "rule"), BACKEND_FAULTS, ids=lambda each: getattr(each, "__name__", each))
def test_a_wrong_backend_fails(mutant: type[PlainAttentionBackend], rule: str) -> None:
    """R5.5, R5.36, I5.5: metadata and promises."""
    assert rule in failures(mutant, rule)


@pytest.mark.slow
def test_a_few_of_them_fail_quickly() -> None:
    """The fault of each kind that is easiest to make; all of them are among the slow tests."""
    for mutant, rule in ((LosesTheLast, WHOLE), (NoLogSumExp, WHOLE), (OffByOne, SELECTION_FAULTS[OffByOne])):
        assert rule in failures(of_kernel(mutant), rule), mutant.__name__
