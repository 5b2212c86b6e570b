"""The kit for hooks accepts a sound plugin and rejects each mutant."""

from __future__ import annotations

import inspect
import time
from collections.abc import MutableMapping, Set
from typing import Any

import pytest

from hardpoint.interfaces.hooks import HookSpecs, hookimpl
from hardpoint.testing.hooks_suite import HOOKS, HooksSuite, occasions
from hardpoint.testing.suite_runner import run_suite


class Audit:
    """Counts what runs, and edits what it may."""

    def __init__(self) -> None:
        self.running: dict[str, float] = {}
        self.num_steps = 0

    @hookimpl(tryfirst=True)
    def process_booting(self, environ: MutableMapping[str, str]) -> None:
        environ.setdefault("ACME_AUDIT", "on")

    @hookimpl
    def configure(self, config: dict[str, Any]) -> None:
        for engine in config["engines"].values():
            engine.setdefault("cache", {})["prefix_caching"] = False

    @hookimpl
    def process_started(self, roles: Set[Any], rank: int | None) -> None:
        self.place = f"{sorted(roles)} {rank}"

    @hookimpl(trylast=True)
    def process_stopping(self) -> None:
        self.running.clear()

    @hookimpl
    def request_added(self, request: Any) -> None:
        self.running[request.request_id] = request.arrival_time

    @hookimpl
    def request_finished(self, output: Any) -> None:
        self.running.pop(output.request_id, None)

    @hookimpl
    def step_finished(self, stats: Any) -> None:
        self.num_steps += 1

    @hookimpl
    def model_loaded(self, model_name: str) -> None:
        self.model = model_name


def make_suite(kind: type) -> type[HooksSuite]:
    class Suite(HooksSuite):
        def create_hooks(self) -> object:
            return kind()

    return Suite


class TestAudit(make_suite(Audit)):  # type: ignore[misc]
    pass


class Misspelt(Audit):
    @hookimpl
    def request_ended(self, output: Any) -> None:
        """There is no such hook."""


class Unmarked(Audit):
    def step_finished(self, stats: Any) -> None:
        """Looks like a hook."""


class AsksForMore(Audit):
    @hookimpl
    def step_finished(self, stats: Any, scheduler: Any) -> None:  # type: ignore[override]
        """No process passes a scheduler."""


class Wraps(Audit):
    @hookimpl(wrapper=True)
    def step_finished(self, stats: Any) -> Any:
        yield


class Deaf:
    """Implements nothing."""


class NeedsARank(Audit):
    @hookimpl
    def process_started(self, rank: int) -> None:  # type: ignore[override]
        self.port = 9000 + rank


class NeedsAStopReason(Audit):
    @hookimpl
    def request_finished(self, output: Any) -> None:
        self.last = output.stop_reason + 1


class NeedsTheBeginning(Audit):
    @hookimpl
    def process_stopping(self) -> None:
        del self.place


class Edits(Audit):
    @hookimpl
    def request_added(self, request: Any) -> None:
        request.sampling.extensions["seen"] = True


class EditsArrays(Audit):
    @hookimpl
    def request_added(self, request: Any) -> None:
        request.prompt_token_ids[0] = 0


class Returns(Audit):
    @hookimpl
    def request_added(self, request: Any) -> Any:
        return request


class Writes(Audit):
    @hookimpl
    def step_finished(self, stats: Any) -> None:
        time.sleep(0.001)


class FirstAndLast(Audit):
    @hookimpl(tryfirst=True, trylast=True)
    def step_finished(self, stats: Any) -> None:
        """Cannot be both."""


class Keeps(Audit):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    @hookimpl
    def request_finished(self, output: Any) -> None:
        self.all.append(output)


class EditsAgain(Audit):
    @hookimpl
    def configure(self, config: dict[str, Any]) -> None:
        config.setdefault("server", {})["port"] = config.get("server", {}).get("port", 8000) + 1


class PutsObjects(Audit):
    @hookimpl
    def configure(self, config: dict[str, Any]) -> None:
        config["server"] = {"allowed_hosts": ("a", "b")}


class OpensRoutes(Audit):
    @hookimpl
    def configure(self, config: dict[str, Any]) -> None:
        config.setdefault("server", {})["endpoints"] = ["acme"]


class Appends(Audit):
    @hookimpl
    def process_booting(self, environ: MutableMapping[str, str]) -> None:
        environ["ACME_PATH"] = environ.get("ACME_PATH", "") + ":/acme"


class SetsNumbers(Audit):
    @hookimpl
    def process_booting(self, environ: Any) -> None:
        environ["OMP_NUM_THREADS"] = 2


MUTANTS: dict[type, str] = {
    Misspelt: "test_it_is_accepted",
    Unmarked: "test_it_is_accepted",
    AsksForMore: "test_it_is_accepted",
    Wraps: "test_it_is_accepted",
    Deaf: "test_it_hears_something",
    NeedsARank: "test_every_occasion_is_taken",
    NeedsAStopReason: "test_every_occasion_is_taken",
    NeedsTheBeginning: "test_events_come_in_any_order",
    Edits: "test_what_it_observes_stays_as_it_is",
    EditsArrays: "test_what_it_observes_stays_as_it_is",
    Returns: "test_it_returns_nothing",
    Writes: "test_it_does_not_hold_up_the_loop",
    FirstAndLast: "test_its_place_in_the_order_is_clear",
    Keeps: "test_ended_requests_are_forgotten",
    EditsAgain: "test_settings_are_edited_once",
    PutsObjects: "test_settings_are_edited_once",
    OpensRoutes: "test_settings_are_edited_once",
    Appends: "test_the_environment_is_prepared_once",
    SetsNumbers: "test_the_environment_is_prepared_once",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed


@pytest.mark.slow
def test_one_object_for_all_processes_fails() -> None:
    shared = Audit()

    class Suite(HooksSuite):
        def create_hooks(self) -> object:
            return shared

    assert "cannot be used" in run_suite(Suite, only="separate").failed["test_instances_are_separate"]


def test_there_are_occasions_for_every_hook() -> None:
    """A new hook without samples would be tested by nobody."""
    samples = occasions()
    assert tuple(samples) == HOOKS
    for hook, calls in samples.items():
        arguments = set(inspect.signature(vars(HookSpecs)[hook]).parameters) - {"self"}
        assert calls
        assert all(set(call) == arguments for call in calls), hook
