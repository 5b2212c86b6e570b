"""The suite for graph backends passes the fake one, and every mutant of it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hardpoint.interfaces.graph_backend import GraphBackend
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.fake_platform import FakeGraphPool
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch.fake_graph_backend import FakeGraph, FakeGraphBackend
from hardpoint_testing_torch.graph_backend_suite import GraphBackendSuite

Run = Callable[[], Any]
Inputs = Sequence[torch.Tensor]


class FakeSuite(GraphBackendSuite):
    def create_backend(self, ctx: WorkerContext) -> GraphBackend:
        return FakeGraphBackend()

    def create_pool(self) -> FakeGraphPool:
        return FakeGraphPool()

    def bytes_in_use(self, pool: FakeGraphPool) -> int:
        return pool.bytes_in_use


class TestFake(FakeSuite):
    """The whole suite."""


def suite_of(backend: Callable[[], GraphBackend]) -> type[FakeSuite]:
    class Suite(FakeSuite):
        def create_backend(self, ctx: WorkerContext) -> GraphBackend:
            return backend()

    return Suite


class Other(FakeGraphBackend):
    """Makes recordings of the class ``recording``, which know the call they were made from."""

    recording: type[Recording]

    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        graph = super().capture(run, inputs, pool)
        graph.__class__ = self.recording
        assert isinstance(graph, Recording)
        graph.run = run
        return graph


class Recording(FakeGraph[Any]):
    run: Run


class Eager(Recording):
    """Runs the call anew each time, with whatever the host decides by then."""

    def replay(self) -> None:
        super().replay()
        self.run()


class CallsAgain(Other):
    recording = Eager


class Moving(Recording):
    def replay(self) -> None:
        super().replay()
        if isinstance(self.output, dict):
            self.output = dict(self.output)
            self.output["hidden"] = self.output["hidden"].clone()


class MovesResults(Other):
    recording = Moving


class CopiesInputs(FakeGraphBackend):
    """What is written into the inputs after the capture never arrives."""

    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        graph = super().capture(run, inputs, pool)
        taken = {tensor.data_ptr(): tensor.clone() for tensor in inputs}
        for number, call in enumerate(graph.calls):
            args = tuple(taken.get(a.data_ptr(), a) if isinstance(a, torch.Tensor) else a for a in call.args)
            graph.calls[number] = call._replace(args=args)
        return graph


class ForgetsAddresses(FakeGraphBackend):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        graph = super().capture(run, inputs, pool)
        graph.input_addresses = ()
        graph._inputs = ()
        return graph


class RunsTwice(FakeGraphBackend):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        run()
        return super().capture(run, inputs, pool)


class LosesState(FakeGraphBackend):
    """Writes in place are left out of the recording."""

    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        graph = super().capture(run, inputs, pool)
        graph.calls = [call for call in graph.calls if "add_" not in call.operator.name()]
        return graph


class SharesResults(FakeGraphBackend):
    """Results of all recordings lie in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.zeros(4096)

    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        def moved() -> Any:
            result = run()
            if isinstance(result, dict):
                hidden = result["hidden"]
                result["hidden"] = self.place[: hidden.numel()].view(hidden.shape).copy_(hidden)
            return result

        return super().capture(moved, inputs, pool)


class WrapsErrors(FakeGraphBackend):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        try:
            return super().capture(run, inputs, pool)
        except ZeroDivisionError as error:
            raise RuntimeError("the capture failed") from error


class StaysCapturing(FakeGraphBackend):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        try:
            return super().capture(run, inputs, pool)
        except BaseException:
            self._capturing = True
            raise


class Nests(FakeGraphBackend):
    def refuse(self) -> str | None:
        return None


class Waits(FakeGraphBackend):
    """Lets the call read values on the host, and records none of it."""

    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        try:
            return super().capture(run, inputs, pool)
        except RuntimeError as error:
            if "waits for the device" not in str(error):
                raise
            return FakeGraph([], inputs, run(), 0, pool)


class Undying(Recording):
    def release(self) -> None:
        pass


class NeverReleases(Other):
    recording = Undying


class Fragile(Recording):
    def release(self) -> None:
        if self._released:
            raise RuntimeError("released already")
        super().release()


class ReleasesOnce(Other):
    recording = Fragile


class Leaks(FakeGraphBackend):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        graph = super().capture(run, inputs, pool)
        graph.allocated_bytes = 0
        return graph


class RefusesWithoutAReason(FakeGraphBackend):
    def refuse(self) -> str | None:
        return " "


class Absent(FakeGraphBackend):
    def refuse(self) -> str | None:
        return "there is no such device"


class CapturesAnyway(Absent):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        return FakeGraph([], inputs, run(), 0, pool)


class FailsInOtherWords(Absent):
    def capture(self, run: Run, inputs: Inputs, pool: Any) -> FakeGraph[Any]:
        raise RuntimeError("error 719")


class ChangesItsMind(FakeGraphBackend):
    asked = 0

    def refuse(self) -> str | None:
        self.asked += 1
        return "not now" if self.asked % 2 else None


MUTANTS: dict[str, type[GraphBackend]] = {
    "calls again": CallsAgain,
    "moves results": MovesResults,
    "copies inputs": CopiesInputs,
    "forgets addresses": ForgetsAddresses,
    "runs twice": RunsTwice,
    "loses state": LosesState,
    "shares results": SharesResults,
    "wraps errors": WrapsErrors,
    "stays capturing": StaysCapturing,
    "nests": Nests,
    "waits": Waits,
    "never releases": NeverReleases,
    "releases once": ReleasesOnce,
    "leaks": Leaks,
    "refuses without a reason": RefusesWithoutAReason,
    "captures anyway": CapturesAnyway,
    "fails in other words": FailsInOtherWords,
    "changes its mind": ChangesItsMind,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str) -> None:
    assert run_suite(suite_of(MUTANTS[name]), first_failure=True).failed


def test_a_backend_that_refuses_is_held_to_its_refusal() -> None:
    outcome = run_suite(suite_of(Absent))
    assert outcome.failed == {}
    assert {"test_refusing_is_an_answer", "test_what_is_refused_is_not_captured"} <= outcome.passed
    assert "there is no such device" in outcome.skipped["test_a_replay_equals_an_eager_call"]


def test_a_patch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.silu)

    def silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return input * torch.sigmoid(input)

    class Patches(FakeGraphBackend):
        def __init__(self) -> None:
            super().__init__()
            torch.nn.functional.silu = silu

    failed = run_suite(suite_of(Patches), only="patches_nothing").failed
    assert "torch.nn.functional.silu" in failed["test_creating_and_capturing_patches_nothing"]
