"""Conformance tests of the kind ``attention_backend``; inherit and supply the fixture ``backend``.

Every requirement a backend accepts (``refuse`` is None) must be computed correctly; what it refuses is skipped, and the
skip says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, KVWriteMode
from hardpoint_testing_torch.attention_problems import (
    LAYER,
    AttentionProblem,
    AttentionShape,
    dense_attention,
    make_problem,
    run_backend,
)

__all__ = ["AttentionBackendSuite"]

MIXED = [(17, 1), (5, 1), (0, 9), (12, 1), (3, 7), (30, 1)]
"""Three decodes, a first chunk, a later chunk and one more decode; contexts end inside, before and at block ends."""

LONG = [(0, 70), (40, 33), (64, 1), (63, 1), (65, 1), (0, 1)]

SCORE_FEATURES = [
    pytest.param({"logits_soft_cap": 2.0}, id="softcap"),
    pytest.param({"uses_alibi": True}, id="alibi"),
    pytest.param({"uses_sinks": True}, id="sinks"),
    pytest.param({"logits_soft_cap": 5.0, "uses_sinks": True, "sliding_window": 6}, id="softcap-sinks-window"),
]


class AttentionBackendSuite:
    """Tolerances are relative to outputs of order one."""

    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float32: 2e-5,
        torch.bfloat16: 2e-2,
        torch.float16: 2e-3,
    }
    head_sizes: ClassVar[tuple[int, ...]] = (64, 80, 128)

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        raise TypeError(f"{type(self).__name__} must define the fixture 'backend'")

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        """Smallest shape used where nothing else is asked; override for backends with stricter shapes."""
        return AttentionShape()

    def _accepted(self, backend: AttentionBackend, shape: AttentionShape) -> None:
        reason = backend.refuse(shape.need())
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")

    def check(self, backend: AttentionBackend, problem: AttentionProblem) -> None:
        """The backend's output equals the dense float64 answer."""
        self._accepted(backend, problem.shape)
        actual = run_backend(backend, problem).double()
        expected, _ = dense_attention(problem)
        torch.testing.assert_close(
            actual, expected, rtol=self.tolerance[problem.shape.dtype], atol=self.tolerance[problem.shape.dtype]
        )

    @pytest.mark.parametrize(
        "rows", [MIXED, LONG, [(9, 1)], [(0, 1)], [(0, 40)]], ids=["mixed", "long", "decode", "first", "prefill"]
    )
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_equals_the_dense_answer(
        self, backend: AttentionBackend, base: AttentionShape, rows: list[tuple[int, int]], block_size: int
    ) -> None:
        """R5.47, over NaN in every cache entry that no row owns."""
        if not backend.block_sizes(base.need()).accepts(block_size):
            pytest.skip(f"{backend.name} takes no blocks of {block_size}")
        self.check(backend, make_problem(_with(base, block_size=block_size), rows))

    @pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (9, 3)], ids=lambda heads: f"{heads[0]}over{heads[1]}")
    def test_head_groups(self, backend: AttentionBackend, base: AttentionShape, heads: tuple[int, int]) -> None:
        self.check(backend, make_problem(_with(base, num_heads=heads[0], num_kv_heads=heads[1]), MIXED))

    def test_head_sizes(self, backend: AttentionBackend, base: AttentionShape) -> None:
        for head_size in self.head_sizes:
            self.check(backend, make_problem(_with(base, head_size=head_size), MIXED))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dtypes(self, backend: AttentionBackend, base: AttentionShape, dtype: torch.dtype) -> None:
        self.check(backend, make_problem(_with(base, dtype=dtype), MIXED))

    @pytest.mark.parametrize("window", [1, 4, 5, 16, 1000])
    def test_sliding_window(self, backend: AttentionBackend, base: AttentionShape, window: int) -> None:
        for rows in (MIXED, LONG):
            self.check(backend, make_problem(_with(base, sliding_window=window), rows))

    @pytest.mark.parametrize("feature", SCORE_FEATURES)
    def test_score_features(self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]) -> None:
        for rows in (MIXED, LONG):
            self.check(backend, make_problem(_with(base, **feature), rows))

    @pytest.mark.parametrize("window", [None, 6])
    def test_encoder_reads_the_steps_own_keys(
        self, backend: AttentionBackend, base: AttentionShape, window: int | None
    ) -> None:
        """R5.46, R5.44: bidirectional, without a cache."""
        shape = _with(base, kind=AttentionKind.ENCODER_ONLY, causal=False, sliding_window=window)
        self.check(backend, make_problem(shape, [(0, 9), (0, 1), (0, 9), (0, 23)]))

    def test_block_ids_do_not_matter(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """I5.1: blocks."""
        problem = make_problem(base, MIXED)
        torch.testing.assert_close(
            run_backend(backend, problem), run_backend(backend, problem.permuted(7)), rtol=1e-6, atol=1e-6
        )

    def test_padding_does_not_matter(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """I5.1 and R5.48: NaN tokens behind the real ones change nothing."""
        problem = make_problem(base, MIXED)
        torch.testing.assert_close(
            run_backend(backend, problem), run_backend(backend, problem.padded(5)), rtol=1e-6, atol=1e-6
        )

    def test_without_metadata_the_output_is_zero(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.40."""
        problem = make_problem(base, MIXED)
        output = torch.full_like(problem.query, 7.0)
        backend.create_impl(problem.params()).forward(problem.query, problem.key, problem.value, None, None, output)
        assert not output.any()

    def test_writing_touches_exactly_the_addressed_slots(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.71, R5.72: padding has no slot or a negative one, and every other byte stays."""
        if backend.kv_write_mode is not KVWriteMode.SEPARATE:
            pytest.skip(f"{backend.name} writes the cache inside forward")
        problem = make_problem(base, MIXED).padded(3)
        cache = torch.full_like(problem.kv_cache(), 5.0)
        before = cache.clone()
        slots = problem.slot_mapping()[:-1]
        backend.create_impl(problem.params()).write_kv(problem.key, problem.value, cache, slots)
        real = slots[slots >= 0]
        written = torch.zeros(cache.shape[0] * cache.shape[2], dtype=torch.bool)
        written[real] = True
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(by_slot[real], torch.cat((problem.key, problem.value), dim=-1)[: len(real)])
        assert torch.equal(by_slot[~written], before.transpose(1, 2).flatten(0, 1)[~written])

    def test_a_small_build_after_a_large_one_is_as_if_alone(
        self, backend: AttentionBackend, base: AttentionShape
    ) -> None:
        """I5.5, P5.1."""
        large, small = make_problem(base, LONG), make_problem(base, [(6, 1), (0, 3)], seed=1)
        builder = backend.create_builder(large.spec(), [LAYER], len(large.rows), large.num_tokens, torch.device("cpu"))
        for problem in (large, small):
            cache = problem.kv_cache()
            impl = backend.create_impl(problem.params())
            if backend.kv_write_mode is KVWriteMode.SEPARATE:
                impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
            output = torch.full_like(problem.query, torch.nan)
            metadata = builder.build(problem.common())
            impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
            expected, _ = dense_attention(problem)
            tolerance = self.tolerance[base.dtype]
            torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize(
        "feature", [{}, {"uses_sinks": True}, {"sliding_window": 5}], ids=["plain", "sinks", "window"]
    )
    def test_log_sum_exp(self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]) -> None:
        if not backend.returns_lse:
            pytest.skip(f"{backend.name} declares no log-sum-exp")
        problem = make_problem(_with(base, **feature), LONG)
        self._accepted(backend, problem.shape)
        cache, impl = problem.kv_cache(), backend.create_impl(problem.params())
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        builder = backend.create_builder(problem.spec(), [LAYER], 8, 256, torch.device("cpu"))
        output = torch.full_like(problem.query, torch.nan)
        output, lse = impl.forward_with_lse(problem.query, cache, builder.build(problem.common()), output)
        expected, expected_lse = dense_attention(problem)
        tolerance = self.tolerance[base.dtype]
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)

    def test_impossible_head_counts_are_refused(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.12: a reason for people, not an exception."""
        reason = backend.refuse(_with(base, num_heads=5, num_kv_heads=2).need())
        assert reason is not None
        assert "5" in reason


def _with(shape: AttentionShape, **changes: object) -> AttentionShape:
    return replace(shape, **changes)  # type: ignore[arg-type]
