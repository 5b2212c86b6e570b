"""Rules of attention backends: log-sum-exps, and partial results put together by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch.attention_problems import AttentionProblem
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import LONG, AttentionRules, variant

__all__ = ["AttentionLseRules"]

FEATURES = [
    pytest.param({}, id="plain"),
    pytest.param({"uses_sinks": True}, id="sinks"),
    pytest.param({"sliding_window": 5}, id="window"),
    pytest.param({"logits_soft_cap": 3.0}, id="softcap"),
    pytest.param({"uses_alibi": True}, id="alibi"),
    pytest.param({"chunk_size": 7}, id="chunks"),
    pytest.param({"kv_cache_dtype": "fp8"}, id="fp8"),
    pytest.param({"kv_cache_dtype": "int8_per_token_head"}, id="int8"),
]


class AttentionLseRules(AttentionRules):
    @pytest.mark.parametrize("feature", FEATURES)
    def test_log_sum_exp(self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]) -> None:
        self.require(backend, variant(base, **feature))
        self.check_log_sum_exp(backend, self.problem(variant(base, **feature), LONG))

    def test_log_sum_exp_of_latents(self, backend: AttentionBackend, base: AttentionShape) -> None:
        for shape in self.latents(backend, base):
            self.check_log_sum_exp(backend, self.problem(shape, LONG))

    def check_log_sum_exp(self, backend: AttentionBackend, problem: AttentionProblem) -> None:
        """Output and log-sum-exp equal the dense answers, all keys being in the cache."""
        self.compare(problem, *self.run_with_lse(backend, problem))

    def run_with_lse(
        self, backend: AttentionBackend, problem: AttentionProblem, cache: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp; into a given ``cache`` nothing is written."""
        if not backend.returns_lse:
            pytest.skip(f"{backend.name} declares no log-sum-exp")
        impl = backend.create_impl(problem.params())
        if cache is None:
            cache = problem.kv_cache()
            impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        metadata = self.builder(backend, problem).build(problem.common())
        output, lse = impl.forward_with_lse(problem.query, cache, metadata, problem.empty_output())
        assert lse.dtype is torch.float32, f"the log-sum-exp is {lse.dtype}"
        return output, lse

    @pytest.mark.parametrize("feature", [*FEATURES[:2], *FEATURES[3:4], *FEATURES[6:]])
    @pytest.mark.parametrize("prefix_blocks", [1, 3])
    def test_prefix_and_suffix_make_the_whole(
        self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object], prefix_blocks: int
    ) -> None:
        """R5.83, I5.2: what cascades are made of. All queries see a prefix of whole blocks, causality is the suffix's
        affair, and sinks enter the prefix only."""
        size = prefix_blocks * base.block_size
        whole = self.problem(variant(base, **feature), [(size + 6, 1), (size, 4), (size + 9, 2), (2 * size, 1)])
        self.require(backend, whole.shape)
        cache = whole.kv_cache()
        if backend.returns_lse:
            backend.create_impl(whole.params()).write_kv(whole.key, whole.value, cache, whole.slot_mapping())
        # Queries are the last tokens of what they see: those of the prefix sit at its end, and see all of it.
        prefix = replace(
            whole, rows=tuple((size - query, query) for _, query in whole.rows), row_causal=(False,) * len(whole.rows)
        )
        parts = [self.part_with_lse(backend, prefix, cache)]
        suffix = replace(
            whole,
            rows=tuple((context - size, query) for context, query in whole.rows),
            block_table=whole.block_table[:, prefix_blocks:].contiguous(),
            sinks=None,
        )
        parts.append(self.part_with_lse(backend, suffix, cache))
        self.compare(whole, *merged(parts))

    def require_lse(self, backend: AttentionBackend, shape: AttentionShape) -> None:
        """Skip the test for a backend that does not accept to give log-sum-exps of such a shape."""
        reason = self.reason(backend, self.need(shape, needs_lse=True))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")

    def part_with_lse(
        self, backend: AttentionBackend, part: AttentionProblem, cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Over a cache that holds everything already. One causality for all rows is told as one."""
        if part.row_causal is not None:
            part = replace(part, shape=variant(part.shape, causal=part.row_causal[0]), row_causal=None)
        output, lse = self.run_with_lse(backend, part, cache)
        return output.double(), lse.double()

    @pytest.mark.parametrize("feature", [{}, {"uses_sinks": True}, {"kv_cache_dtype": "fp8"}], ids=str)
    def test_shares_of_a_context_make_the_whole(
        self, backend: AttentionBackend, base: AttentionShape, feature: dict[str, object]
    ) -> None:
        """I5.2: contexts dealt out among ranks, four tokens to each in turn. Some hold nothing of a short row; sinks
        enter one share only."""
        whole = self.problem(variant(base, **feature), [(17, 1), (2, 1), (40, 1), (0, 1)])
        self.require_lse(backend, whole.shape)
        ranks, parts = 3, []
        for rank in range(ranks):
            held = [positions_of(rank, ranks, context + 1) for context, _ in whole.rows]
            counts = [(len(positions), 0) for positions in held]
            rows = [(max(count - 1, 0), 1) for count, _ in counts]
            share = self.problem(variant(whole.shape, causal=False), rows, encoder_rows=counts)
            states = [all_states(whole, row) for row in range(len(rows))]
            history = tuple((k[mine], v[mine]) for (k, v), mine in zip(states, held, strict=True))
            sinks = whole.sinks if rank == 1 else None
            share = replace(share, query=whole.query, history=history, sinks=sinks)
            parts.append(self.part_with_lse(backend, share, share.kv_cache()))
        self.compare(whole, *merged(parts))

    def test_queries_that_see_nothing(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """A rank's share of a context may hold no key of a row: its output is zero, and its weight too."""
        problem = self.problem(variant(base, causal=False), [(9, 1), (6, 2)])
        self.require_lse(backend, problem.shape)
        common = problem.common()
        common.seq_lens_cpu[0] = 0
        common.seq_lens[0] = 0
        impl, cache = backend.create_impl(problem.params()), problem.kv_cache()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        metadata = self.builder(backend, problem).build(common)
        output, lse = impl.forward_with_lse(problem.query, cache, metadata, problem.empty_output())
        assert not output[0].any(), f"the output of a query without keys is {output[0]}"
        assert bool((lse[0] == -torch.inf).all()), f"the log-sum-exp of a query without keys is {lse[0]}"
        self.compare(problem.alone(1), output[1:], lse[1:])

    def test_log_sum_exp_is_declared_if_it_is_there(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """The other way round: what is not declared raises ``TypeError`` instead of returning something."""
        if backend.returns_lse:
            pytest.skip(f"{backend.name} declares a log-sum-exp")
        problem = self.problem(base, [(0, 3)])
        impl = backend.create_impl(problem.params())
        with pytest.raises(TypeError):
            impl.forward_with_lse(problem.query, problem.kv_cache(), problem.common(), torch.empty_like(problem.query))

    def test_who_accepts_the_need_declares_it(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """Cascades ask for log-sum-exps by a need, and rely on the answer."""
        reason = self.reason(backend, self.need(base, needs_lse=True))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")
        assert backend.returns_lse, f"{backend.name} accepts needs_lse but does not declare returns_lse"


def positions_of(rank: int, ranks: int, length: int) -> list[int]:
    """Positions below ``length`` that ``rank`` holds."""
    return [position for position in range(length) if position // 4 % ranks == rank]


def all_states(problem: AttentionProblem, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row's context and of its one query."""
    keys, values = problem.history[row]
    return torch.cat((keys, problem.key[row : row + 1])), torch.cat((values, problem.value[row : row + 1]))


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs [T, H, V] and log-sum-exps [T, H] as one."""
    lse = torch.logsumexp(torch.stack([part for _, part in parts]), dim=0)
    return torch.stack([output * torch.exp(part - lse)[..., None] for output, part in parts]).sum(0), lse
