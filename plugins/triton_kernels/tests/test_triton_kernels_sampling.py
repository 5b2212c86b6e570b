"""Truncation, penalties and verification of drafts against plain torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hardpoint_torch_runtime.sampling.truncation import apply_top_k_top_p
from hardpoint_triton_kernels.kernels.penalties import apply_penalties
from hardpoint_triton_kernels.kernels.rejection import rejection_sample
from hardpoint_triton_kernels.kernels.truncation import top_k_top_p

# The interpreter computes with numpy, which remarks on what devices just round to infinity or to no number.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

NOTHING = -torch.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def truncated(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """One row, by its definition: sort, count, add up, in float64."""
    row = logits.clone()
    if 0 < top_k < len(row):
        row[row < row.sort(descending=True).values[top_k - 1]] = NOTHING
    if top_p < 1:
        ordered, order = row.double().softmax(-1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        kept = before < top_p
        kept[0] = True
        row[row < row[order[kept]].min()] = NOTHING
    return row


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 50, 4097])
def test_truncation_is_that_of_the_definition(size: int) -> None:
    """R6.19: top-k, then top-p of what is left; at least one token stays."""
    ranks = torch.tensor([0, 1, 3, size, size + 5, 7])
    shares = torch.tensor([0.9, 1.0, 0.0, 0.3, 0.999, 0.5])
    logits = normal(6, size) * 3
    logits[5, : size // 2] = NOTHING
    if size > 1:
        logits[5, -1] = 1.0
    for top_k, top_p in ((ranks, None), (None, shares), (ranks, shares)):
        found = logits.clone()
        assert top_k_top_p(found, top_k, top_p) is found
        for row in range(6):
            rank = 0 if top_k is None else int(top_k[row])
            share = 1.0 if top_p is None else float(top_p[row])
            assert torch.equal(found[row], truncated(logits[row], rank, share)), (row, rank, share)


@pytest.mark.slow
def test_ties_stay_together_and_signs_of_zero_are_one() -> None:
    """R6.16: a cut by value does not depend on how equal logits are ordered."""
    row = torch.tensor([[1.0, -0.0, 0.0, -1.0, -3.0, 0.0]])
    assert top_k_top_p(row.clone(), torch.tensor([2]), None).isfinite().tolist() == [
        [True, True, True, False, False, True]
    ]
    flat = torch.full((1, 8), 2.5)
    assert torch.equal(top_k_top_p(flat.clone(), torch.tensor([3]), torch.tensor([0.1])), flat)
    extremes = torch.tensor([[3e38, -3e38, 1e-40, NOTHING, -1e-40]])
    kept = top_k_top_p(extremes, torch.tensor([3]), None)
    assert torch.equal(kept, torch.tensor([[3e38, NOTHING, 1e-40, NOTHING, -1e-40]]))


def test_an_infinite_logit_has_all_the_probability() -> None:
    """R6.19: as in plain torch; what it is less by than infinity is no number, and must not count as one."""
    row = torch.tensor([[0.0, torch.inf, 2.0, torch.inf, NOTHING]])
    for top_k, top_p in ((None, 0.9), (3, 0.0), (1, 0.5)):
        ranks = None if top_k is None else torch.tensor([top_k])
        found = top_k_top_p(row.clone(), ranks, torch.tensor([top_p]))
        assert found.tolist() == apply_top_k_top_p(row.clone(), ranks, torch.tensor([top_p])).tolist()
        assert found.isposinf().sum() == 2
        assert found.isneginf().sum() == 3


def test_rows_of_nothing_and_no_rows_are_left_alone() -> None:
    nothing = torch.full((1, 5), NOTHING)
    assert torch.equal(top_k_top_p(nothing.clone(), torch.tensor([2]), torch.tensor([0.5])), nothing)
    assert top_k_top_p(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), None).shape == (0, 5)
    assert top_k_top_p(torch.zeros(2, 5), None, None).shape == (2, 5)
    with pytest.raises(ValueError, match="rows of logits must be contiguous"):
        top_k_top_p(torch.zeros(5, 2).T, torch.ones(2, dtype=torch.int64), None)


def penalized(
    logits: np.ndarray, tokens: list[int], outputs: list[bool], repetition: float, frequency: float, presence: float
) -> np.ndarray:
    """One row, token by token, in float64."""
    row = logits.astype(np.float64)
    for token in sorted({token for token in tokens if token < len(row)}):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in range(len(row)):
        count = sum(1 for other, is_output in zip(tokens, outputs, strict=True) if other == token and is_output)
        row[token] -= frequency * count + presence * (count > 0)
    return row


@pytest.mark.slow
def test_penalties_are_those_of_the_definition() -> None:
    """R6.15: repetition over all known tokens, then frequency and presence over generated ones."""
    for num_rows, size, length in ((1, 5, 0), (1, 7, 3), (3, 30, 12), (2, 1100, 1030)):
        generator = torch.Generator().manual_seed(size)
        tokens = torch.randint(size + 1, (num_rows, length), generator=generator)
        outputs = torch.rand((num_rows, length), generator=generator) < 0.5
        logits = normal(num_rows + 2, size)
        rows = torch.arange(num_rows) + 1
        factors = [torch.rand(num_rows, generator=generator) + 0.5 for _ in range(3)]
        found = logits.clone()
        apply_penalties(found, rows, tokens, outputs, *factors)
        for index in range(num_rows):
            exact = penalized(
                logits[index + 1].numpy(),
                tokens[index].tolist(),
                outputs[index].tolist(),
                *(float(factor[index]) for factor in factors),
            )
            np.testing.assert_allclose(found[index + 1].numpy(), exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(found[0], logits[0])
        assert torch.equal(found[-1], logits[-1])


@pytest.mark.slow
def test_extreme_penalties_give_numbers() -> None:
    logits = torch.tensor([[2.0, -2.0, NOTHING, 3e38]])
    tokens = torch.tensor([[0, 1, 2, 3]])
    apply_penalties(logits, torch.tensor([0]), tokens, tokens < 0, torch.zeros(1), torch.zeros(1), torch.zeros(1))
    assert not logits.isnan().any()
    assert logits[0, 2] == NOTHING
    assert torch.isfinite(logits[0, [0, 1, 3]]).all()


def verify(
    drafts: list[list[int]],
    target: torch.Tensor,
    proposed: torch.Tensor | None,
    accept: torch.Tensor,
    redraw: torch.Tensor,
    greedy: list[bool],
    bonus: list[int],
) -> tuple[list[list[int]], list[int]]:
    lengths = [len(row) for row in drafts]
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()])
    flat = torch.tensor([token for row in drafts for token in row], dtype=torch.int64)
    tokens, counts = rejection_sample(
        flat,
        starts,
        torch.tensor(greedy),
        target.argmax(-1),
        target,
        proposed,
        torch.tensor(bonus),
        accept,
        redraw,
        max(lengths, default=0) + 1,
    )
    return tokens.tolist(), counts.tolist()


@pytest.mark.slow
def test_greedy_rows_keep_drafts_while_they_are_the_best() -> None:
    """R11.32: the first refused draft is replaced, and none behind it counts."""
    target = torch.eye(5)[[1, 2, 3, 4, 0, 1, 2]] * 0.6 + 0.08
    drafts = [[1, 2], [3, 0, 0], [], [0, 2]]
    unused = torch.zeros(7), torch.zeros(4)
    tokens, counts = verify(drafts, target, None, *unused, greedy=[True] * 4, bonus=[4, 4, 3, 4])
    assert tokens == [[1, 2, 4, -1], [3, 4, -1, -1], [3, -1, -1, -1], [1, -1, -1, -1]]
    assert counts == [3, 2, 1, 1]


def plain(
    drafts: list[int], target: np.ndarray, proposed: np.ndarray | None, accept: np.ndarray, redraw: float, bonus: int
) -> list[int]:
    """One random row in float64."""
    kept = []
    for place, draft in enumerate(drafts):
        q = np.eye(target.shape[1])[draft] if proposed is None else proposed[place]
        if draft < 0:
            q = np.zeros(target.shape[1])
        if draft >= 0 and target[place, draft] > 0 and accept[place] * q[draft] < target[place, draft]:
            kept.append(draft)
            continue
        excess = np.maximum(target[place] - q, 0)
        return [*kept, int(np.searchsorted(excess.cumsum(), redraw * excess.sum(), side="right"))]
    return [*kept, bonus]


@pytest.mark.slow
@pytest.mark.parametrize("has_proposals", [False, True], ids=["certain", "proposed"])
@pytest.mark.parametrize("size", [3, 40, 4100])
def test_random_rows_follow_the_rule_draw_by_draw(size: int, has_proposals: bool) -> None:
    """Uneven rows, missing drafts among them, each against the rule computed in float64."""
    rng = np.random.default_rng(size)
    lengths = [2, 0, 4, 1, 3]
    drafts = [rng.integers(0, size, length).tolist() for length in lengths]
    drafts[4][1] = -1
    total = sum(lengths)
    target = torch.from_numpy(rng.dirichlet(np.ones(size), total)).float()
    proposed = torch.from_numpy(rng.dirichlet(np.ones(size), total)).float() if has_proposals else None
    for _ in range(3):
        accept, redraw = rng.random(total, dtype=np.float32), rng.random(5, dtype=np.float32)
        bonus = rng.integers(0, size, 5).tolist()
        tokens, counts = verify(
            drafts, target, proposed, torch.from_numpy(accept), torch.from_numpy(redraw), [False] * 5, bonus
        )
        begin = 0
        for row, length in enumerate(lengths):
            part = slice(begin, begin + length)
            q = None if proposed is None else proposed[part].double().numpy()
            expected = plain(
                drafts[row], target[part].double().numpy(), q, accept[part], float(redraw[row]), bonus[row]
            )
            assert tokens[row] == expected + [-1] * (5 - len(expected))
            assert counts[row] == len(expected)
            begin += length


@pytest.mark.slow
@pytest.mark.parametrize("has_proposals", [False, True], ids=["certain", "proposed"])
def test_the_first_token_has_the_models_distribution(has_proposals: bool) -> None:
    """Whatever is proposed: chi-square of 600 first tokens against the model's probabilities."""
    size, num_rows = 6, 600
    rng = np.random.default_rng(7)
    p = np.array([0.3, 0.05, 0.25, 0.0, 0.15, 0.25])
    q = np.array([0.1, 0.4, 0.1, 0.2, 0.2, 0.0]) if has_proposals else np.eye(size)[1] * 0.5 + np.eye(size)[0] * 0.5
    drafts = rng.choice(size, num_rows, p=q).tolist()
    target = torch.from_numpy(p).float().repeat(num_rows, 1)
    proposed = torch.from_numpy(q).float().repeat(num_rows, 1) if has_proposals else None
    accept, redraw = torch.from_numpy(rng.random((2, num_rows), dtype=np.float32))
    tokens, _ = verify(
        [[draft] for draft in drafts], target, proposed, accept, redraw, [False] * num_rows, [0] * num_rows
    )
    counts = np.bincount([row[0] for row in tokens], minlength=size)
    assert counts[3] == 0
    possible = p > 0
    chi_square = ((counts - num_rows * p)[possible] ** 2 / (num_rows * p)[possible]).sum()
    # The 99.9th percentile for four degrees of freedom; the draws are fixed.
    assert chi_square < 18.5


@pytest.mark.slow
def test_equal_distributions_keep_every_draft() -> None:
    rng = np.random.default_rng(3)
    target = torch.from_numpy(rng.dirichlet(np.ones(9), 6)).float()
    drafts = [[1, 2, 3], [4, 5, 6]]
    accept = torch.full((6,), 1 - 2**-24)
    tokens, counts = verify(drafts, target, target, accept, torch.zeros(2), [False] * 2, [7, 8])
    assert tokens == [[1, 2, 3, 7], [4, 5, 6, 8]]
    assert counts == [4, 4]


@pytest.mark.parametrize(("uniform", "drawn"), [(0.3, 0), (0.7, 1), (1 - 2**-24, 1)])
def test_a_token_without_probability_is_never_drawn(uniform: float, drawn: int) -> None:
    """R11.32: a draft from the tail that truncation cut off is refused, and nothing is above the drafts' distribution,
    to which the tail is less than a rounding: then it is the model's draw."""
    target, proposed = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.5, 0.5, 1e-9]])
    redraw = torch.tensor([uniform])
    tokens, counts = verify([[2]], target, proposed, torch.zeros(1), redraw, greedy=[False], bonus=[1])
    assert tokens == [[drawn, -1]]
    assert counts == [1]


def test_no_rows_no_tokens() -> None:
    empty, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    tokens, counts = rejection_sample(
        empty, torch.zeros(1, dtype=torch.int64), empty.bool(), empty, torch.zeros(0, 5), None, empty, floats, floats, 3
    )
    assert tokens.shape == (0, 3)
    assert counts.shape == (0,)
