"""Results leave in order of submission, whether they wait for a device or not."""

from __future__ import annotations

import threading
import time
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_executors.outputs import OutputQueue


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from((0.0, 0.001))), max_size=20))
def test_deliveries_run_one_by_one_in_order(plan: list[tuple[bool, float]]) -> None:
    """R4.9: a result that is there at once does not overtake one that waits."""
    outputs = OutputQueue("test")
    done: list[int] = []
    running = threading.Lock()

    def deliver(number: int, seconds: float) -> None:
        assert running.acquire(blocking=False)
        time.sleep(seconds)
        done.append(number)
        running.release()

    for number, (waits, seconds) in enumerate(plan):
        outputs.deliver(partial(deliver, number, seconds if waits else 0.0), waits=waits)
    outputs.close()
    assert done == list(range(len(plan)))


def test_without_waiting_results_no_thread_is_needed() -> None:
    outputs = OutputQueue("unused")
    threads: list[str] = []
    outputs.deliver(lambda: threads.append(threading.current_thread().name), waits=False)
    assert threads == [threading.current_thread().name]
    outputs.close()
    outputs.close()


def test_after_the_device_has_caught_up_deliveries_are_immediate_again() -> None:
    outputs = OutputQueue("test")
    arrived = threading.Event()
    outputs.deliver(arrived.set, waits=True)
    assert arrived.wait(5)
    names: set[str] = set()
    deadline = time.monotonic() + 5
    while threading.current_thread().name not in names:
        outputs.deliver(lambda: names.add(threading.current_thread().name), waits=False)
        assert time.monotonic() < deadline
    outputs.close()


def test_closing_waits_no_longer_than_told() -> None:
    outputs = OutputQueue("test")
    release = threading.Event()

    def hold() -> None:
        release.wait(10)

    outputs.deliver(hold, waits=True)
    began = time.monotonic()
    outputs.close(0.2)
    assert 0.1 < time.monotonic() - began < 3
    release.set()
