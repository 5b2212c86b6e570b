"""Conformance of the plugin kind ``attention_backend``: derive from :class:`AttentionBackendSuite` and name yours.

Every requirement a backend accepts (``refuse`` is None) must be computed correctly; what it refuses is skipped, and the
skip says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, AttentionNeed, BlockSizeRule, KVWriteMode
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.attention_oracle import dense_attention
from hardpoint_testing_torch.attention_problems import LAYER, AttentionProblem, make_problem, run_backend
from hardpoint_testing_torch.attention_shape import AttentionShape

__all__ = ["AttentionBackendSuite"]

BLOCK_SIZES_CAPABILITY = "block_sizes"
MIXED = [(17, 1), (5, 1), (0, 9), (12, 1), (3, 7), (30, 1)]
"""Three decodes, a first chunk, a later chunk and one more decode; contexts end inside, before and at block ends."""

LONG = [(0, 70), (40, 33), (64, 1), (63, 1), (65, 1), (0, 1)]

SCORE_FEATURES = [
    pytest.param({"logits_soft_cap": 2.0}, id="softcap"),
    pytest.param({"uses_alibi": True}, id="alibi"),
    pytest.param({"uses_sinks": True}, id="sinks"),
    pytest.param({"logits_soft_cap": 5.0, "uses_sinks": True, "sliding_window": 6}, id="softcap-sinks-window"),
]


STRANGE_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "a dtype nobody has": {"dtype": "float3_of_nobody", "kv_cache_dtype": "float3_of_nobody"},
    "a KV dtype nobody has": {"kv_cache_dtype": "float3_of_nobody"},
    "heads that do not divide": {"num_heads": 5, "num_kv_heads": 2},
}
"""Nobody can compute these, so accepting one of them means not to have looked."""

RARE_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "a device nobody has": {"device": DeviceDescription(device_type="abacus", name="an abacus")},
    "latent attention": {"uses_mla": True},
    "cross-attention": {"kind": AttentionKind.ENCODER_DECODER},
    "an 8-bit cache": {"kv_cache_dtype": "float8_e4m3fn"},
    "a head size of 3": {"head_size": 3},
    "head size 1024": {"head_size": 1024},
    "no block size yet": {"block_size": None},
    "batch invariance": {"batch_invariant": True},
}


class AttentionBackendSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.attention.AttentionBackend`.

    Set ``plugin`` to the name of an installed backend, or override the fixture ``backend``. Tolerances are relative to
    outputs of order one. ``latent_sizes`` are sizes of keys and of the values in them, for backends with latents (MLA).
    """

    kind: ClassVar[str] = "attention_backend"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    head_sizes: ClassVar[tuple[int, ...]] = (64, 80, 128)
    latent_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((24, 16), (576, 512))

    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        """The backend under test, as its factory makes it."""
        made: AttentionBackend = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        if self.plugin is not None:
            declared = self.runtime().load_factory(self.kind, self.plugin).declaration
            answer = declared.probe() if declared.probe is not None else None
            if answer is not None and answer.status is not ProbeStatus.AVAILABLE:
                pytest.skip(f"{self.plugin} is {answer.status} here: {answer.reason}")
        return self.create_backend(self.context(WorkerContext, rank=0, device=torch.device("cpu")))

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        """Smallest shape used where nothing else is asked; override for backends with stricter shapes."""
        return AttentionShape()

    def _accepted(self, backend: AttentionBackend, shape: AttentionShape) -> None:
        reason = backend.objection(shape.need())
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

    @pytest.mark.parametrize("feature", [{}, {"num_heads": 1}, {"dtype": torch.bfloat16}, {"block_size": 16}], ids=str)
    def test_latents(self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]) -> None:
        """R5.12: keys that all heads share, with values in them."""
        for shape in self.latents(backend, _with(base, **feature)):
            for rows in (MIXED, LONG):
                self.check(backend, make_problem(shape, rows))

    def latents(self, backend: AttentionBackend, base: AttentionShape) -> list[AttentionShape]:
        """The shapes of ``latent_sizes`` that the backend accepts; skips the test where there is none."""
        shapes = [_with(base, num_kv_heads=1, head_size=size, latent_values=part) for size, part in self.latent_sizes]
        accepted = [shape for shape in shapes if backend.objection(shape.need()) is None]
        if not accepted:
            pytest.skip(f"{backend.name}: {backend.objection(shapes[0].need()) if shapes else 'no latent_sizes given'}")
        return accepted

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
        output = problem.empty_output().fill_(7.0)
        backend.create_impl(problem.params()).forward(problem.query, problem.key, problem.value, None, None, output)
        assert not output.any()

    def test_writing_touches_exactly_the_addressed_slots(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.71, R5.72: padding has no slot or a negative one, and every other byte stays."""
        self.check_writing(backend, make_problem(base, MIXED))

    def test_writing_latents_touches_exactly_the_addressed_slots(
        self, backend: AttentionBackend, base: AttentionShape
    ) -> None:
        """The same, with nothing but keys to write."""
        for shape in self.latents(backend, base):
            self.check_writing(backend, make_problem(shape, MIXED))

    def check_writing(self, backend: AttentionBackend, problem: AttentionProblem) -> None:
        """``write_kv`` puts what is cached of each token into its slot, and nothing anywhere else."""
        if backend.kv_write_mode is not KVWriteMode.SEPARATE:
            pytest.skip(f"{backend.name} writes the cache inside forward")
        problem = problem.padded(3)
        cache = torch.full_like(problem.kv_cache(), 5.0)
        before = cache.clone()
        slots = problem.slot_mapping()[:-1]
        backend.create_impl(problem.params()).write_kv(problem.key, problem.value, cache, slots)
        real = slots[slots >= 0]
        written = torch.zeros(cache.shape[0] * cache.shape[2], dtype=torch.bool)
        written[real] = True
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        expected = problem.stored.encode(problem.key, problem.value)[: len(real)]
        torch.testing.assert_close(by_slot[real], expected)
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
        self._accepted(backend, _with(base, **feature))
        self.check_log_sum_exp(backend, make_problem(_with(base, **feature), LONG))

    def test_log_sum_exp_of_latents(self, backend: AttentionBackend, base: AttentionShape) -> None:
        for shape in self.latents(backend, base):
            self.check_log_sum_exp(backend, make_problem(shape, LONG))

    def check_log_sum_exp(self, backend: AttentionBackend, problem: AttentionProblem) -> None:
        """Output and log-sum-exp equal the dense answers, all keys being in the cache."""
        if not backend.returns_lse:
            pytest.skip(f"{backend.name} declares no log-sum-exp")
        cache, impl = problem.kv_cache(), backend.create_impl(problem.params())
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        builder = backend.create_builder(problem.spec(), [LAYER], 8, 256, torch.device("cpu"))
        output = problem.empty_output()
        output, lse = impl.forward_with_lse(problem.query, cache, builder.build(problem.common()), output)
        expected, expected_lse = dense_attention(problem)
        tolerance = self.tolerance[problem.shape.dtype]
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)

    def test_log_sum_exp_is_declared_if_it_is_there(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """The other way round: what is not declared raises ``TypeError`` instead of returning something."""
        if backend.returns_lse:
            pytest.skip(f"{backend.name} declares a log-sum-exp")
        problem = make_problem(base, [(0, 3)])
        impl = backend.create_impl(problem.params())
        with pytest.raises(TypeError):
            impl.forward_with_lse(problem.query, problem.kv_cache(), problem.common(), torch.empty_like(problem.query))

    def test_fused_writing_fills_the_cache(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """A backend that declares to write in ``forward`` leaves the step's keys and values in the cache."""
        if backend.kv_write_mode is not KVWriteMode.FUSED:
            pytest.skip(f"{backend.name} writes the cache apart from forward")
        problem = make_problem(base, MIXED)
        cache = problem.kv_cache()
        run_backend(backend, problem, cache)
        by_slot = cache.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(by_slot[problem.slot_mapping()], problem.stored.encode(problem.key, problem.value))

    def test_every_block_size_it_takes_is_computed(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.15: all exact sizes of its rule, and the first multiples."""
        rule = backend.block_sizes(base.need())
        multiples = () if rule.multiple_of is None else (rule.multiple_of, 3 * rule.multiple_of)
        sizes = [size for size in {*rule.exact, *multiples} if size <= 512]
        for size in sizes:
            self.check(backend, make_problem(_with(base, block_size=size), MIXED))

    def test_it_declares_the_block_sizes_it_takes(
        self, backend: AttentionBackend, base: AttentionShape, declaration: PluginDeclaration
    ) -> None:
        """The launcher aligns blocks by the declaration, the worker by the backend: both must say the same."""
        stated = declaration.capabilities.get(BLOCK_SIZES_CAPABILITY)
        if stated is None:
            pytest.skip(f"{backend.name} declares no {BLOCK_SIZES_CAPABILITY!r}; the launcher then leaves it out")
        declared = BlockSizeRule(stated.get("multiple_of"), tuple(stated.get("exact", ())))
        real = backend.block_sizes(base.need())
        differ = [size for size in range(1, 513) if declared.accepts(size) != real.accepts(size)]
        assert not differ, f"declared: {declared}; block_sizes(): {real}; they differ for {differ[:8]}"

    def test_it_declares_what_it_can_do(
        self, backend: AttentionBackend, base: AttentionShape, declaration: PluginDeclaration
    ) -> None:
        """Capabilities that doctor shows agree with the answers, in both directions."""
        declared = declaration.capabilities
        answers: dict[str, Any] = {
            "returns_lse": backend.returns_lse,
            "kv_write_mode": str(backend.kv_write_mode),
            "batch_invariant": self.reason(backend, replace(base.need(), batch_invariant=True)) is None,
            "kinds": [
                str(kind) for kind in AttentionKind if self.reason(backend, replace(base.need(), kind=kind)) is None
            ],
            "mla": self.reason(backend, replace(base.need(), num_kv_heads=1, uses_mla=True)) is None,
        }
        for key in answers.keys() & declared.keys():
            stated = sorted(declared[key]) if key == "kinds" else declared[key]
            real = sorted(answers[key]) if key == "kinds" else answers[key]
            assert stated == real, f"capability {key!r} is declared as {stated}, the backend answers {real}"

    @pytest.mark.parametrize("name", STRANGE_NEEDS)
    def test_impossible_needs_are_refused(self, backend: AttentionBackend, base: AttentionShape, name: str) -> None:
        """R5.5: refusing at start is what keeps an unsupported combination out of the first forward."""
        reason = self.reason(backend, replace(base.need(), **STRANGE_NEEDS[name]))
        assert reason is not None, f"{backend.name} accepts {name}"

    @pytest.mark.parametrize("name", RARE_NEEDS)
    def test_rare_needs_get_an_answer(self, backend: AttentionBackend, base: AttentionShape, name: str) -> None:
        """None or a reason, the same each time."""
        need = replace(base.need(), **RARE_NEEDS[name])
        assert self.reason(backend, need) == self.reason(backend, need), "refuse() is no pure function of its argument"

    def reason(self, backend: AttentionBackend, need: AttentionNeed) -> str | None:
        """The backend's answer, which must be None or words for people."""
        answer = backend.objection(need)
        assert answer is None or (isinstance(answer, str) and answer.strip()), f"refuse() answers {answer!r}"
        return answer

    def test_batch_invariance_is_kept_where_it_is_accepted(
        self, backend: AttentionBackend, base: AttentionShape
    ) -> None:
        """Equal bits for a row whatever its neighbors, if the backend accepts the need for it."""
        reason = self.reason(backend, replace(base.need(), batch_invariant=True))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")
        together = make_problem(base, LONG)
        outputs = run_backend(backend, together).split([query for _, query in LONG])
        for row, output in enumerate(outputs):
            assert torch.equal(run_backend(backend, together.alone(row)), output), f"row {row} depends on its neighbors"

    def test_its_probe_answers(self, declaration: PluginDeclaration) -> None:
        """Available, absent or broken, with a reason; asking twice changes nothing."""
        if declaration.probe is None:
            pytest.skip("the backend declares no probe: it is taken to be available")
        answer = declaration.probe()
        assert isinstance(answer, ProbeResult), f"probe() answers {answer!r}"
        assert answer.reason.strip(), "a probe gives a reason, also for being available"
        assert declaration.probe().status is answer.status
        assert answer.status is not ProbeStatus.BROKEN, answer.reason

    def test_impossible_head_counts_are_refused(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.12: a reason for people, not an exception."""
        reason = backend.objection(_with(base, num_heads=5, num_kv_heads=2).need())
        assert reason is not None
        assert "5" in reason


def _with(shape: AttentionShape, **changes: object) -> AttentionShape:
    return replace(shape, **changes)  # type: ignore[arg-type]
