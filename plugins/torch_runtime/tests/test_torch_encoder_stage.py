"""Encoders beside a decoder: what is encoded when, where it is written, and how long it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.interfaces.request import Feature
from hardpoint.interfaces.scheduler import ENCODER_INPUTS, EncoderInputs
from hardpoint.interfaces.step import NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.encoder_stage import EncoderStage, refuse_inputs
from hardpoint_torch_runtime.runner.input_batch import ForeignTokens, InputBatch, InputBuilder
from hardpoint_torch_runtime.runner.slot_state import SlotState

CPU = torch.device("cpu")
SLOTS, BLOCK, CROSS_BLOCK, LONGEST = 4, 4, 3, 10


class Counting:
    """Encodes values to themselves, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def refuse_input(self, feature: Feature) -> str | None:
        return "too loud" if feature.modality == "noise" else None

    def encode(self, features: Sequence[Feature]) -> list[torch.Tensor]:
        self.asked += [feature.content_hash for feature in features]
        return [torch.from_numpy(feature.data["values"]) for feature in features]

    def example_input(self, num_tokens: int) -> Feature:
        return made_up("example", num_tokens)


def made_up(content: str, count: int, **fields: Any) -> Feature:
    values = np.arange(count, dtype=np.float32)[:, None] + 100 * len(content)
    known = {"modality": "text", "offset": 0, "length": 1, "num_encoder_tokens": count}
    return Feature(content_hash=content, data={"values": values}, **{**known, **fields})


class Bench:
    """A stage between a slot state and an input builder, as the runner has them."""

    def __init__(self, make_step: Callable[..., SchedulerOutput], make_row: Callable[..., NewRow]) -> None:
        self.make_step, self.make_row = make_step, make_row
        self.model = Counting()
        self.slots = SlotState(SLOTS, 40, [BLOCK, CROSS_BLOCK], foreign_tokens=[None, LONGEST])
        self.inputs = InputBuilder(self.slots, 24, CPU)
        self.stage = EncoderStage(self.model, self.slots, CPU)
        self.refused: dict[int, str] = {}

    def enter(self, slot: int, feature: Feature | None, blocks: Sequence[int] = (), generation: int = 1) -> None:
        row = self.make_row(slot, [7] * 6, [1, 2], generation=generation)
        cross = np.asarray(blocks, dtype=np.int32)
        features = () if feature is None else (feature,)
        row = msgspec.structs.replace(row, block_ids=(*row.block_ids, cross), features=features)
        self.slots.enter(row)
        self.stage.enter(row)

    def leave(self, slot: int) -> None:
        gone = np.asarray([slot], dtype=np.int32)
        self.slots.release(gone)
        self.stage.release(gone)

    def batch(self, *rows: tuple[int, int, int], plan: Any = None) -> InputBatch:
        """``rows`` are (slot, computed, scheduled)."""
        extensions = {} if plan is None else {ENCODER_INPUTS: plan}
        step = self.make_step(0, [(slot, 1, computed, count, False) for slot, computed, count in rows])
        step = msgspec.structs.replace(step, new_blocks=(step.new_blocks[0],) * 2, extensions=extensions)
        return self.stage.join(step, self.inputs.build(step), self.refused)

    def run(self, *rows: tuple[int, int, int], plan: Any = None) -> ForeignTokens:
        foreign = self.batch(*rows, plan=plan).foreign
        assert foreign is not None
        return foreign


@pytest.fixture
def bench(make_step: Callable[..., SchedulerOutput], make_row: Callable[..., NewRow]) -> Bench:
    return Bench(make_step, make_row)


def plan(*freed: str) -> EncoderInputs:
    none = np.zeros(0, dtype=np.int32)
    return EncoderInputs(none, none, freed)


def values(foreign: ForeignTokens) -> list[float]:
    assert foreign.hidden is not None
    found: list[float] = foreign.hidden[:, 0].tolist()
    return found


def slots_of(foreign: ForeignTokens) -> list[int]:
    mapping = foreign.slot_mappings[1]
    assert mapping is not None
    found: list[int] = mapping.tolist()
    return found


def test_a_model_with_an_encoder_is_known_by_its_methods() -> None:
    assert isinstance(Counting(), EncoderModel)
    assert not isinstance(object(), EncoderModel)


def test_inputs_are_encoded_when_their_rows_enter_and_written_to_their_blocks(bench: Bench) -> None:
    bench.enter(0, made_up("a", 5), [6, 4])
    bench.enter(2, made_up("bb", 4), [9, 3])
    first = bench.run((2, 0, 3), (0, 0, 2))
    assert values(first) == [200, 201, 202, 203, 100, 101, 102, 103, 104]
    assert slots_of(first) == [27, 28, 29, 9, 18, 19, 20, 12, 13]
    assert first.slot_mappings[0] is None
    assert first.seq_lens_cpu.tolist() == [4, 5]
    assert first.max_len == 5


def test_later_chunks_and_answers_find_them_there(bench: Bench) -> None:
    bench.enter(0, made_up("a", 5), [6, 4])
    bench.enter(1, made_up("bb", 2), [8])
    bench.run((0, 0, 2))
    mixed = bench.run((0, 2, 2), (1, 0, 6))
    assert values(mixed) == [200, 201]
    assert slots_of(mixed) == [24, 25]
    assert mixed.seq_lens_cpu.tolist() == [5, 2]
    later = bench.run((1, 6, 1), (0, 4, 2))
    assert later.hidden is None
    assert slots_of(later) == []
    assert later.seq_lens_cpu.tolist() == [2, 5]
    assert bench.model.asked == ["a", "bb"]


def test_tables_of_encoders_are_whole_in_every_step(bench: Bench) -> None:
    """They do not grow with the row, whose first token alone would reach one column."""
    bench.enter(0, made_up("a", 10), [6, 4, 5, 11])
    batch = bench.batch((0, 0, 1))
    assert batch.block_tables[1][0].tolist() == [6, 4, 5, 11]
    assert batch.slot_mappings[1].tolist() == [0]


def test_equal_inputs_are_encoded_once_and_kept_until_freed(bench: Bench) -> None:
    bench.enter(0, made_up("a", 2), [6])
    bench.enter(1, made_up("a", 2), [7])
    first = bench.run((0, 0, 1), (1, 0, 1), plan=plan())
    assert (values(first), slots_of(first)) == ([100, 101, 100, 101], [18, 19, 21, 22])
    assert (bench.model.asked, bench.stage.num_kept) == (["a"], 1)
    bench.enter(2, made_up("a", 2), [8])
    assert slots_of(bench.run((2, 0, 1))) == [24, 25]
    assert bench.model.asked == ["a"]
    bench.leave(2)
    bench.enter(2, made_up("a", 2), [9], generation=2)
    # Another process sends the plan by names.
    bench.stage.release(np.asarray([], dtype=np.int32))
    step = bench.make_step(0, [(2, 2, 0, 1, False)])
    freed = {"rows": [], "features": [], "freed": ["a"]}
    step = msgspec.structs.replace(step, new_blocks=(step.new_blocks[0],) * 2, extensions={ENCODER_INPUTS: freed})
    assert bench.stage.join(step, bench.inputs.build(step), {}).foreign is not None
    assert bench.model.asked == ["a", "a"]


def test_what_no_plan_speaks_of_is_not_kept(bench: Bench) -> None:
    bench.enter(0, made_up("a", 2), [6])
    bench.run((0, 0, 1))
    assert bench.stage.num_kept == 0


def test_a_preempted_row_is_written_anew(bench: Bench) -> None:
    bench.enter(0, made_up("a", 4), [6, 4])
    bench.run((0, 0, 4), plan=plan())
    bench.leave(0)
    bench.enter(0, made_up("a", 4), [2, 9])
    again = bench.run((0, 0, 6))
    assert (slots_of(again), again.seq_lens_cpu.tolist()) == ([6, 7, 8, 27], [4])
    assert bench.model.asked == ["a"]


def test_rows_that_fail_anyway_attend_to_nothing(bench: Bench) -> None:
    bench.enter(0, made_up("a", 4, modality="noise"), [6, 4])
    bench.enter(1, None)
    bench.enter(2, made_up("bb", 1), [5])
    bench.refused[0] = "too loud"
    foreign = bench.run((0, 0, 1), (1, 0, 1), (2, 0, 1))
    assert foreign.seq_lens_cpu.tolist() == [0, 0, 1]
    assert bench.model.asked == ["bb"]


def test_a_claim_about_content_makes_no_blocks_too_small(bench: Bench) -> None:
    bench.enter(0, made_up("a", 2), [6])
    bench.run((0, 0, 1), plan=plan())
    bench.enter(1, made_up("a", 4), [7, 8])
    assert slots_of(bench.run((1, 0, 1))) == [21, 22, 23, 24]


def test_too_few_blocks_are_a_fault_of_the_scheduler(bench: Bench) -> None:
    bench.enter(0, made_up("a", 4), [6])
    with pytest.raises(RuntimeError, match="slot 0 has 4 encoder tokens, but holds blocks for 3"):
        bench.run((0, 0, 1))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ((), "takes one input per request, not 0"),
        ((made_up("a", 1), made_up("b", 1)), "takes one input per request, not 2"),
        ((made_up("a", 1, offset=2),), "not to 1 positions from 2 on"),
        ((made_up("a", 1, length=0),), "not to 0 positions from 0 on"),
        ((made_up("a", 1, modality="noise"),), "too loud"),
    ],
)
def test_what_requests_may_bring(features: tuple[Feature, ...], message: str) -> None:
    reason = refuse_inputs(Counting(), features)
    assert reason is not None
    assert message in reason


def test_a_sound_input_is_taken() -> None:
    assert refuse_inputs(Counting(), (made_up("a", 3),)) is None
    keys: Mapping[str, np.ndarray] = made_up("a", 3).data
    assert list(keys) == ["values"]
