"""Attention in parts by the reference backend: a shared prefix, and contexts dealt out among ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_attention.cascade import CascadePolicy, CascadeQuestion, CascadeVerdict, cascade_policy
from hardpoint_attention.reference import ReferenceBackend, ReferenceImpl
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem, run_backend
from hardpoint_torch_runtime.layers import ContextShards, Partial, merge_partials, rank_share

CPU = torch.device("cpu")
FEATURES: list[dict[str, Any]] = [
    {},
    {"uses_sinks": True},
    {"logits_soft_cap": 2.0},
    {"num_kv_heads": 1, "latent_values": 10},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "int8_per_token_head"},
    {"uses_row_causality": True},
    {"uses_mm_prefix": True},
    {"dtype": torch.bfloat16},
]


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 3e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def shared(problem: AttentionProblem, blocks: int) -> AttentionProblem:
    """The problem with its rows' first blocks being those of row 0."""
    tokens = blocks * problem.shape.block_size
    first_keys, first_values = (states[:tokens] for states in problem.history[0])
    history = tuple(
        (torch.cat((first_keys, keys[tokens:])), torch.cat((first_values, values[tokens:])))
        for keys, values in problem.history
    )
    table = problem.block_table.clone()
    table[1:, :blocks] = table[0, :blocks]
    return replace(problem, history=history, block_table=table, num_common_prefix_blocks=blocks)


class Watched:
    """A policy that remembers what it was asked."""

    def __init__(self, policy: CascadePolicy) -> None:
        self.policy = policy
        self.accepted: list[CascadeQuestion] = []

    def __call__(self, question: CascadeQuestion) -> CascadeVerdict:
        verdict = self.policy(question)
        if verdict.is_accepted:
            self.accepted.append(question)
        return verdict


cascades = given(
    features=st.sampled_from(FEATURES),
    batch=st.lists(st.tuples(st.integers(12, 40), st.sampled_from([1, 1, 3, 17])), min_size=1, max_size=6),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1000),
)


@settings(max_examples=10, deadline=None)
@cascades
def test_cascade_equals_plain_attention(
    features: dict[str, Any], batch: list[tuple[int, int]], blocks: int, seed: int
) -> None:
    """R5.83, I5.2: output and log-sum-exp, against float64 over all keys at once."""
    check_cascade(features, batch, blocks, seed)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@cascades
def test_cascade_equals_plain_attention_in_many_cases(
    features: dict[str, Any], batch: list[tuple[int, int]], blocks: int, seed: int
) -> None:
    """R5.83, I5.2: the same, longer."""
    check_cascade(features, batch, blocks, seed)


def check_cascade(features: dict[str, Any], batch: list[tuple[int, int]], blocks: int, seed: int) -> None:
    problem = shared(make_problem(AttentionShape(**features), batch, seed), blocks)
    if problem.mm_ranges is not None:
        # Ranges that reach into the prefix say nothing new: queries come after it.
        problem = replace(problem, mm_ranges=tuple(((8, 14), (15, 60)) for _ in batch))
    watched = Watched(cascade_policy("always"))
    backend = ReferenceBackend(watched)
    expected, expected_lse = dense_attention(problem)
    tolerance = 2e-2 if problem.shape.dtype is torch.bfloat16 else 3e-5
    assert_equal(run_backend(backend, problem), expected, tolerance)
    assert [question.prefix_tokens for question in watched.accepted] == [4 * blocks]
    cache, impl = problem.kv_cache(), backend.create_impl(problem.params())
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    metadata = backend.create_builder(problem.spec(), [], 8, 256, CPU).build(problem.common())
    output, lse = impl.forward_with_lse(problem.query, cache, metadata, problem.empty_output())
    assert_equal(output, expected, tolerance)
    assert_equal(lse, expected_lse, tolerance)


@pytest.mark.parametrize(
    ("features", "rows", "blocks", "is_taken"),
    [
        ({}, 8, 64, True),
        ({}, 7, 64, False),
        ({}, 8, 63, False),
        ({"sliding_window": 1000}, 8, 64, False),
        ({"chunk_size": 1000}, 8, 64, False),
        ({"uses_alibi": True}, 8, 64, False),
    ],
    ids=str,
)
def test_the_usual_decision_is_taken_per_layer(
    features: dict[str, Any], rows: int, blocks: int, is_taken: bool
) -> None:
    """R5.80, R5.81: 7 and 8 rows, 252 and 256 tokens; and the result is the same either way."""
    batch = [(262 + row, 1 + row % 2) for row in range(rows)]
    problem = shared(make_problem(AttentionShape(num_heads=2, head_size=8, **features), batch), blocks)
    watched = Watched(ReferenceBackend()._cascade)
    assert_equal(run_backend(ReferenceBackend(watched), problem), dense_attention(problem)[0])
    assert bool(watched.accepted) is is_taken


def test_a_prefix_ends_before_every_rows_new_tokens() -> None:
    """R5.83: whole blocks that all rows have behind them, whatever the scheduler counted."""
    problem = shared(make_problem(AttentionShape(), [(12, 3), (14, 1)]), 3)
    watched = Watched(cascade_policy("always"))
    shorter = replace(problem, rows=((10, 5), (14, 1)))
    keys, values = problem.history[0]
    step = (torch.cat((keys[10:], problem.key)), torch.cat((values[10:], problem.value)))
    query = torch.cat((torch.zeros(2, *problem.query.shape[1:]), problem.query))
    history = ((keys[:10], values[:10]), problem.history[1])
    shorter = replace(shorter, query=query, key=step[0], value=step[1], history=history)
    assert_equal(run_backend(ReferenceBackend(watched), shorter), dense_attention(shorter)[0])
    assert [question.prefix_tokens for question in watched.accepted] == [8]


def test_layers_of_one_group_decide_for_themselves() -> None:
    """R5.45: a windowed layer beside a global one, over the same metadata."""
    plain = shared(make_problem(AttentionShape(), [(30, 1), (25, 4)]), 4)
    windowed = replace(plain, shape=replace(plain.shape, sliding_window=5))
    watched = Watched(cascade_policy("always"))
    backend = ReferenceBackend(watched)
    metadata = backend.create_builder(plain.spec(), [], 4, 64, CPU).build(plain.common())
    for problem in (windowed, plain, windowed):
        impl, cache = backend.create_impl(problem.params()), problem.kv_cache()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        output = problem.empty_output()
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        assert_equal(output, dense_attention(problem)[0])
    assert {question.uses_window for question in watched.accepted} == {False, True}


def on_rank(problem: AttentionProblem, shards: ContextShards, rank: int) -> tuple[Partial, Partial]:
    """What one rank computes: its share of the contexts, and the step's own tokens."""
    lengths = np.array([context for context, _ in problem.rows], dtype=np.int32)
    local = shards.local_lengths(lengths, rank)
    held = [shards.global_positions(np.arange(count), rank) for count in local]
    history = tuple(
        (keys[positions], values[positions]) for (keys, values), positions in zip(problem.history, held, strict=True)
    )
    backend = ReferenceBackend()
    impl = backend.create_impl(problem.params())
    assert isinstance(impl, ReferenceImpl)
    common = problem.common()
    common.dcp_local_seq_lens, common.dcp_local_seq_lens_cpu = torch.from_numpy(local), local
    metadata = backend.create_builder(problem.spec(), [], 8, 256, CPU).build(common)
    cache = replace(problem, history=history).kv_cache()
    context = impl.context_partial(problem.query, cache, metadata, problem.empty_output())
    return context, impl.step_partial(problem.query, problem.key, problem.value, metadata, problem.empty_output())


@settings(max_examples=15, deadline=None)
@given(
    features=st.sampled_from(FEATURES[:4]),
    batch=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 3, 17])), min_size=1, max_size=5),
    shards=st.builds(ContextShards, st.integers(1, 4), st.integers(1, 5)),
    seed=st.integers(0, 1000),
)
def test_ranks_merge_to_what_one_would_compute(
    features: dict[str, Any], batch: list[tuple[int, int]], shards: ContextShards, seed: int
) -> None:
    """I5.2, R5.22, R5.91: contexts dealt out with interleave, some ranks with nothing of a row; P5.8: no context is
    left out."""
    problem = make_problem(AttentionShape(**features), batch, seed)
    contexts, steps = zip(*(on_rank(problem, shards, rank) for rank in range(shards.num_ranks)), strict=True)
    expected, expected_lse = dense_attention(problem)
    merged = merge_partials([*contexts, steps[0]])
    assert_equal(merged.output, expected)
    assert_equal(merged.lse, expected_lse)
    lses = [part.lse for part in (*contexts, steps[0])]
    shares = sum(rank_share(part, lses) for part in (*contexts, steps[0]))
    assert isinstance(shares, torch.Tensor)
    assert_equal(shares, expected)


def test_a_share_of_a_context_is_no_answer() -> None:
    """P5.8: forgetting the other ranks is an error, not a wrong result."""
    problem = make_problem(AttentionShape(), [(9, 1)])
    backend = ReferenceBackend()
    common = problem.common()
    metadata = backend.create_builder(problem.spec(), [], 8, 64, CPU).build(common)
    impl = backend.create_impl(problem.params())
    assert isinstance(impl, ReferenceImpl)
    with pytest.raises(ValueError, match="dcp_local_seq_lens"):
        impl.context_partial(problem.query, problem.kv_cache(), metadata, problem.empty_output())
    common.dcp_local_seq_lens = torch.tensor([5], dtype=torch.int32)
    metadata = backend.create_builder(problem.spec(), [], 8, 64, CPU).build(common)
    assert impl.has_context(metadata)
    with pytest.raises(RuntimeError, match="share of each context"):
        impl.forward(problem.query, problem.key, problem.value, problem.kv_cache(), metadata, problem.empty_output())
