"""Rules of attention backends: what is written into the cache, and how quantized caches are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, KVWriteMode
from hardpoint_testing_torch.attention_problems import AttentionProblem, run_backend
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import LONG, MIXED, AttentionRules, variant

__all__ = ["AttentionCacheRules"]

QUANTIZED = [
    pytest.param({"kv_cache_dtype": "fp8"}, id="e4m3"),
    pytest.param({"kv_cache_dtype": "fp8_e5m2"}, id="e5m2"),
    pytest.param({"kv_cache_dtype": "fp8", "per_head_scales": True}, id="e4m3-by-head"),
    pytest.param({"kv_cache_dtype": "fp8_e5m2", "per_head_scales": True}, id="e5m2-by-head"),
    pytest.param({"kv_cache_dtype": "int8_per_token_head"}, id="int8"),
]
TOGETHER: list[dict[str, Any]] = [
    {"sliding_window": 6, "uses_sinks": True, "logits_soft_cap": 5.0},
    {"uses_alibi": True},
    {"chunk_size": 7},
    {"uses_mm_prefix": True},
    {"dtype": torch.bfloat16},
    {"num_heads": 8, "num_kv_heads": 1, "head_size": 64},
]


class AttentionCacheRules(AttentionRules):
    def test_writing_touches_exactly_the_addressed_slots(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.71, R5.72: padding has no slot or a negative one, and every other byte stays."""
        self.check_writing(backend, self.problem(base, MIXED))

    def test_writing_latents_touches_exactly_the_addressed_slots(
        self, backend: AttentionBackend, base: AttentionShape
    ) -> None:
        """The same, with nothing but keys to write."""
        for shape in self.latents(backend, base):
            self.check_writing(backend, self.problem(shape, MIXED))

    @pytest.mark.parametrize("storage", QUANTIZED)
    def test_writing_quantized_states(
        self, backend: AttentionBackend, base: AttentionShape, storage: dict[str, object]
    ) -> None:
        """R5.71, R5.72: what is stored stands for the nearest values there are, and every other byte stays."""
        problem = self.problem(variant(base, **storage), MIXED)
        self.require(backend, problem.shape)
        self.check_writing(backend, problem)

    @pytest.mark.parametrize("storage", QUANTIZED)
    def test_values_out_of_range_become_the_largest(
        self, backend: AttentionBackend, base: AttentionShape, storage: dict[str, object]
    ) -> None:
        """One large value must not turn into NaN or infinity, which would spoil every later query of its row."""
        problem = self.problem(variant(base, **storage), [(3, 4), (0, 2)])
        self.require(backend, problem.shape)
        problem.key[1, 0, 3], problem.value[2, 0, 1] = 1e5, -1e5
        self.check_writing(backend, problem)

    def check_writing(self, backend: AttentionBackend, problem: AttentionProblem) -> None:
        """``write_kv`` puts what is cached of each token into its slot, and nothing anywhere else."""
        if backend.kv_write_mode is not KVWriteMode.SEPARATE:
            pytest.skip(f"{backend.name} writes the cache inside forward")
        problem = problem.padded(3)
        cache = torch.full_like(problem.kv_cache().float(), 5.0).to(problem.stored.dtype)
        before = by_slot(cache).clone()
        slots = problem.slot_mapping()[:-1]
        backend.create_impl(problem.params()).write_kv(problem.key, problem.value, cache, slots)
        real = slots[slots >= 0]
        untouched = torch.ones(len(before), dtype=torch.bool, device=slots.device)
        untouched[real] = False
        after = by_slot(cache)
        assert torch.equal(after[untouched], before[untouched]), "bytes outside of the addressed slots changed"
        self.check_stored(problem, after[real].view(cache.dtype).cpu(), len(real))

    def check_stored(self, problem: AttentionProblem, states: torch.Tensor, count: int) -> None:
        """``states`` [count, K, width] of the cache stand for the first ``count`` keys and values."""
        stored = problem.stored
        keys, values = problem.key[:count].cpu(), problem.value[:count].cpu()
        if stored.is_exact:
            torch.testing.assert_close(states, stored.encode(keys, values))
            return
        parts = zip(stored.decode(states, problem.shape.head_size), (keys, values), strict=True)
        for (found, real), scale in zip(parts, (stored.key_scale, stored.value_scale), strict=True):
            excess = ((found - real.float()).abs() - stored.largest_error(real, scale)).max()
            assert not bool(found.isnan().any()), "stored values became NaN"
            assert excess <= 0, f"stored values are {float(excess):.3g} further off than {stored.dtype} makes necessary"

    @pytest.mark.parametrize("storage", QUANTIZED)
    def test_quantized_caches(
        self, backend: AttentionBackend, base: AttentionShape, storage: dict[str, object]
    ) -> None:
        """R5.43, R5.10: stored times scale, by tensor, by head, or by head and token; also for this step's tokens."""
        shape = variant(base, **storage)
        self.require(backend, shape)
        for rows in (MIXED, LONG):
            self.check(backend, self.problem(shape, rows))

    @pytest.mark.parametrize("storage", QUANTIZED)
    def test_quantized_caches_with_other_features(
        self, backend: AttentionBackend, base: AttentionShape, storage: dict[str, object]
    ) -> None:
        shapes = [variant(base, **storage, **feature) for feature in TOGETHER]
        for shape in self.accepted(backend, shapes):
            self.check(backend, self.problem(shape, MIXED))

    @pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
    def test_quantized_latents(self, backend: AttentionBackend, base: AttentionShape, name: str) -> None:
        """R5.43: one scale for the latents, and so for the values in them."""
        for shape in self.latents(backend, variant(base, kv_cache_dtype=name)):
            self.check(backend, self.problem(shape, MIXED))

    @pytest.mark.parametrize("storage", QUANTIZED[:2])
    def test_scales_are_read_at_every_call(
        self, backend: AttentionBackend, base: AttentionShape, storage: dict[str, object]
    ) -> None:
        """They are loaded after the layer was made."""
        problem = self.problem(variant(base, **storage), MIXED)
        self.require(backend, problem.shape)
        assert problem.key_scale is not None
        assert problem.value_scale is not None
        loaded = problem.key_scale.clone(), problem.value_scale.clone()
        cache = problem.kv_cache()
        problem.key_scale.fill_(1.0)
        problem.value_scale.fill_(1.0)
        impl = backend.create_impl(problem.params())
        problem.key_scale.copy_(loaded[0])
        problem.value_scale.copy_(loaded[1])
        if backend.kv_write_mode is KVWriteMode.SEPARATE:
            impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        output, metadata = problem.empty_output(), self.builder(backend, problem).build(problem.common())
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        self.compare(problem, output)

    def test_fused_writing_fills_the_cache(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """A backend that declares to write in ``forward`` leaves the step's keys and values in the cache."""
        if backend.kv_write_mode is not KVWriteMode.FUSED:
            pytest.skip(f"{backend.name} writes the cache apart from forward")
        problem = self.problem(base, MIXED)
        cache = problem.kv_cache()
        run_backend(backend, problem, cache)
        states = by_slot(cache)[problem.slot_mapping()].view(cache.dtype).cpu()
        self.check_stored(problem, states, problem.num_tokens)

    @pytest.mark.parametrize("storage", [pytest.param({}, id="as it is"), *QUANTIZED])
    def test_reading_leaves_the_cache_as_it_is(
        self, backend: AttentionBackend, base: AttentionShape, storage: dict[str, object]
    ) -> None:
        """R5.70."""
        if backend.kv_write_mode is not KVWriteMode.SEPARATE:
            pytest.skip(f"{backend.name} writes the cache inside forward")
        problem = self.problem(variant(base, **storage), [(9, 1), (0, 6)])
        self.require(backend, problem.shape)
        cache, impl, output = problem.kv_cache(), backend.create_impl(problem.params()), problem.empty_output()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        before = cache.view(torch.uint8).clone()
        metadata = self.builder(backend, problem).build(problem.common())
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        assert torch.equal(cache.view(torch.uint8), before)


def by_slot(cache: torch.Tensor) -> torch.Tensor:
    """A copy [slots, K, width] of a cache [blocks, K, block size, width], as bytes where elements have one."""
    flat = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return flat.transpose(1, 2).flatten(0, 1)
