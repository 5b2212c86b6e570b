"""Conformance of the plugin kind ``graph_backend``: derive from :class:`GraphBackendSuite` and name yours.

Where a backend refuses, as one of a device that is not there does, the suite checks the refusal and skips the rest with
its reason.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from hardpoint.interfaces.graph_backend import CapturedGraph, GraphBackend
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.module_guard import ModuleGuard
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["GraphBackendSuite"]

ROWS = (1, 4, 16)
WIDTH = 8


class _Step(NamedTuple):
    """Small, with all that a forward has: a product, memory of its own, state written in place, a nested result."""

    x: torch.Tensor
    weight: torch.Tensor
    state: torch.Tensor

    @classmethod
    def make(cls, rows: int, device: str) -> _Step:
        generator = torch.Generator().manual_seed(rows)
        drawn = (torch.randn(shape, generator=generator) for shape in ((rows, WIDTH), (WIDTH, WIDTH), (WIDTH,)))
        return cls(*(tensor.to(device) for tensor in drawn))

    def run(self) -> dict[str, Any]:
        hidden = torch.nn.functional.silu(self.x @ self.weight)
        self.state.add_(hidden.sum(0))
        return {"hidden": hidden, "more": (hidden[:, ::2], hidden.square())}

    def expected(self) -> tuple[dict[str, Any], torch.Tensor]:
        """What a run from here gives and makes of the state, without touching either."""
        copy = _Step(*(tensor.clone() for tensor in self))
        return copy.run(), copy.state

    def refill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))


class GraphBackendSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.graph_backend.GraphBackend`, on ``device``."""

    kind: ClassVar[str] = "graph_backend"
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-5
    """Between a replay and an eager call, relative and absolute: kernels may be chosen anew in a capture."""

    def create_backend(self, ctx: WorkerContext) -> GraphBackend:
        """The backend under test, as its factory makes it."""
        made: GraphBackend = self.create_plugin(ctx)
        return made

    def create_pool(self) -> Any:
        """What the platform's ``graph_pool()`` would be."""
        return None

    def bytes_in_use(self, pool: Any) -> int | None:
        """What recordings hold of ``pool``; None: it cannot be asked, and nothing is checked."""
        del pool
        return None

    @pytest.fixture
    def worker_context(self) -> WorkerContext:
        return self.context(WorkerContext, device=torch.device(self.device))

    @pytest.fixture
    def backend(self, worker_context: WorkerContext) -> GraphBackend:
        return self.create_backend(worker_context)

    @pytest.fixture
    def able(self, backend: GraphBackend) -> GraphBackend:
        """The backend, where it captures."""
        if (reason := backend.refuse()) is not None:
            pytest.skip(f"it refuses: {reason}")
        return backend

    def capture(self, backend: GraphBackend, step: _Step, pool: Any = None) -> CapturedGraph[dict[str, Any]]:
        """After an eager call, as callers do: libraries get their memory the first time they are used."""
        step.expected()
        return backend.capture(step.run, [step.x], self.create_pool() if pool is None else pool)

    def check(self, graph: CapturedGraph[dict[str, Any]], step: _Step, what: str) -> None:
        """A replay makes of the inputs' present contents what an eager call would, the state included."""
        wanted, state = step.expected()
        graph.replay()
        for title, found, expected in (
            ("hidden", graph.output["hidden"], wanted["hidden"]),
            ("a view", graph.output["more"][0], wanted["more"][0]),
            ("a second result", graph.output["more"][1], wanted["more"][1]),
            ("the state", step.state, state),
        ):
            said = partial("{}: {} is not what an eager call gives: {}".format, what, title)
            torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance, msg=said)

    def test_refusing_is_an_answer(self, backend: GraphBackend) -> None:
        """A reason or None, the same when asked again; never an exception."""
        reason = backend.refuse()
        assert reason is None or (isinstance(reason, str) and reason.strip()), f"refuse() answers {reason!r}"
        assert backend.refuse() == reason, "refuse() answers the same question in another way"

    def test_what_is_refused_is_not_captured(self, backend: GraphBackend) -> None:
        """The error says why, and the call does not run."""
        if (reason := backend.refuse()) is None:
            pytest.skip("it refuses nothing here")
        calls: list[int] = []
        with pytest.raises(RuntimeError) as caught:
            backend.capture(lambda: calls.append(1), [], self.create_pool())
        assert reason in str(caught.value), f"capture() says {str(caught.value)!r}, refuse() says {reason!r}"
        assert calls == [], "the call ran although its capture was refused"

    def test_creating_and_capturing_patches_nothing(self, worker_context: WorkerContext) -> None:
        """P12.4: no function or class of core, runtime or framework changes."""
        guard = ModuleGuard(("hardpoint", "hardpoint_torch_runtime"), self_changing=("torch",))
        backend = self.create_backend(worker_context)
        if backend.refuse() is None:
            self.capture(backend, _Step.make(2, self.device)).release()
        changed = guard.changes()
        assert changed == [], f"it replaced {', '.join(changed)}"

    @pytest.mark.parametrize("rows", ROWS)
    def test_a_replay_equals_an_eager_call(self, able: GraphBackend, rows: int) -> None:
        """I9.2: with new contents each time, and state that goes on from where the last one left it."""
        step = _Step.make(rows, self.device)
        graph = self.capture(able, step)
        for round_ in range(3):
            step.refill(100 + round_)
            self.check(graph, step, f"replay {round_}")
        step.weight.mul_(0.5)
        self.check(graph, step, "after the weight was changed in place")

    def test_the_call_happens_once(self, able: GraphBackend) -> None:
        """The host's part is not repeated: what it decided during the capture stays decided."""
        x, factor, calls = torch.ones(3, device=self.device), [2.0], list[int]()

        def run() -> torch.Tensor:
            calls.append(1)
            return x * factor[0]

        graph = able.capture(run, [x], self.create_pool())
        factor[0] = 100.0
        for value in (3.0, 5.0):
            x.fill_(value)
            graph.replay()
            assert graph.output.tolist() == [2 * value] * 3
        assert len(calls) == 1, f"the call ran {len(calls)} times"

    def test_places_stay(self, able: GraphBackend) -> None:
        """R9.48: results are read and inputs written at the addresses of the capture."""
        step = _Step.make(4, self.device)
        graph = self.capture(able, step)
        assert tuple(graph.input_addresses) == (step.x.data_ptr(),), "input_addresses are not those of the inputs"
        kept = graph.output["hidden"], graph.output["more"][0]
        places = [tensor.data_ptr() for tensor in kept]
        for seed in (7, 8):
            step.refill(seed)
            graph.replay()
        now = graph.output["hidden"], graph.output["more"][0]
        assert [tensor.data_ptr() for tensor in now] == places, "a replay moved its results"
        assert torch.equal(kept[0], now[0]), "results that were kept from the capture are not written any more"

    def test_recordings_share_a_pool(self, able: GraphBackend) -> None:
        """One for each size, replayed in any order; none spoils what another one gave."""
        pool = self.create_pool()
        steps = {rows: _Step.make(rows, self.device) for rows in sorted(ROWS, reverse=True)}
        graphs = {rows: self.capture(able, step, pool) for rows, step in steps.items()}
        for seed, rows in enumerate((4, 1, 16, 16, 4, 1)):
            steps[rows].refill(seed)
            self.check(graphs[rows], steps[rows], f"{rows} rows among others")
        graphs[4].replay()
        last = graphs[4].output["hidden"].clone()
        graphs[1].replay()
        assert torch.equal(graphs[4].output["hidden"], last), "a replay overwrote the results of another recording"

    def test_what_the_call_raises_passes(self, able: GraphBackend) -> None:
        """Unchanged, and nothing stays recorded: the next capture is an ordinary one."""
        step = _Step.make(4, self.device)

        def fail() -> None:
            step.run()
            raise ZeroDivisionError("of the call")

        with pytest.raises(ZeroDivisionError, match="of the call"):
            able.capture(fail, [step.x], self.create_pool())
        self._still_works(able)

    def test_waiting_for_the_device_is_a_fault(self, able: GraphBackend) -> None:
        """A value read on the host would be that of the capture for ever."""
        x = torch.ones(3, device=self.device)
        with pytest.raises(RuntimeError) as caught:
            able.capture(lambda: x * x.sum().item(), [x], self.create_pool())
        assert str(caught.value).strip(), "the error names no fault"
        self._still_works(able)

    def test_no_capture_within_a_capture(self, able: GraphBackend) -> None:
        """The inner one is refused, and the outer one does not suffer."""
        step, told = _Step.make(4, self.device), list[str | None]()

        def run() -> dict[str, Any]:
            told.append(able.refuse())
            with pytest.raises(RuntimeError):
                able.capture(step.run, [step.x], None)
            return step.run()

        graph = able.capture(run, [step.x], self.create_pool())
        assert told[0], "refuse() has nothing against a capture within a capture"
        self.check(graph, step, "around a refused capture")

    def test_a_released_recording_is_gone(self, able: GraphBackend) -> None:
        """Releasing twice is allowed, replaying is an error in words, and other recordings go on."""
        pool = self.create_pool()
        before = self.bytes_in_use(pool)
        step, other = _Step.make(4, self.device), _Step.make(16, self.device)
        graph, lasting = self.capture(able, step, pool), self.capture(able, other, pool)
        graph.release()
        graph.release()
        with pytest.raises(RuntimeError) as caught:
            graph.replay()
        assert str(caught.value).strip(), "the error says nothing"
        self.check(lasting, other, "after another recording was released")
        lasting.release()
        assert self.bytes_in_use(pool) == before, "memory of released recordings is still held"

    def _still_works(self, backend: GraphBackend) -> None:
        reason = backend.refuse()
        assert reason is None, f"after a capture that failed it refuses: {reason}"
        step = _Step.make(4, self.device)
        graph = self.capture(backend, step)
        step.refill(1)
        self.check(graph, step, "after a capture that failed")
