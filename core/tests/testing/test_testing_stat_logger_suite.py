"""The kit for stat loggers accepts a small correct one and rejects each mutant."""

from __future__ import annotations

import time

import pytest

from hardpoint.interfaces import RequestFinished, StatLogger, StepObserved, TokensEmitted
from hardpoint.testing.stat_logger_suite import StatLoggerSuite
from hardpoint.testing.suite_runner import run_suite


class Totals(StatLogger):
    """Counts ended requests per model and lets them be scraped."""

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}

    def on_finished(self, event: RequestFinished) -> None:
        self.ended[event.model] = self.ended.get(event.model, 0) + 1

    def flush(self) -> None:
        """Nothing is pending."""

    def label(self, text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    def exposition(self) -> tuple[str, bytes]:
        lines = [f'ended_total{{model="{self.label(name)}"}} {count}\n' for name, count in self.ended.items()]
        return "text/plain; version=0.0.4", "".join(lines).encode()


def make_suite(kind: type[StatLogger]) -> type[StatLoggerSuite]:
    class Suite(StatLoggerSuite):
        def create_logger(self) -> StatLogger:
            return kind()

    return Suite


class TestTotals(make_suite(Totals)):  # type: ignore[misc]
    pass


class Sleeps(Totals):
    def on_step(self, event: StepObserved) -> None:
        time.sleep(0.001)


class KeepsRequests(Totals):
    def __init__(self) -> None:
        super().__init__()
        self.all: list[RequestFinished] = []

    def on_finished(self, event: RequestFinished) -> None:
        super().on_finished(event)
        self.all.append(event)


class NeedsTimes(Totals):
    def on_finished(self, event: RequestFinished) -> None:
        super().on_finished(event)
        assert event.ttft_s is not None


class Divides(Totals):
    def on_tokens(self, event: TokensEmitted) -> None:
        print(sum(event.inter_token_s) / len(event.inter_token_s), end="")


class ExpectsASteadyOrder(Totals):
    def on_step(self, event: StepObserved) -> None:
        self.ended.setdefault(event.model, 0)

    def on_finished(self, event: RequestFinished) -> None:
        self.ended[event.model] += 1


class RawLabels(Totals):
    def label(self, text: str) -> str:
        return text


class SeriesPerRequest(Totals):
    def on_finished(self, event: RequestFinished) -> None:
        self.ended[event.request_id] = 1


MUTANTS: dict[type[StatLogger], str] = {
    Sleeps: "test_an_event_does_not_block",
    KeepsRequests: "test_ended_requests_are_forgotten",
    NeedsTimes: "test_figures_may_be_missing_or_zero",
    Divides: "test_figures_may_be_missing_or_zero",
    ExpectsASteadyOrder: "test_events_come_in_any_order",
    RawLabels: "test_the_exposition_is_well_formed",
    SeriesPerRequest: "test_the_exposition_is_well_formed",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[StatLogger]) -> None:
    """L12.24."""
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed
