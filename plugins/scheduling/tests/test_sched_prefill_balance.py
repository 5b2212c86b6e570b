"""The cadence of prefills among data-parallel engines (R3.43)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hardpoint_scheduling.schedulers.prefill_balance import PrefillBalance
from sched_support import Loop, expected, make_loop, request


def balanced(**fields: object) -> Loop:
    return make_loop(prefill_interval=4, **fields)  # type: ignore[arg-type]


def until_aligned(loop: Loop) -> None:
    """Somebody decodes already, and the next step is an aligned one."""
    loop.step()
    while loop.scheduler._state.counters.next_step_id % 4:
        loop.step()


def test_prefills_wait_for_an_aligned_step_while_somebody_decodes() -> None:
    """R3.43: decodes run in every step; neither a chunk nor a new request is planned off the cadence."""
    loop = balanced(max_num_batched_tokens=16, long_prefill_threshold=6)
    loop.scheduler.add(request("decodes", [4, 5], max_tokens=30))
    until_aligned(loop)
    loop.scheduler.add(request("long", range(3, 17), max_tokens=2))
    counts = [loop.step().num_scheduled_tokens.tolist() for _ in range(9)]
    assert counts == [[1, 6], [1], [1], [1], [1, 6], [1], [1], [1], [1, 2]]
    assert loop.steps[-9].step_id % 4 == 0
    loop.run()
    assert loop.tokens("long") == expected([*range(3, 17)], 2)
    assert loop.tokens("decodes") == expected([4, 5], 30)


def test_nobody_waits_where_nobody_decodes() -> None:
    """R3.43: the cadence spares decodes; without any it would only cost time."""
    loop = balanced(max_num_batched_tokens=8)
    loop.step()
    loop.scheduler.add(request("long", range(3, 33), max_tokens=2))
    assert [loop.step().num_tokens for _ in range(4)] == [8, 8, 8, 6]


def test_after_a_full_aligned_step_prefills_go_on() -> None:
    """R3.43: more is waiting than aligned steps can take."""
    loop = balanced(max_num_batched_tokens=8)
    loop.scheduler.add(request("decodes", [4, 5], max_tokens=40))
    until_aligned(loop)
    loop.scheduler.add(request("long", range(3, 40), max_tokens=3))
    assert [loop.step().num_tokens for _ in range(6)] == [8, 8, 8, 8, 8, 3]
    loop.scheduler.add(request("next", range(40, 45), max_tokens=3))
    until_aligned(loop)
    loop.step()
    loop.run()
    assert loop.tokens("next") == expected([*range(40, 45)], 3)


@given(st.integers(1, 9), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=40))
def test_the_rule_in_full(interval: int, steps: list[tuple[bool, bool]]) -> None:
    """R3.43: deferred only off the cadence, beside a decode, and unless the last aligned step was full."""
    balance, was_full = PrefillBalance(interval), False
    assert balance.enabled == (interval > 1)
    for step_id, (any_decodes, full) in enumerate(steps):
        aligned = step_id % interval == 0
        assert balance.defers(step_id, any_decodes) == (not aligned and any_decodes and not was_full)
        balance.note(step_id, full)
        was_full = full if aligned else was_full
