"""Input ids made of samples that are still on the device, against ids rebuilt from the requests' own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.device_tokens import NO_DRAFT, DeviceTokens, RowSpans

NUM_SLOTS, MAX_TOKENS, K = 5, 40, 3
POISON = -7
CPU = torch.device("cpu")


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def new_row(slot: int) -> NewRow:
    none = np.zeros(0, dtype=np.int32)
    return NewRow(
        request_id="x",
        slot=slot,
        generation=1,
        token_ids=none,
        num_prompt_tokens=0,
        block_ids=(none,),
        sampling=SamplingParams(),
    )


def spans(slots: list[int], counts: list[int], samples: list[bool] | None = None, **fields: object) -> RowSpans:
    total = sum(counts)
    return RowSpans(
        int32(*slots),
        np.cumsum(int32(*counts)).astype(np.int32),
        np.asarray(samples or [True] * len(slots), dtype=np.bool_),
        total,
        **{"num_padded": total, **fields},  # type: ignore[arg-type]
    )


class Ids(StagedBuffer):
    """A buffer whose host part can be told from its device part, as on a device; counts what comes from the host."""

    def __init__(self) -> None:
        super().__init__((MAX_TOKENS,), torch.int64, CPU)
        self.tensor = torch.full((MAX_TOKENS,), POISON, dtype=torch.int64)
        self.host.fill(POISON)
        self.uploads: list[int] = []

    def upload(self, length: int) -> torch.Tensor:
        self.uploads.append(length)
        return super().upload(length)


@pytest.fixture
def tokens() -> DeviceTokens:
    return DeviceTokens(NUM_SLOTS, MAX_TOKENS, CPU, num_drafts=K)


def test_without_samples_ids_come_from_the_host(tokens: DeviceTokens) -> None:
    """R4.40."""
    ids = Ids()
    ids.host[:5] = [1, 2, 3, 4, 0]
    view, drafts = tokens.fill(ids, spans([2, 0], [3, 1], num_padded=5))
    assert (view.tolist(), drafts, ids.uploads) == ([1, 2, 3, 4, 0], None, [5])


def test_rows_in_their_old_order_are_one_copy_within_the_device(tokens: DeviceTokens) -> None:
    """R4.44: the host's ids, which are not known, are not even uploaded; padding is defined all the same."""
    tokens.keep(int32(3, 1, 4), torch.tensor([50, 51, 52]))
    ids = Ids()
    view, _ = tokens.fill(ids, spans([3, 1, 4], [1, 1, 1], num_padded=6))
    assert (view.tolist(), ids.uploads) == ([50, 51, 52, 0, 0, 0], [])


def test_rows_in_another_order_are_scattered(tokens: DeviceTokens) -> None:
    """P4.3: the largest place is the same as in the old order, and still no token goes to a wrong request."""
    tokens.keep(int32(3, 1, 4), torch.tensor([50, 51, 52]))
    for slots, expected in (([1, 3, 4], [51, 50, 52]), ([4, 1, 3], [52, 51, 50]), ([1, 4], [51, 52])):
        view, _ = tokens.fill(Ids(), spans(slots, [1] * len(slots)))
        assert view.tolist() == expected


def test_new_rows_among_old_ones_come_from_the_host(tokens: DeviceTokens) -> None:
    """R4.42, P4.2: first the host's ids, then the samples over them, whichever rows come first."""
    tokens.keep(int32(3, 1), torch.tensor([50, 51]))
    for slots, counts, expected in (
        ([3, 1, 0], [1, 1, 3], [50, 51, 102, 103, 104]),
        ([0, 3, 1], [3, 1, 1], [100, 101, 102, 50, 51]),
        ([3, 0, 1], [1, 3, 1], [50, 101, 102, 103, 51]),
    ):
        ids = Ids()
        ids.host[:5] = np.arange(100, 105)
        tokens.enter(new_row(0))
        view, _ = tokens.fill(ids, spans(slots, counts))
        assert (view.tolist(), ids.uploads) == (expected, [5])


def test_a_row_in_the_middle_of_its_prompt_takes_no_sample(tokens: DeviceTokens) -> None:
    """R4.42: it does not reach the token that was sampled, if any was."""
    tokens.keep(int32(3, 1), torch.tensor([50, 51]))
    ids = Ids()
    ids.host[:4] = [7, 8, 9, 10]
    view, _ = tokens.fill(ids, spans([3, 1], [3, 1], [False, True]))
    assert view.tolist() == [7, 8, 9, 51]


def test_without_common_rows_the_host_is_all(tokens: DeviceTokens) -> None:
    """R4.43: also where old rows are gone, or their slots have new owners."""
    tokens.keep(int32(3, 1), torch.tensor([50, 51]))
    tokens.release(int32(3))
    tokens.enter(new_row(1))
    ids = Ids()
    ids.host[:3] = [7, 8, 9]
    view, _ = tokens.fill(ids, spans([3, 1], [1, 2]))
    assert (view.tolist(), ids.uploads) == ([7, 8, 9], [3])


def test_samples_and_drafts_find_their_places(tokens: DeviceTokens) -> None:
    """R4.41: cumulative tokens 2, 5, 8 with 1, 2, 2 drafts put samples at 0, 2, 5 and drafts at 1, 3, 4, 6, 7."""
    guesses = torch.tensor([[60, 61, 62], [70, 71, 72], [80, -1, -1]])
    tokens.keep(int32(0, 1, 2), torch.tensor([50, 51, 52]), guesses)
    own = int32(*[NO_DRAFT] * 5)
    view, drafts = tokens.fill(Ids(), spans([0, 1, 2], [2, 3, 3], num_drafts=int32(1, 2, 2), draft_ids=own))
    assert view.tolist() == [50, 60, 51, 70, 71, 52, 80, 0]
    assert drafts is not None
    assert drafts.tolist() == [60, 70, 71, 80, -1], "a missing draft equals no sample, though its place has an id"


def test_drafts_that_the_host_knows_stay(tokens: DeviceTokens) -> None:
    tokens.keep(int32(0, 1), torch.tensor([50, 51]), torch.tensor([[60, 61, 62], [70, 71, 72]]))
    given = int32(9, 8, NO_DRAFT, NO_DRAFT, NO_DRAFT)
    counts = int32(2, 3)
    ids = Ids()
    ids.host[:7] = 1
    view, drafts = tokens.fill(ids, spans([0, 1], [3, 4], num_drafts=counts, draft_ids=given))
    assert view.tolist() == [50, 9, 8, 51, 70, 71, 72]
    assert drafts is not None
    assert drafts.tolist() == [9, 8, 70, 71, 72]


def test_more_drafts_than_the_worker_makes_are_missing(tokens: DeviceTokens) -> None:
    tokens.keep(int32(0), torch.tensor([50]), torch.tensor([[60, 61, 62]]))
    _, drafts = tokens.fill(Ids(), spans([0], [6], num_drafts=int32(5), draft_ids=int32(*[NO_DRAFT] * 5)))
    assert drafts is not None
    assert drafts.tolist() == [60, 61, 62, -1, -1]


def test_rows_that_pause_keep_their_samples(tokens: DeviceTokens) -> None:
    """A row without budget is not scheduled for some steps; its newest token is nowhere but here."""
    tokens.keep(int32(3, 1, 4), torch.tensor([50, 51, 52]), torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    tokens.keep(int32(1), torch.tensor([61]), torch.tensor([[14, 15, 16]]))
    tokens.keep(int32(1, 0), torch.tensor([71, 70]))
    view, drafts = tokens.fill(
        Ids(), spans([4, 1, 3, 0], [2, 2, 1, 1], num_drafts=int32(1, 1, 0, 0), draft_ids=int32(-1, -1))
    )
    assert view.tolist() == [52, 7, 71, 0, 50, 70]
    assert drafts is not None
    assert drafts.tolist() == [7, -1]


@dataclass
class Life:
    """One request: what it really consists of, and how much of that the host knows."""

    tokens: list[int]
    num_host: int
    computed: int = 0
    guesses: list[int] = field(default_factory=list)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_history_gives_the_ids_of_a_rebuild(seed: int) -> None:
    """I4.4, R4.45, P4.2, P4.3: rows join, pause, leave, swap and come back, with and without drafts; every place of
    a poisoned buffer is defined and right, although the host never learns of a sample."""
    random = np.random.default_rng(seed)
    tokens = DeviceTokens(NUM_SLOTS, MAX_TOKENS, CPU, num_drafts=K)
    lives: dict[int, Life] = {}
    for _ in range(30):
        for slot in list(lives):
            if random.random() < 0.12:
                del lives[slot]
                tokens.release(int32(slot))
        for slot in range(NUM_SLOTS):
            if slot not in lives and random.random() < 0.4:
                prompt = random.integers(0, 1000, int(random.integers(1, 6))).tolist()
                lives[slot] = Life(prompt, len(prompt))
                tokens.enter(new_row(slot))
        order = [slot for slot in random.permutation(sorted(lives)).tolist() if random.random() < 0.8]
        if random.random() < 0.4:
            order.sort()
        if order:
            step(random, tokens, lives, order)


def step(random: np.random.Generator, tokens: DeviceTokens, lives: dict[int, Life], order: list[int]) -> None:
    ids = Ids()
    expected: list[int] = []
    known: list[int] = []
    counts, samples, num_drafts, draft_ids, truth = [], [], [], [], []
    for slot in order:
        life = lives[slot]
        missing = len(life.tokens) - life.computed
        count = missing if random.random() < 0.7 else int(random.integers(1, missing + 1))
        is_whole = count == missing
        guessed: list[int] = []
        if is_whole and random.random() < 0.5:
            number = int(random.integers(0, K + 1))
            guessed = [*life.guesses, *[NO_DRAFT] * K][:number]
            told = random.random() < 0.3
            draft_ids += [int(random.integers(0, 1000)) if told else NO_DRAFT for _ in guessed]
            if told:
                guessed = draft_ids[len(draft_ids) - number :]
        span = life.tokens[life.computed : life.computed + count]
        expected += [*span, *(max(guess, 0) for guess in guessed)]
        host = [token if life.computed + i < life.num_host else POISON for i, token in enumerate(span)]
        known += [*host, *[POISON] * len(guessed)]
        counts.append(count + len(guessed))
        samples.append(is_whole)
        num_drafts.append(len(guessed))
        truth += guessed
        life.computed += count
    ids.host[: len(known)] = known
    padded = len(known) + int(random.integers(0, 3))
    ids.host[len(known) : padded] = 0
    fields: dict[str, object] = {"num_padded": padded}
    if sum(num_drafts):
        fields |= {"num_drafts": int32(*num_drafts), "draft_ids": int32(*draft_ids)}
    view, drafts = tokens.fill(ids, spans(order, counts, samples, **fields))
    assert view.tolist() == [*expected, *[0] * (padded - len(known))]
    assert (None if drafts is None else drafts.tolist()) == (truth if sum(num_drafts) else None)
    sampled = [slot for slot, is_whole in zip(order, samples, strict=True) if is_whole]
    if sampled:
        fresh = random.integers(0, 1000, len(sampled)).tolist()
        guesses = random.integers(0, 1000, (len(sampled), K))
        guesses[:, int(random.integers(0, K + 1)) :] = NO_DRAFT
        for slot, token, row in zip(sampled, fresh, guesses.tolist(), strict=True):
            lives[slot].tokens.append(token)
            lives[slot].guesses = row
        tokens.keep(int32(*sampled), torch.tensor(fresh), torch.from_numpy(guesses))
