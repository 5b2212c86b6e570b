"""Media items whose positions are computed in one step each, wherever any step has so many tokens (R3.46)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces import Feature, SchedulerOutput
from sched_support import Loop, expected, make_loop, request


def image(offset: int, length: int) -> Feature:
    return Feature(modality="image", content_hash=f"{length} at {offset}", offset=offset, length=length)


def prompt(length: int, start: int = 3) -> list[int]:
    return [3 + (start + i) % 90 for i in range(length)]


def loop_of(**fields: object) -> Loop:
    return make_loop(encoder_budget=64, encoder_cache_size=64, **fields)  # type: ignore[arg-type]


def spans(step: SchedulerOutput, slot: int) -> list[tuple[int, int]]:
    """What the step computes of the request in ``slot``, from one position to another."""
    rows = zip(step.slots.tolist(), step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist(), strict=True)
    return [(computed, computed + count) for where, computed, count in rows if where == slot]


def chunks(loop: Loop, slot: int = 0) -> list[tuple[int, int]]:
    return [span for step in loop.steps for span in spans(step, slot)]


@pytest.mark.parametrize(
    ("items", "fields", "ends"),
    [
        pytest.param([(6, 4)], {}, [6, 14, 20], id="before an item that would be cut"),
        pytest.param([(2, 5)], {}, [8, 16, 20], id="behind one that fits"),
        pytest.param([(0, 8), (8, 8)], {}, [8, 16, 20], id="between items that fill steps"),
        pytest.param([(3, 6), (10, 7)], {}, [3, 10, 18, 20], id="twice"),
        pytest.param([(2, 9)], {}, [8, 16, 20], id="an item that no step can hold is cut"),
        pytest.param([(6, 7), (13, 3)], {"max_scheduled_tokens": 7}, [6, 13, 20], id="fewer tokens are scheduled"),
    ],
)
def test_chunks_end_outside_of_items(items: list[tuple[int, int]], fields: dict[str, int], ends: list[int]) -> None:
    loop = loop_of(max_num_batched_tokens=8, **fields)
    features = tuple(image(*item) for item in items)
    loop.scheduler.add(request("a", prompt(20), max_tokens=3, features=features))
    loop.run()
    assert [end for _, end in chunks(loop)][: len(ends)] == ends
    assert loop.tokens("a") == expected(prompt(20), 3)


def test_a_running_row_waits_until_there_is_room_for_all_of_its_item() -> None:
    """Others that decode leave less than a whole step; text before the item takes what there is."""
    loop = loop_of(max_num_batched_tokens=8)
    for name in ("d", "e"):
        loop.scheduler.add(request(name, prompt(2, ord(name)), max_tokens=4))
    loop.step()
    loop.scheduler.add(request("a", prompt(24), max_tokens=2, features=(image(9, 7),)))
    loop.run()
    slot = 2
    assert [end for _, end in chunks(loop, slot)][:2] == [6, 9], "8 tokens of a step, less 2 for those that decode"
    inside = [span for span in chunks(loop, slot) if span[0] == 9]
    assert len(inside) == 1
    assert inside[0][1] >= 16
    assert loop.tokens("a") == expected(prompt(24), 2)


def test_a_cap_on_long_prompts_does_not_cut_items() -> None:
    loop = loop_of(max_num_batched_tokens=16, long_prefill_threshold=4)
    loop.scheduler.add(request("a", prompt(24), max_tokens=2, features=(image(0, 7), image(9, 7))))
    loop.scheduler.add(request("b", prompt(20, 40), max_tokens=2, features=(image(2, 9),)))
    loop.run()
    assert [end for _, end in chunks(loop, 0)][:4] == [7, 9, 16, 20]
    assert [end for _, end in chunks(loop, 1)][:3] == [2, 11, 15]


def test_what_a_cached_prefix_left_of_an_item_is_computed_at_once() -> None:
    loop = loop_of(max_num_batched_tokens=16)
    features = (image(3, 10),)
    loop.scheduler.add(request("a", prompt(14), max_tokens=1, features=features))
    loop.run()
    follow = [*prompt(9), *prompt(11, 50)]
    loop.scheduler.add(request("b", follow, max_tokens=1, features=features))
    step = loop.step()
    (row,) = step.new_rows
    assert spans(step, row.slot) == [(8, 20)]


@settings(max_examples=60)
@given(
    data=st.data(),
    budget=st.integers(6, 12),
    threshold=st.sampled_from([0, 3]),
    inflight=st.integers(1, 2),
    num_blocks=st.sampled_from([16, 64]),
)
def test_no_item_that_a_step_can_hold_is_ever_cut(
    data: st.DataObject, budget: int, threshold: int, inflight: int, num_blocks: int
) -> None:
    """Whoever runs beside it, and whoever is preempted; and everybody comes to an end."""
    loop = loop_of(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        long_prefill_threshold=threshold,
        max_inflight_steps=inflight,
    )
    items: dict[str, list[tuple[int, int]]] = {}
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        place, items[name] = 0, []
        for gap, length in data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3)):
            items[name].append((place + gap, length))
            place += gap + length
        tokens = prompt(place + data.draw(st.integers(1, 6)), ord(name))
        loop.scheduler.add(request(name, tokens, max_tokens=3, features=tuple(image(*item) for item in items[name])))
    names: dict[int, str] = {}
    while loop.scheduler.has_work():
        step = loop.step()
        names.update({row.slot: row.request_id for row in step.new_rows})
        for slot in step.slots.tolist():
            for _, end in spans(step, slot):
                for offset, length in items[names[slot]]:
                    assert not offset < end < offset + length or length > budget
        assert len(loop.steps) < 500
