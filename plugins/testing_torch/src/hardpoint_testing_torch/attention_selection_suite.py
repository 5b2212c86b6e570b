"""Rules of attention backends: queries that see selected keys only (sparse attention)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind
from hardpoint_testing_torch.attention_answers_suite import CHOICES, sensible
from hardpoint_testing_torch.attention_problems import AttentionProblem, run_backend, run_impl
from hardpoint_testing_torch.attention_ranks import shares
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import LONG, MIXED, AttentionRules, assert_near, variant
from hardpoint_torch_runtime.layers import SelectedKeysImpl

__all__ = ["AttentionSelectionRules"]

FEATURES = [
    pytest.param({"sliding_window": 6}, id="window"),
    pytest.param({"sliding_window": 4, "keeps_prompt": True}, id="prompt"),
    pytest.param({"chunk_size": 7}, id="chunks"),
    pytest.param({"uses_mm_prefix": True}, id="ranges"),
    pytest.param({"uses_row_causality": True}, id="by-row"),
    pytest.param({"uses_alibi": True}, id="alibi"),
    pytest.param({"uses_sinks": True, "logits_soft_cap": 5.0}, id="sinks-softcap"),
    pytest.param({"kv_cache_dtype": "fp8"}, id="fp8"),
    pytest.param({"kv_cache_dtype": "int8_per_token_head"}, id="int8"),
    pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
    pytest.param({"num_heads": 8, "num_kv_heads": 1}, id="one-kv-head"),
]


class AttentionSelectionRules(AttentionRules):
    @pytest.mark.parametrize("rows", [MIXED, LONG, [(9, 1)], [(0, 40)]], ids=["mixed", "long", "decode", "prefill"])
    def test_only_selected_keys_count(
        self, backend: AttentionBackend, base: AttentionShape, rows: list[tuple[int, int]]
    ) -> None:
        """R5.12, I5.3: a few positions of the row, at random; later ones than the query's among them."""
        self.check(backend, self.selecting(backend, base, rows))

    @pytest.mark.parametrize("count", [1, 4, 64])
    def test_the_best_keys_of_an_index(self, backend: AttentionBackend, base: AttentionShape, count: int) -> None:
        """R5.12: as an index selects them, the ``count`` best keys up to the query's own, of those that it rates above
        zero; -1 where there are fewer."""
        for rows in (MIXED, LONG):
            problem = self.selecting(backend, base, rows)
            draw = torch.Generator().manual_seed(count)

            def best(visible: int, draw: torch.Generator = draw) -> list[int]:
                scores = torch.randn(visible, generator=draw)
                order = scores.topk(min(count, visible)).indices.tolist()
                eligible = [key for key in order if scores[key] > 0]
                return [*eligible, *[-1] * (count - len(eligible))]

            self.check(backend, replace(problem, selected=selection(problem, best)))

    @pytest.mark.parametrize("feature", FEATURES)
    def test_selections_narrow_what_is_visible(
        self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, Any]
    ) -> None:
        """R5.12, R5.45: a selection shows nothing that is invisible without it; a query may be left with nothing."""
        for rows in (MIXED, LONG):
            self.check(backend, self.selecting(backend, variant(base, **feature), rows))

    def test_selections_of_latents(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.12: where sparse attention is at home."""
        for shape in self.latents(backend, base):
            self.check(backend, self.selecting(backend, shape, MIXED))

    def test_order_and_padding_mean_nothing(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """Entries in another order, with negative ones before, between and behind them."""
        problem = self.selecting(backend, base, MIXED)
        assert problem.selected is not None
        blank = torch.full_like(problem.selected, -1)
        spread = torch.stack((blank, problem.selected.flip(1), blank - 6), dim=2).flatten(1)
        answers = [run_backend(backend, replace(problem, selected=each)) for each in (problem.selected, spread)]
        assert_near(answers[1], answers[0], 1e-5, "the same selection in another order, with padding in it")

    def test_a_key_named_twice_counts_once(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """Each third key of the query's row, and of these each second one again."""
        problem = self.selecting(backend, base, MIXED)
        chosen = selection(problem, lambda visible: [*range(0, visible, 3), *range(0, visible, 6)])
        self.check(backend, replace(problem, selected=chosen))

    def test_selected_keys_stay_causal(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.47: the key right behind the query, the row's last one and those beyond its end, beside one that may be
        seen."""
        problem = self.selecting(backend, base, [(17, 1), (5, 1), (0, 9), (3, 7)])
        chosen = selection(problem, lambda visible: [visible, visible + 1, 25, 1000, visible // 2])
        self.check(backend, replace(problem, selected=chosen))

    @pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
    def test_queries_with_nothing_selected(self, backend: AttentionBackend, base: AttentionShape, sinks: bool) -> None:
        """Zeros, for a decode and within a prompt, whether nothing was named or nothing visible; no NaN of 0 / 0."""
        problem = self.selecting(backend, variant(base, uses_sinks=sinks), MIXED)

        def odd(visible: int) -> list[int]:
            return [visible - 1] if visible % 2 else [visible + 3, -1]

        for chosen in (selection(problem, odd), selection(problem, lambda visible: [-1])):
            self.check(backend, replace(problem, selected=chosen))

    def test_selecting_everything_is_plain_attention(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """I5.2: up to the order of additions."""
        for rows in (MIXED, LONG):
            problem = self.selecting(backend, base, rows)
            whole = replace(problem, selected=selection(problem, lambda visible: list(range(visible))))
            plain = replace(problem, selected=None, shape=variant(problem.shape, uses_sparse=False))
            tolerance = self.tolerance_of(base)
            assert_near(run_backend(backend, whole), run_backend(backend, plain), tolerance, "all keys selected")

    def test_each_call_has_a_selection_of_its_own(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """Layers share a step's metadata, and each has an index: nothing of a selection is kept with the metadata, or
        with the layer."""
        problem = self.selecting(backend, base, MIXED)
        cache, impl = problem.kv_cache(), backend.create_impl(problem.params())
        self.write(backend, problem, cache)
        metadata = self.builder(backend, problem).build(problem.common())
        for step in (1, 4, 2):

            def every(visible: int, step: int = step) -> range:
                return range(0, visible, step)

            chosen = replace(problem, selected=selection(problem, every))
            self.compare(chosen, run_impl(impl, chosen, cache, metadata, chosen.empty_output()))

    def test_without_metadata_there_are_zeros(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.40."""
        problem = self.selecting(backend, base, MIXED)
        output = problem.empty_output().fill_(7.0)
        run_impl(backend.create_impl(problem.params()), problem, None, None, output)
        assert not output.any()

    def test_shares_of_contexts_are_not_selected_from(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """P5.8: who asks for both is refused, or the forward raises: a rank knows no positions of its keys."""
        problem = self.selecting(backend, base, [(9, 1)])
        reason = self.reason(backend, self.need(variant(base), dcp_size=2, needs_lse=True))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")
        assert self.reason(backend, self.need(problem.shape, dcp_size=2, needs_lse=True)) is not None
        share = shares(problem, 2)[0]
        impl = backend.create_impl(problem.params())
        metadata = backend.create_builder(share.spec, ["layer"], 8, 64, problem.query.device).build(share.common())
        with pytest.raises(RuntimeError):
            run_impl(impl, problem, share.kv_cache(), metadata, problem.empty_output())

    @pytest.mark.parametrize("kind", [kind for kind in AttentionKind if kind is not AttentionKind.DECODER], ids=str)
    def test_selections_are_among_a_decoders_keys(
        self, backend: AttentionBackend, base: AttentionShape, kind: AttentionKind
    ) -> None:
        """R5.5: positions of a row's keys mean nothing elsewhere, so that other kinds are refused."""
        self.selecting(backend, base, [(9, 1)])
        assert self.reason(backend, self.need(variant(base, kind=kind, uses_sparse=True))) is not None

    @pytest.mark.parametrize("seed", range(2))
    def test_any_layer_whose_selection_is_accepted_is_computed(
        self, backend: AttentionBackend, base: AttentionShape, seed: int
    ) -> None:
        """I5.3: combinations of all else that can be asked for."""
        self.selecting(backend, base, MIXED)
        draw = random.Random(seed)
        for _ in range(25):
            drawn = {name: draw.choice(values) for name, values in CHOICES.items()}
            drawn["kind"] = AttentionKind.DECODER
            shape = variant(base, uses_sparse=True, **drawn)
            if not sensible(drawn) or not backend.block_sizes(self.need(shape)).accepts(shape.block_size):
                continue
            if self.reason(backend, self.need(shape)) is None:
                self.check(backend, self.problem(shape, MIXED, seed))

    def selecting(
        self, backend: AttentionBackend, shape: AttentionShape, rows: Sequence[tuple[int, int]]
    ) -> AttentionProblem:
        """A problem with a selection; skips the test where the backend takes none of such layers."""
        problem = self.problem(variant(shape, uses_sparse=True), rows)
        self.require(backend, problem.shape)
        impl = backend.create_impl(problem.params())
        assert isinstance(impl, SelectedKeysImpl), (
            f"{backend.name} accepts sparse attention, but {type(impl).__name__} has no forward_selected"
        )
        return problem


def selection(problem: AttentionProblem, choose: Callable[[int], Sequence[int]]) -> torch.Tensor:
    """int32 [T, C] of what ``choose`` makes of the number of keys that a causal query sees, padded with -1."""
    visible = [context + index + 1 for context, length in problem.rows for index in range(length)]
    chosen = [list(choose(count)) for count in visible]
    most = max(map(len, chosen), default=0)
    padded = [[*keys, *[-1] * (most - len(keys))] for keys in chosen]
    return torch.tensor(padded, dtype=torch.int32, device=problem.query.device)
