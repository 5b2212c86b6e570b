"""Rules of attention backends: which keys a query sees, and what scores are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, KVWriteMode
from hardpoint_testing_torch.attention_problems import LAYER, run_backend
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import LONG, MIXED, AttentionRules, edge_rows, variant

__all__ = ["AttentionMaskRules"]

SCORE_FEATURES = [
    pytest.param({"logits_soft_cap": 2.0}, id="softcap"),
    pytest.param({"uses_alibi": True}, id="alibi"),
    pytest.param({"uses_sinks": True}, id="sinks"),
    pytest.param({"logits_soft_cap": 5.0, "uses_sinks": True, "sliding_window": 6}, id="softcap-sinks-window"),
    pytest.param({"logits_soft_cap": 5.0, "uses_alibi": True, "sliding_window": 6}, id="softcap-alibi-window"),
    pytest.param({"uses_alibi": True, "uses_sinks": True}, id="alibi-sinks"),
    pytest.param({"uses_relative_bias": True}, id="relative-bias"),
    pytest.param({"uses_relative_bias": True, "sliding_window": 6, "uses_sinks": True}, id="relative-window-sinks"),
]
CROSS: dict[str, Any] = {"kind": AttentionKind.ENCODER_DECODER, "causal": False}


class AttentionMaskRules(AttentionRules):
    @pytest.mark.parametrize(
        "rows", [MIXED, LONG, [(9, 1)], [(0, 1)], [(0, 40)]], ids=["mixed", "long", "decode", "first", "prefill"]
    )
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_equals_the_dense_answer(
        self, backend: AttentionBackend, base: AttentionShape, rows: list[tuple[int, int]], block_size: int
    ) -> None:
        """R5.47, over NaN in every cache entry that no row owns."""
        if not backend.block_sizes(self.need(base)).accepts(block_size):
            pytest.skip(f"{backend.name} takes no blocks of {block_size}")
        self.check(backend, self.problem(variant(base, block_size=block_size), rows))

    def test_lengths_around_the_ends_of_blocks(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.47: lengths of 1, and of one token more and less than a block, decoding and in chunks."""
        for size in (4, 16, base.block_size):
            if backend.block_sizes(self.need(base)).accepts(size):
                self.check(backend, self.problem(variant(base, block_size=size), edge_rows(size)))

    @pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (9, 3)], ids=lambda heads: f"{heads[0]}over{heads[1]}")
    def test_head_groups(self, backend: AttentionBackend, base: AttentionShape, heads: tuple[int, int]) -> None:
        """R5.47: GQA ratios."""
        self.check(backend, self.problem(variant(base, num_heads=heads[0], num_kv_heads=heads[1]), MIXED))

    def test_head_sizes(self, backend: AttentionBackend, base: AttentionShape) -> None:
        for head_size in self.head_sizes:
            self.check(backend, self.problem(variant(base, head_size=head_size), MIXED))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dtypes(self, backend: AttentionBackend, base: AttentionShape, dtype: torch.dtype) -> None:
        self.check(backend, self.problem(variant(base, dtype=dtype), MIXED))

    @pytest.mark.parametrize("window", [1, 4, 5, 16, 1000])
    def test_sliding_window(self, backend: AttentionBackend, base: AttentionShape, window: int) -> None:
        for rows in (MIXED, LONG):
            self.check(backend, self.problem(variant(base, sliding_window=window), rows))

    @pytest.mark.parametrize("feature", SCORE_FEATURES)
    def test_score_features(self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]) -> None:
        for rows in (MIXED, LONG):
            self.check(backend, self.problem(variant(base, **feature), rows))

    @pytest.mark.parametrize("chunk", [1, 4, 7, 16])
    def test_chunked_local(self, backend: AttentionBackend, base: AttentionShape, chunk: int) -> None:
        """A query sees its own chunk only; a decode right behind a chunk's end sees itself alone."""
        for rows in (MIXED, LONG):
            self.check(backend, self.problem(variant(base, chunk_size=chunk), rows))

    @pytest.mark.parametrize("window", [1, 5, 16])
    def test_a_window_that_keeps_the_prompt(self, backend: AttentionBackend, base: AttentionShape, window: int) -> None:
        """R5.55: the prompt's keys stay visible behind the window, those between the two do not."""
        for rows in (MIXED, LONG):
            self.check(backend, self.problem(variant(base, sliding_window=window, keeps_prompt=True), rows))

    @pytest.mark.parametrize(
        "feature", [{}, {"sliding_window": 3}, {"uses_sinks": True, "logits_soft_cap": 5.0}], ids=str
    )
    def test_multimodal_ranges(
        self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]
    ) -> None:
        """R5.50, R5.52, P5.4, P5.6: ranges see each other both ways, beyond what causality and windows allow, also
        from the second chunk of a prompt on; they may begin before the step and end behind it."""
        for rows in (MIXED, LONG, [(24, 16), (0, 16), (7, 2)]):
            problem = self.problem(variant(base, uses_mm_prefix=True, **feature), rows)
            assert problem.mm_ranges is not None
            self.check(backend, problem)

    @pytest.mark.parametrize("window", [None, 4])
    def test_causality_by_row(self, backend: AttentionBackend, base: AttentionShape, window: int | None) -> None:
        """R5.23, R5.44: causal and bidirectional rows in one step; the window of the latter looks both ways."""
        for rows in (MIXED, LONG):
            self.check(backend, self.problem(variant(base, uses_row_causality=True, sliding_window=window), rows))

    @pytest.mark.parametrize("kind", [AttentionKind.ENCODER_ONLY, AttentionKind.ENCODER])
    @pytest.mark.parametrize("window", [None, 6])
    def test_encoder_reads_the_steps_own_keys(
        self, backend: AttentionBackend, base: AttentionShape, window: int | None, kind: AttentionKind
    ) -> None:
        """R5.46, R5.44: bidirectional, without a cache."""
        shape = variant(base, kind=kind, causal=False, sliding_window=window)
        self.check(backend, self.problem(shape, [(0, 9), (0, 1), (0, 9), (0, 23)]))

    def test_cross_attention_sees_all_encoder_tokens(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """First steps, which bring the encoder's keys, among decodes, which find them in the cache."""
        shape = variant(base, **CROSS)
        self.check(backend, self.problem(shape, MIXED), self.problem(shape, [(3, 1), (9, 1)]))
        short = self.problem(shape, [(0, 9), (0, 2)], encoder_rows=[(0, 4), (0, 17)])
        self.check(backend, short)

    def test_cross_attention_without_a_cache(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """The encoder's keys of all rows lie one after another, as many as ``seq_lens`` says."""
        problem = self.problem(variant(base, **CROSS), [(0, 3), (0, 1)], encoder_rows=[(0, 5), (0, 14)])
        self.require(backend, problem.shape)
        impl, metadata = backend.create_impl(problem.params()), self.builder(backend, problem).build(problem.common())
        output = problem.empty_output()
        impl.forward(problem.query, problem.key, problem.value, None, metadata, output)
        self.compare(problem, output)

    @pytest.mark.parametrize("feature", [{}, {"num_heads": 1}, {"dtype": torch.bfloat16}, {"block_size": 16}], ids=str)
    def test_latents(self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]) -> None:
        """R5.12: keys that all heads share, with values in them."""
        for shape in self.latents(backend, variant(base, **feature)):
            for rows in (MIXED, LONG):
                self.check(backend, self.problem(shape, rows))

    @pytest.mark.parametrize("own", [{"sliding_window": 5}, {}], ids=["window", "global"])
    def test_a_layers_own_window_wins(
        self, backend: AttentionBackend, base: AttentionShape, own: dict[str, object]
    ) -> None:
        """R5.45, P5.10: layers with and without a window share a group, and so its metadata."""
        layer = self.problem(variant(base, **own), MIXED)
        group = self.problem(variant(base, sliding_window=11), MIXED)
        self.require(backend, layer.shape)
        self.require(backend, group.shape)
        cache, impl, output = layer.kv_cache(), backend.create_impl(layer.params()), layer.empty_output()
        self.write(backend, layer, cache)
        builder = backend.create_builder(group.spec(), [LAYER, "global"], 8, 256, layer.query.device)
        impl.forward(layer.query, layer.key, layer.value, cache, builder.build(layer.common()), output)
        self.compare(layer, output)

    def test_sinks_are_read_at_every_call(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """They are loaded after the layer was made."""
        problem = self.problem(variant(base, uses_sinks=True), MIXED)
        self.require(backend, problem.shape)
        assert problem.sinks is not None
        loaded = problem.sinks.clone()
        problem.sinks.zero_()
        impl, cache, output = backend.create_impl(problem.params()), problem.kv_cache(), problem.empty_output()
        self.write(backend, problem, cache)
        problem.sinks.copy_(loaded)
        metadata = self.builder(backend, problem).build(problem.common())
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        self.compare(problem, output)

    def test_every_block_size_it_takes_is_computed(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.15: all exact sizes of its rule, and the first multiples."""
        rule = backend.block_sizes(self.need(base))
        multiples = () if rule.multiple_of is None else (rule.multiple_of, 3 * rule.multiple_of)
        for size in sorted({*rule.exact, *multiples}):
            if size <= 512:
                self.check(backend, self.problem(variant(base, block_size=size), MIXED))

    def test_without_metadata_the_output_is_zero(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.40."""
        problem = self.problem(base, MIXED)
        output = problem.empty_output().fill_(7.0)
        backend.create_impl(problem.params()).forward(problem.query, problem.key, problem.value, None, None, output)
        assert not output.any()

    def test_the_answer_is_where_it_was_asked_for(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """``forward`` fills the output it is given, and returns it."""
        problem = self.problem(base, MIXED)
        cache, impl, output = problem.kv_cache(), backend.create_impl(problem.params()), problem.empty_output()
        self.write(backend, problem, cache)
        metadata = self.builder(backend, problem).build(problem.common())
        answer = impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        assert answer.data_ptr() == output.data_ptr()
        self.compare(problem, output)

    def test_queries_may_be_parts_of_a_larger_tensor(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.41: one projection makes queries, keys and values side by side; their strides say so."""
        problem = self.problem(base, MIXED)
        heads, kv_heads = base.num_heads, base.num_kv_heads
        joint = torch.cat((problem.query, problem.key, problem.value), dim=1)
        query, key, value = joint.split((heads, kv_heads, kv_heads), dim=1)
        cache, impl, output = problem.kv_cache(), backend.create_impl(problem.params()), problem.empty_output()
        if backend.kv_write_mode is KVWriteMode.SEPARATE:
            impl.write_kv(key, value, cache, problem.slot_mapping())
        impl.forward(query, key, value, cache, self.builder(backend, problem).build(problem.common()), output)
        self.compare(problem, output)

    def test_a_cache_may_be_strided(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.41, P5.2: layers may lie side by side in each block, so that a layer's blocks are further apart."""
        problem = self.problem(base, MIXED)
        dense = problem.kv_cache()
        memory = torch.full((len(dense), 2, *dense.shape[1:]), torch.nan, dtype=dense.dtype, device=dense.device)
        memory[:, 1] = dense
        self.compare(problem, run_backend(backend, problem, memory[:, 1]))
        assert bool(memory[:, 0].isnan().all()), "another layer's memory was written"
