"""One side of a benchmark, in the interpreter of its engine: loads the engine, then runs prompts as it is told.

Started as ``python side.py ADAPTER``. Orders come as lines of JSON on standard input, answers leave on what was
standard output; whatever the engine prints goes to standard error. Nothing but the standard library is needed here: the
interpreter may be one that has a peer installed and nothing else.

An adapter is a file with ``load(job, phases)``, which returns the engine: ``facts`` (a dict for the report, with
``vocab_size`` and ``max_model_len``, None where it does not tell), ``run(prompts, output_len)`` and ``close()``. A run
is greedy, passes over the end of the sequence, and returns the fields of ``hardpoint_bench.measure.Run``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, TextIO

FRAMEWORK = "torch"
"""The one import that is a phase of its own: it is a large part of any start, and nobody's engine can change it."""


class Phases:
    """Where the time since the start of the process went, in seconds by phase. Phases follow one another without gaps.

    ``started`` and ``begun``: when the process was started and when its first line ran, on the monotonic clock, which
    all processes of a machine share.
    """

    def __init__(self, started: float, begun: float) -> None:
        self.seconds: dict[str, float] = {"interpreter": begun - started}
        self.current = "imports"
        self._since = begun

    def begin(self, name: str) -> None:
        """End the current phase; time of a phase that comes back is added up."""
        now = time.monotonic()
        self.seconds[self.current] = self.seconds.get(self.current, 0.0) + now - self._since
        self.current, self._since = name, now


class FrameworkClock:
    """Finds no module by itself; puts the import of the framework, whenever it happens, into a phase."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name != FRAMEWORK:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:  # whoever asks need not import it: a platform only looks which build is there
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def timed(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            before = self._phases.current
            self._phases.begin(f"{FRAMEWORK}_import")
            try:
                execute(module)
            finally:
                self._phases.begin(before)

        spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


class StackSampler:
    """Where the main thread spends its time: stacks of Python frames, sampled by a timer of the wall clock.

    A context manager. A sample stands for the time since the one before, so that a long call into a library, during
    which no sample can be taken, counts in full with its caller. What sampling takes is left out.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval = interval_s
        self._seconds: dict[tuple[CodeType, ...], float] = {}
        self._modules: dict[CodeType, str] = {}
        self._since = 0.0

    def __enter__(self) -> StackSampler:
        signal.signal(signal.SIGALRM, self._sample)
        self._since = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, self._interval, self._interval)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        del number
        elapsed = time.perf_counter() - self._since
        stack = []
        while frame is not None:
            code = frame.f_code
            if code not in self._modules:
                self._modules[code] = frame.f_globals.get("__name__", "?")
            stack.append(code)
            frame = frame.f_back
        key = tuple(stack)
        self._seconds[key] = self._seconds.get(key, 0.0) + elapsed
        self._since = time.perf_counter()

    def folded(self) -> dict[str, float]:
        """Seconds by stack, which is ``module:function`` from the outermost frame to the innermost, with ``;``."""
        found: dict[str, float] = {}
        for stack, seconds in self._seconds.items():
            name = ";".join(f"{self._modules[code]}:{code.co_name}" for code in reversed(stack))
            found[name] = found.get(name, 0.0) + seconds
        return found


def peak_memory_mib(pid: int | None = None) -> float:
    """Largest resident size so far, of the process and those it started that still run; shared pages count in each."""
    folder = Path("/proc") / str(os.getpid() if pid is None else pid)
    try:
        status = (folder / "status").read_text(encoding="utf-8")
        children = [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return 0.0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")), "0")
    return int(kib) / 1024 + sum(peak_memory_mib(int(child)) for child in children)


def serve(adapter: str, orders: TextIO, answers: TextIO, begun: float) -> int:
    """Until the orders end. Whatever goes wrong is the last answer."""

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    try:
        job = json.loads(orders.readline())
        phases = Phases(job["started"], begun)
        sys.meta_path.insert(0, FrameworkClock(phases))
        engine = runpy.run_path(adapter)["load"](job, phases)
        try:
            phases.begin("first_token")
            answer({"ready": engine.facts})
            for line in iter(orders.readline, ""):
                order = json.loads(line)
                stacks: dict[str, float] = {}
                if interval := order.get("sample_every_s"):
                    with StackSampler(interval) as sampler:
                        run = engine.run(order["prompts"], order["output_len"])
                    stacks = sampler.folded()
                else:
                    run = engine.run(order["prompts"], order["output_len"])
                phases.begin("further")
                memory = peak_memory_mib()
                answer({"run": run, "peak_memory_mib": memory, "phases": phases.seconds, "stacks": stacks})
        finally:
            engine.close()
    except Exception as error:
        if os.environ.get("HARDPOINT_TRACEBACK"):
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        answer({"error": {"kind": type(error).__name__, "text": str(error), "missing": missing}})
        return 1
    return 0


def main() -> int:
    begun = time.monotonic()
    # Ctrl-C reaches the whole group: the command decides what becomes of its sides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(0)) as orders, os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        return serve(sys.argv[1], orders, answers, begun)


if __name__ == "__main__":
    sys.exit(main())
