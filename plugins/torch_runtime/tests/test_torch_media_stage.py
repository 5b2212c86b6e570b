"""Media among tokens: what is encoded when, which rows of it a step places where, and what requests may bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.interfaces.request import Feature
from hardpoint.interfaces.scheduler import ENCODER_INPUTS, EncoderInputs
from hardpoint.interfaces.step import NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.feature_checks import refuse_features, without_faults
from hardpoint_torch_runtime.runner.input_batch import InputBuilder
from hardpoint_torch_runtime.runner.media_stage import MediaModel, MediaStage
from hardpoint_torch_runtime.runner.prompt_items import PromptItems
from hardpoint_torch_runtime.runner.slot_state import SlotState

CPU = torch.device("cpu")
SLOTS, BLOCK = 4, 4
IMAGE, SOUND = 9, 8


class Counting:
    """Encodes values to themselves, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset((IMAGE, SOUND))

    def placeholder_id(self, feature: Feature) -> int | None:
        return {"image": IMAGE, "sound": SOUND}.get(feature.modality)

    def refuse_input(self, feature: Feature) -> str | None:
        return "its values are not there" if "values" not in feature.data else None

    def encode(self, features: Sequence[Feature]) -> list[torch.Tensor]:
        self.asked += [feature.content_hash for feature in features]
        return [torch.from_numpy(feature.data["values"]) for feature in features]

    def example_input(self, num_tokens: int) -> Feature:
        return item("example", 0, num_tokens)


def item(content: str, offset: int, length: int, **fields: Any) -> Feature:
    values = np.arange(length, dtype=np.float32)[:, None] + 100 * len(content)
    known = {"modality": "image", "offset": offset, "length": length, "data": {"values": values}}
    return Feature(content_hash=content, **{**known, **fields})


class Bench:
    """A stage between a slot state and an input builder, as the runner has them."""

    def __init__(self, make_step: Callable[..., SchedulerOutput], make_row: Callable[..., NewRow]) -> None:
        self.make_step, self.make_row = make_step, make_row
        self.model = Counting()
        self.slots = SlotState(SLOTS, 40, [BLOCK])
        self.inputs = InputBuilder(self.slots, 24, CPU)
        self.items = PromptItems(SLOTS)
        self.stage = MediaStage(self.model, self.items)
        self.refused: dict[int, str] = {}

    def enter(self, slot: int, *features: Feature, length: int = 12) -> None:
        row = self.make_row(slot, [7] * length, list(range(1, 4)), generation=1)
        row = msgspec.structs.replace(row, features=features)
        self.slots.enter(row)
        self.items.enter(row)

    def leave(self, slot: int) -> None:
        gone = np.asarray([slot], dtype=np.int32)
        self.slots.release(gone)
        self.items.release(gone)

    def run(self, *rows: tuple[int, int, int], plan: Any = None) -> dict[int, list[float]]:
        """``rows`` are (slot, computed, scheduled). Returns what is placed, by the first token of the step."""
        extensions = {} if plan is None else {ENCODER_INPUTS: plan}
        step = self.make_step(0, [(slot, 1, computed, count, False) for slot, computed, count in rows])
        step = msgspec.structs.replace(step, extensions=extensions)
        batch = self.stage.join(step, self.inputs.build(step), self.refused)
        return {piece.start: piece.rows[:, 0].tolist() for piece in batch.media}


@pytest.fixture
def bench(make_step: Callable[..., SchedulerOutput], make_row: Callable[..., NewRow]) -> Bench:
    return Bench(make_step, make_row)


def plan(*freed: str) -> EncoderInputs:
    none = np.zeros(0, dtype=np.int32)
    return EncoderInputs(none, none, freed)


def test_such_a_model_is_known_by_its_methods() -> None:
    assert isinstance(Counting(), MediaModel)
    assert isinstance(Counting(), EncoderModel)
    assert not isinstance(object(), MediaModel)


def test_items_of_several_rows_are_placed_behind_one_another(bench: Bench) -> None:
    bench.enter(0, item("a", 1, 2), item("bb", 5, 3))
    bench.enter(2, item("ccc", 0, 1))
    assert bench.run((2, 0, 3), (0, 0, 9)) == {0: [300], 4: [100, 101], 8: [200, 201, 202]}
    assert bench.model.asked == ["ccc", "a", "bb"]


def test_chunks_cut_an_item_and_later_ones_find_it(bench: Bench) -> None:
    bench.enter(0, item("a", 2, 6))
    bench.enter(1)
    assert bench.run((0, 0, 2), plan=plan()) == {}
    assert bench.run((1, 0, 2), (0, 2, 1), plan=plan()) == {2: [100]}
    assert bench.run((0, 3, 3)) == {0: [101, 102, 103]}
    assert bench.run((0, 6, 5)) == {0: [104, 105]}
    assert bench.run((0, 11, 1)) == {}
    assert (bench.model.asked, bench.stage.num_kept) == (["a"], 1)


def test_a_prefix_may_end_inside_an_item_or_hold_it(bench: Bench) -> None:
    bench.enter(0, item("a", 2, 4))
    bench.enter(1, item("a", 2, 4), item("bb", 8, 2))
    assert bench.run((0, 4, 6)) == {0: [102, 103]}
    assert bench.run((1, 8, 4)) == {0: [200, 201]}
    assert bench.model.asked == ["a", "bb"]


def test_what_two_rows_show_is_encoded_once_and_kept_until_freed(bench: Bench) -> None:
    bench.enter(0, item("a", 0, 2))
    bench.enter(1, item("a", 3, 2))
    assert bench.run((0, 0, 4), (1, 0, 6), plan=plan()) == {0: [100, 101], 7: [100, 101]}
    bench.leave(0)
    bench.enter(0, item("a", 0, 2))
    bench.run((0, 0, 2), plan={"rows": [], "features": [], "freed": ["bb"]})
    assert bench.model.asked == ["a"]
    bench.run((0, 0, 2), plan=plan("a"))
    assert bench.model.asked == ["a", "a"]


def test_what_no_plan_speaks_of_is_used_and_dropped(bench: Bench) -> None:
    bench.enter(0, item("a", 0, 4))
    assert bench.run((0, 0, 2)) == {0: [100, 101]}
    assert bench.run((0, 2, 2)) == {0: [102, 103]}
    assert (bench.model.asked, bench.stage.num_kept) == (["a", "a"], 0)


def test_of_a_refused_row_what_comes_before_the_fault_is_computed(make_row: Callable[..., NewRow]) -> None:
    """Others may share the blocks that it is in."""
    row = make_row(0, TEXT, [1, 2])
    cases = [
        ((GOOD[0], item("b", 5, 1, modality="sound", data={})), ["a"]),
        ((item("a", 1, 2), GOOD[1]), ["a", "b"]),
        ((item("a", 0, 3), GOOD[1]), []),
    ]
    for features, sound in cases:
        refused = msgspec.structs.replace(row, features=features)
        assert refuse_features(Counting(), refused) is not None
        assert [one.content_hash for one in without_faults(Counting(), refused).features] == sound
    assert without_faults(object(), msgspec.structs.replace(row, features=GOOD)).features == ()
    assert without_faults(Counting(), row) is row


def test_a_claim_about_content_makes_no_item_too_short(bench: Bench) -> None:
    bench.enter(0, item("a", 0, 2))
    bench.enter(1, item("a", 0, 4))
    assert bench.run((0, 0, 4), (1, 0, 4), plan=plan()) == {0: [100, 101], 4: [100, 101, 102, 103]}


def test_only_steps_up_to_the_last_item_are_out_of_the_ordinary(bench: Bench) -> None:
    def ahead(slot: int, computed: int) -> bool:
        return bench.items.any_ahead(np.asarray([slot], dtype=np.int32), np.asarray([computed], dtype=np.int32))

    assert not ahead(0, 0)
    bench.enter(0, item("a", 2, 4))
    assert [ahead(0, computed) for computed in (0, 5, 6)] == [True, True, False]
    assert not ahead(1, 0)
    bench.leave(0)
    assert not ahead(0, 0)


TEXT = [1, IMAGE, IMAGE, IMAGE, 2, SOUND]
GOOD = (item("a", 1, 3), item("b", 5, 1, modality="sound"))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ((item("a", 1, 3, modality="film"), GOOD[1]), "item 0 of the prompt (film at position 1): this model does not"),
        ((item("a", 1, 3, num_encoder_tokens=4), GOOD[1]), "num_encoder_tokens is 4, but each of its 3 positions"),
        ((item("a", 1, 0), GOOD[1]), "it has no positions"),
        ((item("a", 0, 3), GOOD[1]), "its positions 0 to 2 must all hold the placeholder id 9"),
        ((GOOD[0], item("b", 5, 2, modality="sound")), "item 1 of the prompt (sound at position 5): its positions 5"),
        ((item("a", 1, 3, data={}), GOOD[1]), "its values are not there"),
        ((item("a", 1, 2), GOOD[1]), "the prompt has a placeholder (9) at position 3 that belongs to no feature"),
        ((item("a", 1, 1),) * 5000, "the prompt brings 5000 items; at most 4096"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(
    make_row: Callable[..., NewRow], features: tuple[Feature, ...], message: str
) -> None:
    row = msgspec.structs.replace(make_row(0, TEXT, [1, 2]), features=features)
    reason = refuse_features(Counting(), row)
    assert reason is not None
    assert message in reason


def test_what_fits_is_taken_and_text_may_hold_any_id(make_row: Callable[..., NewRow]) -> None:
    row = make_row(0, TEXT, [1, 2])
    assert refuse_features(Counting(), row) is None
    assert refuse_features(Counting(), msgspec.structs.replace(row, features=GOOD)) is None
    known = msgspec.structs.replace(row, features=GOOD[:1], num_prompt_tokens=5)
    assert refuse_features(Counting(), known) is None, "what was answered before a preemption is no prompt"
