"""Rules of attention backends: contexts that are dealt out among ranks (decode context parallelism).

Ranks take turns in one process: each is given what it would hold, and what they compute is merged in float64.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch.attention_problems import LAYER, AttentionProblem
from hardpoint_testing_torch.attention_ranks import RankShare, merged_exactly, shares, step_answer
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import LONG, MIXED, AttentionRules, assert_near, variant
from hardpoint_testing_torch.step_buffers import HostBlind
from hardpoint_torch_runtime.layers import Partial, SharedContextImpl

__all__ = ["AttentionRankRules"]

Rows = list[tuple[int, int]]

STEPS: dict[str, Rows] = {
    "decodes": [(17, 1), (1, 1), (30, 1), (0, 1), (65, 1)],
    "prefills": [(24, 16), (7, 5), (0, 9), (40, 33)],
    "mixed": MIXED,
}
FEATURES = [
    pytest.param({"uses_sinks": True}, id="sinks"),
    pytest.param({"logits_soft_cap": 3.0}, id="softcap"),
    pytest.param({"uses_row_causality": True}, id="by-row"),
    pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
    pytest.param({"dtype": torch.float16}, id="float16"),
    pytest.param({"num_heads": 4, "num_kv_heads": 1}, id="one-kv-head"),
    pytest.param({"num_heads": 4, "num_kv_heads": 4}, id="as-many-kv-heads"),
    pytest.param({"kv_cache_dtype": "fp8"}, id="fp8"),
]


class AttentionRankRules(AttentionRules):
    @pytest.mark.parametrize("step", STEPS)
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    def test_ranks_make_the_whole(
        self, backend: AttentionBackend, base: AttentionShape, num_ranks: int, step: str
    ) -> None:
        """I5.2, R5.22, R5.91: decodes, chunks of prompts and both together, with one token, a few and more than a block
        dealt out at a time; many rows have nothing on some rank."""
        whole = self.problem(base, STEPS[step])
        if num_ranks == 1:
            self.check(backend, whole)
            return
        for interleave in (1, 3, base.block_size + 1):
            self.check_whole(backend, whole, num_ranks, interleave)

    @pytest.mark.parametrize("feature", FEATURES)
    def test_ranks_make_the_whole_of_other_layers(
        self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, Any]
    ) -> None:
        """R5.83: sinks count once, with the step's own tokens."""
        self.check_whole(backend, self.problem(variant(base, **feature), MIXED), 3, 2)

    def test_ranks_make_the_whole_of_latents(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.12: what all ranks hold anyway, which is what shares are most worth for."""
        for shape in self.latents(backend, base):
            self.check_whole(backend, self.problem(shape, MIXED), 2, 1)

    def check_whole(self, backend: AttentionBackend, whole: AttentionProblem, num_ranks: int, interleave: int) -> None:
        """All ranks' shares and the step's own tokens, merged by log-sum-exp, equal the dense answer."""
        ranks = [self.on_rank(backend, share) for share in shares(whole, num_ranks, interleave)]
        parts = [context for context, _ in ranks if context is not None]
        self.compare(whole, *merged_exactly([*parts, ranks[0][1]]))

    @pytest.mark.parametrize("interleave", [1, 3, 16])
    def test_each_rank_attends_to_its_own_share(
        self, backend: AttentionBackend, base: AttentionShape, interleave: int
    ) -> None:
        """R5.22: as many keys as the step says are on this rank, all of them visible, and no sinks; log-sum-exps are
        natural."""
        whole = self.problem(variant(base, uses_sinks=self.takes_sinks(backend, base)), LONG)
        for share in shares(whole, 3, interleave):
            context, _ = self.on_rank(backend, share)
            assert context is not None, "has_context() is False, although rows have contexts"
            self.compare_part(whole, context, share.answer(), f"rank {share.rank} of 3, {interleave} tokens at a time")

    def test_a_step_sees_its_own_tokens(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.22: without any context, causally, and with the sinks."""
        whole = self.problem(variant(base, uses_sinks=self.takes_sinks(backend, base)), LONG)
        _, step = self.on_rank(backend, shares(whole, 2)[1])
        self.compare_part(whole, step, step_answer(whole), "the step's own tokens")

    def test_a_rank_may_hold_nothing(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.91: contexts that end before the others' turn. Their log-sum-exps are -inf, so that what they return
        weighs nothing."""
        whole = self.problem(base, [(3, 1), (1, 2), (2, 1)])
        for share in shares(whole, 4, 4)[1:]:
            context, _ = self.on_rank(backend, share)
            assert context is not None, f"rank {share.rank} holds nothing, but takes part in what the others exchange"
            assert bool((context.known_lse == -torch.inf).all()), f"the log-sum-exp of no keys is {context.lse}"
        self.check_whole(backend, whole, 4, 4)

    @pytest.mark.parametrize(("rows", "expected"), [([(0, 5), (0, 1)], False), ([(0, 5), (1, 1)], True)], ids=str)
    def test_all_ranks_agree_on_whether_there_is_a_context(
        self, backend: AttentionBackend, base: AttentionShape, rows: Rows, expected: bool
    ) -> None:
        """R5.90: where they did not, those that exchange something would wait for the others for good."""
        for share in shares(self.problem(base, rows), 3, 2):
            impl, metadata = self.prepared(backend, share)
            assert impl.has_context(metadata) is expected, f"rank {share.rank} says otherwise"

    def test_heads_of_several_ranks(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.22: a rank serves the heads of all, which its layer has no number for."""
        whole = self.problem(variant(base, num_heads=2 * base.num_heads), MIXED)
        for share in shares(whole, 2, 2):
            impl, metadata = self.prepared(backend, share, self.problem(base, MIXED))
            context = impl.context_partial(whole.query, share.kv_cache(), metadata, whole.empty_output())
            self.compare_part(whole, context, share.answer(), f"the heads of both ranks on rank {share.rank}")

    def test_a_share_is_no_answer(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """P5.8: whoever forgets the other ranks is told, instead of being given a part of the answer."""
        whole = self.problem(base, [(9, 1), (4, 3)])
        share = shares(whole, 2)[0]
        impl, metadata = self.prepared(backend, share)
        cache, output = share.kv_cache(), whole.empty_output()
        with pytest.raises(RuntimeError):
            impl.forward(whole.query, whole.key, whole.value, cache, metadata, output)
        if backend.returns_lse:
            with pytest.raises(RuntimeError):
                impl.forward_with_lse(whole.query, cache, metadata, output)

    def test_shares_have_to_be_told(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.22: nobody guesses how much of a context is where."""
        whole = self.problem(base, [(9, 1)])
        share = shares(whole, 2)[0]
        self.require_ranks(backend, whole.shape, 2)
        impl = backend.create_impl(whole.params())
        builder = backend.create_builder(share.spec, [LAYER], 8, 64, whole.query.device)
        with pytest.raises(ValueError, match="dcp_local_seq_lens"):
            impl.context_partial(  # type: ignore[attr-defined]
                whole.query, share.kv_cache(), builder.build(whole.common()), whole.empty_output()
            )

    def test_small_shares_after_large_ones(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """I5.5, R5.91, P5.1: nothing is left of longer shares, nor of more rows; padded rows have none (R5.48)."""
        large = shares(self.problem(base, [*LONG, (90, 2), (33, 1)]), 2, 3)[0]
        impl, _ = self.prepared(backend, large)
        builder = backend.create_builder(large.spec, [LAYER], 16, 256, large.whole.query.device)
        builder.build(large.common())
        for padding in (0, 3):
            small = self.problem(base, [(5, 1), (0, 3), (2, 1)], seed=1)
            share = shares(small.padded(padding, num_rows=padding), 2, 3)[0]
            context, step = parts_of(impl, share, builder.build(share.common()))
            assert context is not None
            self.compare_part(small, shortened(context, small), share.answer(), "a small step's contexts")
            self.compare_part(small, shortened(step, small), step_answer(small), "a small step's own tokens")

    def test_building_waits_for_no_device(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.36: also not for how much is on which rank."""
        share = shares(self.problem(base, MIXED), 2)[1]
        self.prepared(backend, share)
        builder = backend.create_builder(share.spec, [LAYER], 64, 512, share.whole.query.device)
        common = share.common()
        blind = {
            each.name: HostBlind.of(value)
            for each in fields(common)
            if isinstance(value := getattr(common, each.name), torch.Tensor)
        }
        builder.build(replace(common, **blind))  # type: ignore[arg-type]

    def on_rank(self, backend: AttentionBackend, share: RankShare) -> tuple[Partial | None, Partial]:
        """What one rank computes: its share of the contexts, if there are any, and the step's own tokens."""
        impl, metadata = self.prepared(backend, share)
        return parts_of(impl, share, metadata)

    def prepared(
        self, backend: AttentionBackend, share: RankShare, layer: AttentionProblem | None = None
    ) -> tuple[Any, Any]:
        """The computation of ``layer``, by default the share's own, and metadata; skips what the backend refuses."""
        layer = layer or share.whole
        self.require_ranks(backend, layer.shape, share.num_ranks)
        impl = backend.create_impl(layer.params())
        assert isinstance(impl, SharedContextImpl), (
            f"{backend.name} accepts contexts dealt out among ranks, but {type(impl).__name__} has no context_partial, "
            "step_partial and has_context"
        )
        builder = backend.create_builder(share.spec, [LAYER], 64, 512, share.whole.query.device)
        return impl, builder.build(share.common())

    def require_ranks(self, backend: AttentionBackend, shape: AttentionShape, num_ranks: int) -> None:
        """Skip the test where contexts of such layers are not dealt out."""
        reason = self.reason(backend, self.need(shape, dcp_size=num_ranks, needs_lse=True))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")

    def takes_sinks(self, backend: AttentionBackend, base: AttentionShape) -> bool:
        return self.reason(backend, self.need(base, uses_sinks=True, dcp_size=3, needs_lse=True)) is None

    def compare_part(
        self, whole: AttentionProblem, part: Partial, expected: tuple[torch.Tensor, torch.Tensor], what: str
    ) -> None:
        """Outputs are compared where a key was seen; without one they may be anything."""
        tolerance = self.tolerance_of(whole.shape)
        lse = part.known_lse.double().cpu()
        assert_near(lse, expected[1], tolerance, f"the log-sum-exp of {what}")
        seen = lse > -torch.inf
        assert_near(part.output.double().cpu()[seen], expected[0][seen], tolerance, f"the output of {what}")


def parts_of(impl: SharedContextImpl, share: RankShare, metadata: Any) -> tuple[Partial | None, Partial]:
    whole = share.whole
    step = impl.step_partial(whole.query, whole.key, whole.value, metadata, whole.empty_output())
    if not impl.has_context(metadata):
        return None, step
    return impl.context_partial(whole.query, share.kv_cache(), metadata, whole.empty_output()), step


def shortened(part: Partial, problem: AttentionProblem) -> Partial:
    """Without padded tokens."""
    return Partial(part.output[: problem.num_tokens], part.lse[: problem.num_tokens])
