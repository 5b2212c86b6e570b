"""Media items: encoded whole, within a budget, kept while they are read, and told to the workers (R3.46)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    ENCODER_INPUTS,
    EncoderInputs,
    Feature,
    FinishReason,
    RowFailure,
    RunnerOutput,
    SchedulerExtension,
    SchedulerOutput,
)
from hardpoint.ipc import Decoder, encode
from hardpoint_scheduling.schedulers.encoder_inputs import EncoderPlanner
from hardpoint_scheduling.schedulers.extensions import host_extensions
from hardpoint_scheduling.schedulers.factories import create_priority
from sched_support import Loop, answer, expected, make_loop, make_scheduler, request


def image(offset: int, length: int, name: str = "", size: int | None = None) -> Feature:
    return Feature(
        modality="image",
        content_hash=name or f"image at {offset}",
        offset=offset,
        length=length,
        num_encoder_tokens=size,
    )


def media_loop(budget: int = 8, cache: int = 16, **fields: object) -> Loop:
    return make_loop(encoder_budget=budget, encoder_cache_size=cache, **{"max_num_batched_tokens": 64, **fields})  # type: ignore[arg-type]


def encoded(step: SchedulerOutput) -> list[tuple[int, int]]:
    """Row of the step and place in its request's features, per item to encode."""
    inputs = step.extensions.get(ENCODER_INPUTS)
    if inputs is None:
        return []
    assert isinstance(inputs, EncoderInputs)
    return list(zip(inputs.rows.tolist(), inputs.features.tolist(), strict=True))


def planner(loop: Loop) -> EncoderPlanner:
    made = loop.scheduler._state.encoder
    assert made is not None
    return made


def prompt(length: int, start: int = 3) -> list[int]:
    return [3 + (start + i) % 90 for i in range(length)]


# What a step may take


def test_items_run_in_the_step_that_first_reads_them() -> None:
    """R3.46: and only then; text rows are not looked at."""
    loop = media_loop(max_num_batched_tokens=12)
    loop.scheduler.add(request("text", prompt(2, 50)))
    loop.scheduler.add(request("a", prompt(20), features=(image(4, 3), image(14, 4))))
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [2, 10]
    assert encoded(step) == [(1, 0)]
    step = loop.step()
    assert encoded(step) == [(1, 1)]
    loop.run()
    assert loop.tokens("a") == expected(prompt(20), 5)
    assert [encoded(step) for step in loop.steps[2:] if step.num_tokens] == [[]] * 4


def test_an_item_that_does_not_fit_ends_the_tokens_before_it() -> None:
    """R3.46: never a part of an item; the rest of the budget is for others."""
    loop = media_loop(budget=8)
    loop.scheduler.add(request("a", prompt(30), features=(image(2, 5), image(10, 5), image(20, 5))))
    loop.scheduler.add(request("b", prompt(6, 60), features=(image(1, 3),)))
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [10, 6], "5 of 8 are taken, so 3 fit and 5 do not"
    assert encoded(step) == [(0, 0), (1, 0)]
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [10, 1]
    assert encoded(step) == [(0, 1)]
    loop.run()
    assert loop.tokens("a") == expected(prompt(30), 5)
    assert loop.tokens("b") == expected(prompt(6, 60), 5)


def test_an_item_at_the_very_start_that_does_not_fit_schedules_nothing() -> None:
    """R3.46, R3.47: the request waits, in place, and those behind it too."""
    loop = media_loop(budget=4)
    for name in ("a", "b"):
        loop.scheduler.add(request(name, prompt(6, ord(name)), features=(image(0, 4, name),)))
    assert loop.step().num_rows == 1
    assert encoded(loop.step()) == [(1, 0)]
    loop.run()
    assert loop.tokens("b") == expected(prompt(6, ord("b")), 5)


def test_a_prefix_hit_that_ends_inside_an_item_waits_for_the_whole_item() -> None:
    """R3.46: 0 tokens as long as it does not fit."""
    loop = media_loop(budget=6, max_num_seqs=3)
    features = (image(2, 6, "shared"),)
    loop.scheduler.add(request("a", prompt(12), max_tokens=1, features=features))
    loop.run()
    planner(loop).cache.discard("shared")
    loop.scheduler.add(request("big", prompt(10, 60), features=(image(1, 6, "other"),)))
    follow = [*prompt(5), 77, 78, 79, 80]
    loop.scheduler.add(request("b", follow, features=features))
    step = loop.step()
    assert [row.request_id for row in step.new_rows] == ["big"], "4 of 9 tokens are cached, the item is not"
    step = loop.step()
    assert encoded(step) == [(1, 0)]
    loop.run()
    assert loop.tokens("b") == expected(follow, 5)


def test_items_behind_the_cached_prefix_are_not_encoded() -> None:
    """R3.46: their KV is there."""
    loop = media_loop()
    features = (image(1, 4), image(9, 2))
    loop.scheduler.add(request("a", prompt(12), max_tokens=1, features=features))
    loop.run()
    planner(loop).cache.reset()
    loop.scheduler.add(request("b", prompt(12), max_tokens=1, features=features))
    assert encoded(loop.step()) == [(0, 1)]


def test_equal_content_is_encoded_once() -> None:
    """R3.46: by whoever comes first, also within one step and one request."""
    loop = media_loop(budget=4)
    for name in ("a", "b"):
        loop.scheduler.add(
            request(name, prompt(12, ord(name)), features=(image(1, 4, "cat"), image(7, 4, "cat")), max_tokens=2)
        )
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [12, 12]
    assert encoded(step) == [(0, 0)]
    planner(loop).cache.check_integrity()
    loop.run()
    assert planner(loop).cache.num_used == 0
    assert "cat" in planner(loop).cache, "kept for the next one"


def test_the_budget_counts_embeddings_and_not_positions() -> None:
    """R3.46."""
    loop = media_loop(budget=8, cache=8)
    loop.scheduler.add(request("a", prompt(12), features=(image(1, 2, size=6), image(5, 2, size=6))))
    assert loop.step().num_scheduled_tokens.tolist() == [5]
    # The cache has room for one output: the second one waits until all positions of the first are processed.
    assert loop.step().num_scheduled_tokens.tolist() == [7]
    loop.run()
    assert loop.tokens("a") == expected(prompt(12), 5)


# What is kept, and for how long


def test_an_output_is_kept_until_its_last_position_is_processed() -> None:
    """R3.46: a prompt in chunks reads it in several steps."""
    loop = media_loop(max_num_batched_tokens=4)
    loop.scheduler.add(request("a", prompt(14), features=(image(2, 8),)))
    used = []
    for _ in range(5):
        loop.step()
        used.append(planner(loop).cache.num_used)
    assert used == [8, 8, 8, 0, 0]
    assert not planner(loop).watched.any()
    assert planner(loop).reserve(loop.scheduler._state.live["a"], 15, 1) == 1


def test_workers_are_told_which_outputs_go() -> None:
    """R3.46: before the step that needs the room, and each once."""
    loop = media_loop(budget=8, cache=8)
    for name in ("a", "b", "c"):
        loop.scheduler.add(request(name, prompt(8, ord(name)), max_tokens=1, features=(image(0, 5, name),)))
        loop.run()
    told = [step.extensions[ENCODER_INPUTS].freed for step in loop.steps if ENCODER_INPUTS in step.extensions]
    assert told == [(), ("a",), ("b",)]


def test_a_request_that_ends_or_is_preempted_lets_go_of_its_outputs() -> None:
    """R3.78."""
    loop = media_loop(max_num_batched_tokens=6)
    loop.scheduler.add(request("a", prompt(20), features=(image(2, 7, "x"), image(10, 2, "y"))))
    loop.step()
    assert planner(loop).cache.num_used == 7
    loop.scheduler._lifecycle.preempt(loop.scheduler._state.running.requests[0])
    assert planner(loop).cache.num_used == 0
    assert not planner(loop).watched.any()
    step = loop.step()
    assert encoded(step) == [], "the output is still there"
    loop.scheduler.finish(["a"], FinishReason.ABORT)
    assert planner(loop).cache.num_used == 0
    planner(loop).cache.check_integrity()


def test_outputs_of_a_failed_row_are_not_trusted() -> None:
    loop = media_loop()
    loop.scheduler.add(request("a", prompt(8), features=(image(1, 4, "x"),)))
    step = loop.scheduler.schedule()
    failure = RowFailure(int(step.slots[0]), int(step.generations[0]), "not finite")
    none = np.zeros(0, dtype=np.int32)
    output = msgspec.structs.replace(
        answer(step), failures=(failure,), num_sampled=np.zeros(1, np.int32), token_ids=none
    )
    loop.scheduler.update(step, output)
    assert "x" not in planner(loop).cache


def test_steps_under_way_still_read_their_outputs() -> None:
    """R3.46, R3.77: several steps in flight."""
    scheduler = make_scheduler(encoder_budget=8, encoder_cache_size=8, max_num_batched_tokens=6, max_inflight_steps=3)
    scheduler.add(request("a", prompt(12), features=(image(1, 4, "x"), image(8, 4, "y"))))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (encoded(first), encoded(second)) == ([(0, 0)], [(0, 1)])
    made = scheduler._state.encoder
    assert made is not None
    assert made.cache.num_used == 8, "the first step is not processed"
    scheduler.update(first, answer(first))
    third = scheduler.schedule()
    assert made.cache.num_used == 4
    scheduler.update(second, answer(second))
    scheduler.update(third, answer(third))
    scheduler.schedule()
    assert made.cache.num_used == 0
    scheduler.check_integrity()


# What comes of decisions that are taken back


def test_a_victim_returns_its_items_to_the_step() -> None:
    """R3.51: the encoder's budget is whole again, and another row that counted on its output encodes it."""
    made = EncoderPlanner(budget=8, cache_size=8, num_slots=4)
    loop = make_loop()
    for name in ("a", "b"):
        loop.scheduler.add(request(name, prompt(6), features=(image(1, 4, "cat"),)))
    a, b = (loop.scheduler._state.live[name] for name in "ab")
    made.begin_step()
    assert (made.reserve(a, 0, 6), made.reserve(b, 0, 6)) == (6, 6)
    assert made.budget_left == 4
    made.give_up(a)
    assert made.budget_left == 4, "now b encodes it"
    inputs = made.build([b])
    assert inputs is not None
    assert (inputs.rows.tolist(), inputs.features.tolist()) == ([0], [0])
    made.begin_step()
    made.give_up(b)
    made.cache.check_integrity()
    assert (made.budget_left, made.cache.num_used) == (8, 0)


def test_tokens_that_are_not_granted_return_their_items() -> None:
    """R3.46: reserved for more than the step's budget came to in the end."""
    made = EncoderPlanner(budget=8, cache_size=8, num_slots=4)
    loop = make_loop()
    loop.scheduler.add(request("a", prompt(12), features=(image(1, 3, "x"), image(7, 3, "y"))))
    a = loop.scheduler._state.live["a"]
    made.begin_step()
    assert made.reserve(a, 0, 12) == 12
    assert made.budget_left == 2
    made.settle(a, 6)
    assert made.budget_left == 5
    assert "y" not in made.cache
    made.settle_rows([], np.zeros(0, dtype=np.int32))
    assert (made.budget_left, len(made.cache)) == (8, 0)


def test_running_rows_share_the_budget_in_their_order() -> None:
    """R3.46: what the head takes the tail lacks, and rows without items get all they want."""
    loop = media_loop(budget=4, max_num_batched_tokens=20, long_prefill_threshold=6)
    for name in ("a", "b"):
        loop.scheduler.add(request(name, prompt(14, ord(name)), features=(image(8, 4, name),)))
    loop.scheduler.add(request("text", prompt(20, 70)))
    assert loop.step().num_scheduled_tokens.tolist() == [6, 6, 6]
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [6, 2, 6]
    assert encoded(step) == [(0, 0)]
    assert encoded(loop.step()) == [(1, 0)]
    loop.run()
    for name in ("a", "b"):
        assert loop.tokens(name) == expected(prompt(14, ord(name)), 5)


def test_preemption_under_a_tight_pool_changes_no_token() -> None:
    """R3.51, I3.8: with items, priorities and chunks all at once."""
    loop = media_loop(
        budget=5, cache=5, num_blocks=12, max_num_batched_tokens=9, create=create_priority, max_num_seqs=3
    )
    prompts = {f"r{i}": prompt(8 + i, 10 * i) for i in range(6)}
    for i, (name, ids) in enumerate(prompts.items()):
        features = (image(1, 3, f"x{i % 2}"), image(5, 2, f"y{i}"))
        loop.scheduler.add(request(name, ids, 8, priority=-i, features=features))
        loop.step()
        planner(loop).cache.check_integrity()
    loop.run()
    assert loop.scheduler.stats().num_preemptions > 0
    assert {name: loop.tokens(name) for name in prompts} == {n: expected(ids, 8) for n, ids in prompts.items()}
    assert planner(loop).cache.num_used == 0


# Refusals and the wire


@pytest.mark.parametrize(("chunked", "refused"), [(True, False), (False, True)])
def test_items_no_step_could_take_are_refused_at_once(chunked: bool, refused: bool) -> None:
    """R3.46: a request that would wait for ever says so; without chunks all its items run in one step."""
    scheduler = make_scheduler(
        encoder_budget=8, encoder_cache_size=12, chunked_prefill=chunked, max_num_batched_tokens=64
    )
    output = scheduler.add(request("big", prompt(20), features=(image(0, 9),)))
    assert output is not None
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "9 embeddings of media at once are more than encoder_budget (8)" in output.error
    both = scheduler.add(request("two", prompt(20), features=(image(0, 5), image(8, 5))))
    assert (both is not None) == refused


def test_without_a_budget_items_are_planned_from_the_first_one_on() -> None:
    loop = make_loop(max_num_batched_tokens=8, max_model_len=64)
    loop.scheduler.add(request("text", prompt(12, 60)))
    loop.step()
    assert loop.scheduler._state.encoder is None
    loop.scheduler.add(request("a", prompt(30), features=(image(0, 29),)))
    step = loop.step()
    assert encoded(step) == [(1, 0)]
    assert len(step.new_rows[0].features) == 1
    assert planner(loop).cache.capacity == 64
    loop.run()


def test_the_name_of_the_struct_is_reserved() -> None:
    class Encoder(SchedulerExtension):
        name = ENCODER_INPUTS

    with pytest.raises(ConfigError, match="'encoder_inputs', which is reserved"):
        host_extensions((Encoder(),))


def test_encoder_inputs_travel() -> None:
    loop = media_loop()
    loop.scheduler.add(request("a", prompt(12), features=(image(0, 4),)))
    step = loop.scheduler.schedule()
    received: SchedulerOutput = Decoder(SchedulerOutput).decode(encode(step))
    inputs = msgspec.convert(received.extensions[ENCODER_INPUTS], EncoderInputs)
    assert inputs.features.tolist() == [0]
    assert isinstance(loop.worker.execute(step), RunnerOutput)


def test_a_reset_forgets_outputs_too() -> None:
    """R3.22: new weights make them stale as well."""
    loop = media_loop()
    loop.scheduler.add(request("a", prompt(8), max_tokens=1, features=(image(0, 4, "x"),)))
    loop.run()
    assert loop.scheduler.reset_prefix_cache()
    assert "x" not in planner(loop).cache
