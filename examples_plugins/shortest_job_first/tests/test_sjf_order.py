"""The order of admission: short jobs first, and no job waits for ever."""

from __future__ import annotations

from shortest_job_first import Options, create

from hardpoint.interfaces import SchedulerLimits
from hardpoint.testing.scheduler_loop import SchedulerLoop, make_request, scheduler_context

LIMITS = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)


def order(jobs: list[tuple[str, int]], patience: int = 16) -> list[str]:
    """Ids in the order in which they end; each job is its id and the tokens it wants. One runs at a time."""
    scheduler = create(scheduler_context(LIMITS, 64), Options(patience=patience))
    loop = SchedulerLoop(scheduler, LIMITS, 64, 1)
    for name, tokens in jobs:
        loop.add(make_request(name, [5, 6, 7], tokens))
    loop.run()
    return list(loop.ends)


def test_short_jobs_come_first() -> None:
    assert order([("long", 40), ("short", 2), ("middle", 9)]) == ["short", "middle", "long"]


def test_equal_jobs_keep_their_order() -> None:
    assert order([("a", 5), ("b", 5), ("c", 5)]) == ["a", "b", "c"]


def test_a_long_job_is_passed_over_so_many_times_only() -> None:
    shorts = [(f"s{i}", 2) for i in range(6)]
    assert order([("long", 40), *shorts], patience=3).index("long") == 3
