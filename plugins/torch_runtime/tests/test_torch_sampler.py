"""The sampling chain: order, independence of rows, and the distribution that is drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.sampling.constraints import unpack_grammar_bits
from hardpoint_torch_runtime.sampling.metadata import SamplingMetadata
from hardpoint_torch_runtime.sampling.random import counter_uniforms, draw
from hardpoint_torch_runtime.sampling.sampler import Sampler, SamplerOutput
from hardpoint_torch_runtime.sampling.slot_params import Feature, SlotSampling
from hardpoint_torch_runtime.sampling.truncation import apply_min_p, apply_top_k_top_p

CPU = torch.device("cpu")
VOCAB = 40
NUM_SLOTS = 8
EOS = 2


class Batch:
    """Slots with requests, sampled by one call."""

    def __init__(self, make_row: Any, *, seed: int = 0, vocab: int = VOCAB) -> None:
        self.make_row = make_row
        self.state = SlotState(NUM_SLOTS, 64, [16])
        self.sampling = SlotSampling(NUM_SLOTS, vocab, CPU, seed=seed, eos_token_ids=(EOS,))
        self.slots: list[int] = []

    def add(self, slot: int, tokens: Any = (1,), num_prompt_tokens: int = 1, **params: Any) -> None:
        row = self.make_row(slot, list(tokens), [1], num_prompt_tokens=num_prompt_tokens, **params)
        self.state.release(np.asarray([slot], dtype=np.int32))
        self.state.enter(row)
        self.sampling.enter(row)
        self.slots.append(slot)

    def metadata(self, **grammar: Any) -> SamplingMetadata:
        return self.sampling.gather(np.asarray(self.slots, dtype=np.int32), self.state, **grammar)

    def sample(self, logits: torch.Tensor, sampler: Sampler | None = None, **grammar: Any) -> SamplerOutput:
        return (sampler or Sampler())(logits.clone(), self.metadata(**grammar))

    def tokens(self, logits: torch.Tensor) -> list[int]:
        tokens: list[int] = self.sample(logits).token_ids.tolist()
        return tokens


@pytest.fixture
def batch(make_row: Any) -> Batch:
    return Batch(make_row)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(scale=3.0, size=(rows, vocab)).astype(np.float32))


def params_strategy() -> st.SearchStrategy[dict[str, Any]]:
    token = st.integers(0, VOCAB - 1)
    return st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]), "seed": st.integers(0, 2**63)},
        optional={
            "top_k": st.integers(0, VOCAB + 5),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.floats(0.0, 1.0),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.5, 2),
            "min_tokens": st.integers(0, 6),
            "logit_bias": st.dictionaries(token, st.floats(-5, 5), max_size=3),
            "allowed_token_ids": st.lists(token, min_size=6, max_size=10).map(tuple),
            "bad_words_token_ids": st.lists(st.tuples(token), max_size=3).map(tuple),
            "logprobs": st.integers(-1, 5),
        },
    )


# The only row whose log-probabilities are wanted has none, for no token is left to it.
NOTHING_ALLOWED = {"temperature": 0.0, "logprobs": 0, "bad_words_token_ids": ((0,),), "allowed_token_ids": (0,) * 6}
history = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(params_strategy(), history), min_size=2, max_size=5), seed=st.integers(0, 1000))
@example(rows=[(NOTHING_ALLOWED, [0]), ({"temperature": 0.0, "seed": 0}, [0])], seed=0)
def test_a_row_gets_what_it_gets_alone(hand_builders: Any, rows: Any, seed: int) -> None:
    """R6.16, R6.18, I6.2: token, log-probabilities and failure are independent of neighbors and of row order."""
    logits = some_logits(len(rows), seed)
    together, swapped = Batch(hand_builders[1]), Batch(hand_builders[1])
    for slot, (params, tokens) in enumerate(rows):
        together.add(slot, tokens, **params)
    for slot, (params, tokens) in reversed(list(enumerate(rows))):
        swapped.add(slot, tokens, **params)
    result = together.sample(logits)
    assert swapped.sample(logits.flip(0)).token_ids[::-1].tolist() == result.token_ids.tolist()
    for row, (params, tokens) in enumerate(rows):
        alone = Batch(hand_builders[1])
        alone.add(row, tokens, **params)
        single = alone.sample(logits[row : row + 1])
        assert single.token_ids[0] == result.token_ids[row]
        assert (0 in single.failures) == (row in result.failures)
        if single.logprobs is not None:
            assert result.logprobs is not None
            mine = int(np.flatnonzero(result.logprobs.rows == row)[0])
            width = single.logprobs.logprobs.shape[1]
            np.testing.assert_allclose(result.logprobs.logprobs[mine, :width], single.logprobs.logprobs[0], rtol=1e-6)
            assert result.logprobs.ranks[mine] == single.logprobs.ranks[0]


@settings(max_examples=150, deadline=None)
@given(params=params_strategy(), tokens=history, seed=st.integers(0, 1000), bits=st.integers(1, 2**VOCAB - 1))
def test_a_sampled_token_is_always_allowed(hand_builders: Any, params: Any, tokens: Any, seed: int, bits: int) -> None:
    """I6.1: whitelist, excluded words, minimum length and grammar together."""
    batch = Batch(hand_builders[1])
    batch.add(0, tokens, **params)
    legal = torch.tensor([[bool(bits >> token & 1) for token in range(VOCAB)]])
    result = batch.sample(some_logits(1, seed), grammar=legal, grammar_rows=torch.tensor([0]))
    allowed = set(params.get("allowed_token_ids") or range(VOCAB)) & set(np.flatnonzero(legal[0]).tolist())
    allowed -= {word[0] for word in params.get("bad_words_token_ids", ())}
    if params.get("min_tokens", 0) > len(tokens) - 1:
        allowed -= {EOS}
    if allowed:
        assert result.failures == {}
        assert int(result.token_ids[0]) in allowed
    else:
        assert "no token is allowed" in result.failures[0]


class TestOrder:
    def test_greedy_rows_are_penalized(self, batch: Batch) -> None:
        """P6.1, R6.15: the second best token wins once the best one was said."""
        logits = torch.zeros(1, VOCAB)
        logits[0, 5], logits[0, 6] = 3.0, 2.5
        batch.add(0, [1, 5], frequency_penalty=1.0)
        assert batch.tokens(logits) == [6]

    @pytest.mark.parametrize("temperature", [0.5, 4.0])
    def test_penalties_do_not_scale_with_temperature(self, batch: Batch, temperature: float) -> None:
        """P6.1: whether the penalized token falls below min-p depends on logits divided *after* the penalty."""
        logits = torch.full((1, VOCAB), -torch.inf)
        logits[0, 5], logits[0, 6] = 1.0, 1.0
        batch.add(0, [1, 5], frequency_penalty=100.0 * temperature, temperature=temperature, seed=1)
        assert {batch.tokens(logits)[0] for _ in range(5)} == {6}

    def test_penalties_apply_in_order(self, batch: Batch) -> None:
        """R6.15: repetition on the prompt too; frequency counts, presence once, on generated tokens only."""
        logits = torch.full((1, VOCAB), 1.0)
        batch.add(
            0, [3, 4, 5, 5], num_prompt_tokens=2, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5
        )
        metadata = batch.metadata()
        assert metadata.penalties is not None
        from hardpoint_torch_runtime.sampling.constraints import apply_penalties

        apply_penalties(logits, metadata.penalties)
        assert logits[0, 3:6].tolist() == [0.5, 0.5, 0.5 - 0.5 - 0.5]
        assert logits[0, 6] == 1.0

    def test_negative_logits_are_multiplied_by_repetition(self, batch: Batch) -> None:
        logits = torch.full((1, VOCAB), -1.0)
        batch.add(0, [3], repetition_penalty=2.0)
        from hardpoint_torch_runtime.sampling.constraints import apply_penalties

        penalties = batch.metadata().penalties
        assert penalties is not None
        apply_penalties(logits, penalties)
        assert logits[0, 3:5].tolist() == [-2.0, -1.0]

    def test_bias_cannot_bring_back_an_excluded_token(self, batch: Batch) -> None:
        """R6.10: whitelist and exclusions come first and are final."""
        batch.add(0, logit_bias={7: 1000.0, 8: 500.0}, allowed_token_ids=(1, 8, 9))
        batch.add(1, logit_bias={7: 1000.0, 8: 500.0}, bad_words_token_ids=((7,),))
        assert batch.tokens(some_logits(2)) == [8, 8]

    def test_a_bad_word_is_excluded_only_where_it_would_be_completed(self, batch: Batch) -> None:
        logits = torch.zeros(3, VOCAB)
        logits[:, 9] = 5.0
        batch.add(0, [1, 4, 8], bad_words_token_ids=((4, 8, 9),))
        batch.add(1, [1, 4, 7], bad_words_token_ids=((4, 8, 9),))
        batch.add(2, [4, 8], num_prompt_tokens=2, bad_words_token_ids=((4, 8, 9),))
        tokens = batch.tokens(logits)
        assert tokens[0] != 9
        assert tokens[1:] == [9, 9]

    def test_minimum_tokens_hold_back_every_stop_token(self, batch: Batch) -> None:
        logits = torch.zeros(3, VOCAB)
        logits[:, EOS], logits[:, 7], logits[:, 8] = 9.0, 8.0, 7.0
        batch.add(0, [1, 1], min_tokens=2, stop_token_ids=(7,))
        batch.add(1, [1, 1], min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
        batch.add(2, [1, 1, 1], min_tokens=2, stop_token_ids=(7,))
        assert batch.tokens(logits) == [8, EOS, EOS]

    def test_logprobs_are_those_of_the_model(self, batch: Batch) -> None:
        """P6.2, R6.12: neither temperature nor bias nor penalties show in them."""
        logits = some_logits(1)
        batch.add(0, [1, 5], logprobs=3, temperature=0.3, seed=1, logit_bias={5: 50.0}, presence_penalty=2.0)
        result = batch.sample(logits)
        reference = torch.log_softmax(logits, dim=-1)[0]
        assert result.logprobs is not None
        assert result.token_ids.tolist() == [5]
        ids = result.logprobs.token_ids[0]
        assert ids[0] == 5
        assert ids[1:].tolist() == reference.topk(3).indices.tolist()
        np.testing.assert_allclose(result.logprobs.logprobs[0], reference[torch.from_numpy(ids).long()], rtol=1e-6)
        assert result.logprobs.ranks[0] == int((reference > reference[5]).sum()) + 1

    def test_only_invariant_processors_leave_greedy_rows_alone(self, batch: Batch) -> None:
        """R6.14: each kind runs at its own place of the chain."""
        seen: dict[str, list[int]] = {}

        class Push(LogitsProcessor):
            def __init__(self, name: str, invariant: bool) -> None:
                self.name = name
                self.argmax_invariant = invariant

            def add(self, row: NewRow) -> bool:
                del row
                return True

            def remove(self, slot: int) -> None:
                del slot

            def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
                seen[self.name] = slots.tolist()
                return logits

        batch.add(3)
        batch.add(1, temperature=1.0, seed=1)
        batch.add(5)
        batch.sample(some_logits(3), Sampler([Push("changes", False), Push("keeps", True)]))
        assert seen == {"changes": [3, 1, 5], "keeps": [1]}

    def test_a_processor_that_lies_about_invariance_is_caught(self, batch: Batch) -> None:
        """R6.14: on request only, since it costs two passes over the logits."""

        class Liar(LogitsProcessor):
            argmax_invariant = True

            def add(self, row: NewRow) -> bool:
                del row
                return True

            def remove(self, slot: int) -> None:
                del slot

            def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
                del slots
                logits[:, 3] = 1000.0
                return logits

        batch.add(0, temperature=1.0, seed=1)
        assert batch.sample(some_logits(1), Sampler([Liar()])).token_ids.tolist() == [3]
        with pytest.raises(RuntimeError, match="Liar.* declares argmax_invariant"):
            batch.sample(some_logits(1), Sampler([Liar()], checks_invariance=True))


class TestGreedy:
    def test_half_precision_logits_are_promoted(self, batch: Batch) -> None:
        """R6.13: two logits that differ only after a bias finer than bfloat16's grid."""
        logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
        logits[0, 5] = logits[0, 6] = 64.0
        batch.add(0, logit_bias={6: 0.01})
        assert batch.tokens(logits) == [6]

    def test_temperatures_below_epsilon_are_greedy(self, batch: Batch) -> None:
        """R6.3."""
        logits = some_logits(2)
        batch.add(0, temperature=9e-6)
        batch.add(1, temperature=0.0, top_k=3, top_p=0.1)
        assert batch.metadata().all_greedy
        assert batch.tokens(logits) == logits.argmax(dim=1).tolist()

    def test_plain_greedy_computes_nothing_else(self, batch: Batch) -> None:
        batch.add(0)
        batch.add(1)
        assert batch.sampling.features(np.asarray([0, 1], dtype=np.int32)) is Feature.NONE
        logits = some_logits(2)
        untouched = logits.clone()
        Sampler()(logits, batch.metadata())
        assert torch.equal(logits, untouched)

    def test_no_rows_no_tokens(self, batch: Batch) -> None:
        assert batch.sample(torch.zeros(0, VOCAB)).token_ids.tolist() == []

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 2}])
    def test_broken_logits_fail_their_row(self, batch: Batch, value: float, params: Any) -> None:
        """Class 32."""
        logits = some_logits(3)
        logits[1, 7] = value
        for slot in range(3):
            batch.add(slot, **params)
        result = batch.sample(logits)
        assert set(result.failures) == {1}
        if result.logprobs is not None:
            assert result.logprobs.rows.tolist() == [0, 2]
            assert np.isfinite(result.logprobs.logprobs).all()


class TestRandom:
    def chi_square(self, counts: np.ndarray, probabilities: np.ndarray) -> float:
        """p-value; categories with fewer than five expected draws are pooled."""
        expected = probabilities * counts.sum()
        small = expected < 5
        observed = np.append(counts[~small], counts[small].sum())
        wanted = np.append(expected[~small], expected[small].sum())
        keep = wanted > 0
        assert observed[~keep].sum() == 0, "a token of probability zero was drawn"
        statistic = float(((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum())
        freedom = max(int(keep.sum()) - 1, 1)
        return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))

    @pytest.mark.parametrize(
        ("params", "kept"),
        [
            ({}, None),
            ({"temperature": 0.6}, None),
            ({"top_k": 5}, 5),
            ({"top_p": 0.8}, None),
            ({"min_p": 0.1}, None),
            ({"top_k": 12, "top_p": 0.7, "min_p": 0.02, "temperature": 1.4}, None),
        ],
    )
    @pytest.mark.parametrize("by", ["seed", "position", "engine seed"])
    def test_draws_follow_the_truncated_distribution(
        self, hand_builders: Any, params: Any, kept: int | None, by: str
    ) -> None:
        """I6.3: over seeds, over positions of one seed, and without a seed."""
        logits = some_logits(1, seed=4)[0] / 2
        options = {"temperature": 1.0} | params
        expected = self.reference(logits.double() / options["temperature"], options)
        assert kept is None or int((expected > 0).sum()) == kept
        draws = 6000
        rows = logits.repeat(draws, 1)
        positions, seeds = np.arange(draws), np.full(draws, 12345)
        if by == "seed":
            positions, seeds = np.full(draws, 0), np.arange(draws)
        uniforms = counter_uniforms(seeds, positions)
        if by == "engine seed":
            uniforms = np.random.Generator(np.random.PCG64(1)).random(draws)
        rows = rows / options["temperature"]
        if "min_p" in options:
            apply_min_p(rows, torch.full((draws,), options["min_p"]))
        top_k = torch.full((draws,), options["top_k"]) if "top_k" in options else None
        top_p = torch.full((draws,), options["top_p"]) if "top_p" in options else None
        apply_top_k_top_p(rows, top_k, top_p)
        tokens = draw(rows, torch.from_numpy(uniforms))
        counts = np.bincount(tokens.numpy(), minlength=VOCAB)
        assert self.chi_square(counts, expected.numpy()) > 1e-4

    def reference(self, logits: torch.Tensor, options: Any) -> torch.Tensor:
        """The textbook procedure on sorted probabilities, float64."""
        if "min_p" in options:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < options["min_p"] * probabilities.max(), -torch.inf)
        order = logits.argsort(descending=True)
        keep = torch.ones(VOCAB, dtype=torch.bool)
        if options.get("top_k"):
            keep[order[options["top_k"] :]] = False
        probabilities = logits.masked_fill(~keep, -torch.inf).softmax(-1)
        if options.get("top_p", 1.0) < 1.0:
            before = probabilities[order].cumsum(-1) - probabilities[order]
            keep[order[before >= options["top_p"]]] = False
        return logits.masked_fill(~keep, -torch.inf).softmax(-1)

    def test_the_same_seed_gives_the_same_tokens(self, hand_builders: Any) -> None:
        """R6.2, R6.18: whatever was drawn before, also for a request that re-enters with its tokens."""
        logits = some_logits(1)
        first, second = Batch(hand_builders[1], seed=1), Batch(hand_builders[1], seed=2)
        second.add(3, temperature=1.0)
        second.sample(logits)
        second.slots.clear()
        for batch, slot in ((first, 0), (second, 5)):
            batch.add(slot, [1, 4, 4], temperature=2.0, seed=7)
        assert first.tokens(logits) == second.tokens(logits)

    def test_unseeded_rows_differ_from_step_to_step_and_follow_the_engine_seed(self, hand_builders: Any) -> None:
        logits = torch.zeros(1, VOCAB)

        def run(seed: int) -> list[int]:
            batch = Batch(hand_builders[1], seed=seed)
            batch.add(0, temperature=1.0)
            return [batch.tokens(logits)[0] for _ in range(12)]

        assert run(1) == run(1)
        assert run(1) != run(2)
        assert len(set(run(1))) > 3

    def test_a_seed_counts_outputs_whatever_the_prompt(self, batch: Batch) -> None:
        """R6.18: the stream belongs to the answer, so the prompt's length does not shift it."""
        batch.add(0, [1, 5, 6], num_prompt_tokens=1, temperature=2.0, seed=7)
        batch.add(1, [1, 2, 3, 4, 5, 6], num_prompt_tokens=4, temperature=2.0, seed=7)
        uniforms = batch.metadata().uniforms
        assert uniforms is not None
        assert float(uniforms[0]) == float(uniforms[1])

    def test_uniforms_cover_the_unit_interval_evenly(self) -> None:
        seeds, counters = np.meshgrid(np.arange(100), np.arange(100))
        values = counter_uniforms(seeds.ravel(), counters.ravel())
        assert values.min() >= 0.0
        assert values.max() < 1.0
        ordered = np.sort(values)
        distance = np.abs(ordered - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
        assert distance * np.sqrt(len(ordered)) < 1.95, "Kolmogorov-Smirnov at p = 0.001"
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.04

    def test_the_largest_draw_still_hits_a_possible_token(self) -> None:
        logits = torch.full((2, VOCAB), -torch.inf)
        logits[0, 3] = 0.0
        logits[1, :4] = 1.0
        top = float(np.nextafter(1.0, 0.0))
        assert draw(logits, torch.tensor([top, top], dtype=torch.float64)).tolist() == [3, 3]
        assert draw(logits, torch.zeros(2, dtype=torch.float64)).tolist() == [3, 0]

    def test_random_rows_need_their_draws(self) -> None:
        """R6.17."""
        with pytest.raises(ConfigError, match="1 random rows were given without"):
            SamplingMetadata(np.zeros(1, dtype=np.int32), torch.tensor([0]))


class TestTruncation:
    @settings(max_examples=100, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        k=st.one_of(st.integers(0, 700), st.integers(3000, 5100)),
        p=st.floats(0.01, 1.0),
        scale=st.sampled_from([0.0, 0.05, 1.0, 6.0]),
    )
    def test_the_kept_set_is_the_textbook_one(self, seed: int, k: int, p: float, scale: float) -> None:
        """R6.19, on a vocabulary larger than the prefix looked at first; flat rows need the full sort."""
        vocab = 5000 if scale < 1.0 else 600
        logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=scale, size=(1, vocab)).astype(np.float32))
        values = logits[0].double()
        order = values.argsort(descending=True, stable=True)
        kept = torch.zeros(vocab, dtype=torch.bool)
        kept[values >= values[order[min(k or vocab, vocab) - 1]]] = True
        probabilities = values.masked_fill(~kept, -torch.inf).softmax(-1)[order]
        before = probabilities.cumsum(-1) - probabilities
        inside = before < p
        inside[0] = True
        margin = float((before - p).abs().min())
        cut = values[order[int(inside.sum()) - 1]]
        expected = kept & (values >= cut) if p < 1.0 else kept
        result = apply_top_k_top_p(logits.clone(), torch.tensor([k]), torch.tensor([p], dtype=torch.float32))
        assert bool(torch.isfinite(result).any())
        if margin > 1e-5:
            assert torch.equal(torch.isfinite(result[0]), expected)

    def test_rows_do_not_see_each_others_width(self) -> None:
        """P6.3's cousin: a neighbor with a large k must not change which ties a row keeps."""
        logits = torch.zeros(1, 600)
        alone = apply_top_k_top_p(logits.clone(), torch.tensor([3]), None)
        both = apply_top_k_top_p(logits.repeat(2, 1), torch.tensor([3, 400]), None)
        assert torch.equal(alone[0], both[0])


class TestLogprobs:
    def test_rows_may_ask_for_different_numbers(self, batch: Batch) -> None:
        """R6.20, R6.21."""
        logits = some_logits(4)
        batch.add(0, logprobs=2)
        batch.add(1)
        batch.add(2, logprobs=0)
        batch.add(3, logprobs=-1)
        result = batch.sample(logits)
        assert result.token_ids.dtype == np.int32
        assert result.logprobs is not None
        assert result.logprobs.rows.tolist() == [0, 2, 3]
        ids = result.logprobs.token_ids
        assert ids.shape == (3, VOCAB + 1)
        assert (ids[0] >= 0).sum() == 3
        assert (ids[1] >= 0).sum() == 1
        assert ids[2, 1:].tolist() == list(range(VOCAB))
        np.testing.assert_allclose(
            result.logprobs.logprobs[2, 1:], torch.log_softmax(logits[3], dim=-1).numpy(), rtol=1e-5
        )
        assert np.isneginf(result.logprobs.logprobs[1, 1:]).all()

    def test_greedy_rows_have_rank_one(self, batch: Batch) -> None:
        batch.add(0, logprobs=1)
        result = batch.sample(some_logits(1))
        assert result.logprobs is not None
        assert result.logprobs.ranks.tolist() == [1]
        assert result.logprobs.token_ids[0, 0] == result.logprobs.token_ids[0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.01, 1.0])
@pytest.mark.parametrize("repetition_penalty", [1e-46, 1e-40, 1e-36])
def test_extreme_penalties_and_temperatures_cannot_leave_the_vocabulary(
    batch: Batch, temperature: float, repetition_penalty: float
) -> None:
    """Allowed by validation; a token outside the vocabulary would take the whole engine down in the next step."""
    fields: dict[str, Any] = {
        "temperature": temperature,
        "repetition_penalty": repetition_penalty,
        "seed": 1,
        "logprobs": 1,
    }
    batch.add(0, [3, 4], allowed_token_ids=(3, 5), **fields)
    batch.add(1, [3], temperature=1.0, seed=1)
    logits = some_logits(2)
    logits[:, 3] = 2.0
    result = batch.sample(logits)
    assert result.failures == {}
    assert int(result.token_ids[0]) == 3
    alone = Batch(batch.make_row)
    alone.add(1, [3], temperature=1.0, seed=1)
    assert alone.tokens(logits[1:]) == [int(result.token_ids[1])]


def test_a_processor_that_breaks_a_row_fails_only_that_row(batch: Batch) -> None:
    class Breaks(LogitsProcessor):
        argmax_invariant = True

        def add(self, row: NewRow) -> bool:
            del row
            return True

        def remove(self, slot: int) -> None:
            del slot

        def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
            logits[slots == 0] = torch.nan
            return logits

    batch.add(0, temperature=1.0, seed=1, logprobs=2)
    batch.add(1, temperature=1.0, seed=1)
    result = batch.sample(some_logits(2), Sampler([Breaks()]))
    assert list(result.failures) == [0]
    assert result.logprobs is None or len(result.logprobs.rows) == 0
    assert 0 <= result.token_ids.min() <= result.token_ids.max() < VOCAB


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 77])
def test_grammar_bits_are_unpacked_for_any_vocabulary(vocab: int) -> None:
    """R6.47: bits beyond the vocabulary are ignored."""
    random = np.random.default_rng(vocab)
    words = random.integers(-(2**31), 2**31, size=(3, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
    expected = [[bool(int(words[row, t // 32]) >> (t % 32) & 1) for t in range(vocab)] for row in range(3)]
    assert unpack_grammar_bits(words, vocab).tolist() == expected


def test_every_field_of_a_slot_is_reset_on_reuse(batch: Batch) -> None:
    """Class 43: the second owner's metadata equals that of a fresh worker."""
    batch.add(
        0,
        [1, 2, 3],
        temperature=0.7,
        seed=5,
        top_k=3,
        top_p=0.5,
        min_p=0.2,
        presence_penalty=1.0,
        min_tokens=9,
        logit_bias={1: 2.0},
        allowed_token_ids=(1, 2),
        bad_words_token_ids=((3,),),
        logprobs=4,
    )
    batch.sampling.release(np.asarray([0], dtype=np.int32))
    batch.slots.clear()
    batch.add(0, [1])
    metadata = batch.metadata()
    assert metadata.all_greedy
    parts = ("allowed", "bad_words", "stop_tokens", "logit_bias", "penalties", "logprobs", "top_k", "top_p", "min_p")
    assert all(getattr(metadata, name) is None for name in parts)
