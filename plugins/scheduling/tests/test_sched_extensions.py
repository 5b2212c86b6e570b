"""Features in their seats: what an extension may do to a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ExternalMatch, FinishReason, RequestView, SchedulerExtension, SchedulerOutput
from hardpoint_scheduling.schedulers.extensions import host_extensions
from sched_support import answer, expected, make_loop, make_scheduler, request

PROMPT = list(range(3, 13))


class Gate(SchedulerExtension):
    """Holds back the requests named in ``closed``."""

    name = "gate"

    def __init__(self, *closed: str) -> None:
        self.closed = set(closed)
        self.added: list[str] = []

    def on_added(self, request: RequestView) -> None:
        self.added.append(request.request_id)

    def is_blocked(self, request: RequestView) -> bool:
        return request.request_id in self.closed


class Connector(SchedulerExtension):
    """Brings ``num_tokens`` from elsewhere (None: cannot answer) and holds ended requests until told otherwise."""

    name = "connector"

    def __init__(self, num_tokens: int | None = 0, *, asynchronous: bool = False) -> None:
        self.num_tokens = num_tokens
        self.asynchronous = asynchronous
        self.allocated: list[tuple[str, int, int]] = []
        self.held: list[tuple[str, int]] = []
        self.let_go: list[str] = []
        self.seen: list[Any] = []

    def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
        return None if self.num_tokens is None else ExternalMatch(self.num_tokens, self.asynchronous)

    def after_allocation(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        self.allocated.append((request.request_id, len(block_ids[0]), num_external))

    def build_metadata(self, step: SchedulerOutput) -> Any | None:
        return {"rows": step.num_rows} if step.num_rows else None

    def on_output(self, step: SchedulerOutput, payload: Any | None) -> None:
        self.seen.append(payload)

    def may_free(self, request: RequestView) -> bool:
        self.held.append((request.request_id, request.num_computed_tokens))
        return False

    def take_freeable(self) -> Iterable[str]:
        taken, self.let_go = self.let_go, []
        return taken


class Drafts(SchedulerExtension):
    """Wants room for three more tokens."""

    name = "drafts"

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return 3


def test_a_blocked_request_does_not_stop_those_behind_it() -> None:
    """R3.2, R3.62, P3.8; R3.5: once free, it comes before newer ones."""
    gate = Gate("first", "second")
    loop = make_loop(extensions=(gate,), max_num_seqs=2)
    for name in ("first", "second", "third"):
        loop.scheduler.add(request(name, [*PROMPT, len(name)]))
    assert gate.added == ["first", "second", "third"]
    assert [row.request_id for row in loop.step().new_rows] == ["third"]
    loop.scheduler.add(request("fourth", [4]))
    gate.closed = {"second"}
    assert [row.request_id for row in loop.step().new_rows] == ["first"]
    assert loop.scheduler.stats().num_waiting == 2
    loop.scheduler.finish(["second"], FinishReason.ABORT)
    loop.run()
    for name in ("first", "third"):
        assert loop.tokens(name) == expected([*PROMPT, len(name)], 5)


def test_blocked_requests_keep_their_order() -> None:
    gate = Gate("a", "b", "c")
    loop = make_loop(extensions=(gate,), max_num_batched_tokens=64)
    for name in ("a", "b"):
        loop.scheduler.add(request(name, [4, 5]))
    loop.step()
    loop.scheduler.add(request("c", [4, 5]))
    loop.step()
    gate.closed = set()
    assert [row.request_id for row in loop.step().new_rows] == ["a", "b", "c"]
    loop.run()


def test_external_tokens_are_not_computed_but_one_always_is() -> None:
    """R3.64, P3.1."""
    for offered, computed in ((8, 8), (100, 9), (0, 0)):
        connector = Connector(offered)
        scheduler = make_scheduler(extensions=(connector,))
        scheduler.add(request("a", PROMPT))
        step = scheduler.schedule()
        assert step.num_computed_tokens.tolist() == [computed]
        assert connector.allocated == [("a", 3, computed)]
        scheduler.update(step, answer(step))
        scheduler.check_integrity()


def test_a_connector_that_cannot_answer_yet_is_asked_again() -> None:
    """R3.62."""
    connector = Connector(None)
    scheduler = make_scheduler(extensions=(connector,))
    scheduler.add(request("a", PROMPT))
    assert scheduler.schedule().is_empty
    assert scheduler.stats().num_waiting == 1
    connector.num_tokens = 4
    assert scheduler.schedule().num_computed_tokens.tolist() == [4]


def test_asynchronous_loads_are_refused_by_name() -> None:
    scheduler = make_scheduler(extensions=(Connector(4, asynchronous=True),))
    scheduler.add(request("a", PROMPT))
    with pytest.raises(ConfigError, match="'connector' loads KV asynchronously"):
        scheduler.schedule()


def test_metadata_travels_with_the_step_and_payloads_come_back() -> None:
    connector = Connector()
    scheduler = make_scheduler(extensions=(connector,))
    scheduler.add(request("a", PROMPT))
    step = scheduler.schedule()
    assert step.extensions == {"connector": {"rows": 1}}
    scheduler.update(step, answer(step, extensions={"connector": "done"}))
    step = scheduler.schedule()
    scheduler.update(step, answer(step))
    assert connector.seen == ["done", None]


def test_blocks_an_extension_still_needs_are_kept() -> None:
    """R3.85: until it lets go; the counters it sees are those of the end."""
    connector = Connector()
    scheduler = make_scheduler(extensions=(connector,))
    scheduler.add(request("a", PROMPT, max_tokens=1))
    step = scheduler.schedule()
    scheduler.update(step, answer(step))
    assert connector.held == [("a", 10)]
    assert scheduler.stats().num_free_blocks == 60
    scheduler.check_integrity()
    connector.let_go = ["unknown", "a"]
    scheduler.schedule()
    assert scheduler.stats().num_free_blocks == 63
    scheduler.check_integrity()


def test_lookahead_is_allocated_ahead() -> None:
    """R3.70."""
    loop = make_loop(extensions=(Drafts(),))
    loop.scheduler.add(request("a", PROMPT, max_tokens=9))
    step = loop.step()
    assert len(step.new_rows[0].block_ids[0]) == 4
    loop.run()
    assert loop.tokens("a") == expected(PROMPT, 9)


def test_lookahead_never_keeps_a_request_from_running() -> None:
    loop = make_loop(num_blocks=4, extensions=(Drafts(),))
    loop.scheduler.add(request("a", PROMPT, max_tokens=None))
    loop.run()
    assert loop.tokens("a") == expected(PROMPT, 3)


def test_hooks_that_nobody_overrides_are_not_called() -> None:
    host = host_extensions((SchedulerExtensionWithName(), Gate()))
    assert [e.name for e in host.blocking] == ["gate"]
    assert host.lookahead == host.external == host.metadata == ()
    assert len(host.all) == 2


class SchedulerExtensionWithName(SchedulerExtension):
    """Overrides nothing."""

    name = "idle"


def test_names_key_the_structs_so_they_are_unique() -> None:
    with pytest.raises(ConfigError, match="SchedulerExtension has no name"):
        host_extensions((SchedulerExtension(),))
    with pytest.raises(ConfigError, match="'gate' is used 2 times"):
        host_extensions((Gate(), Gate()))
