"""The command's end of a side: starts the interpreter of an engine, gives orders, takes answers, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from hardpoint.errors import ConfigError, HardpointError, as_raised
from hardpoint.process import describe_exit
from hardpoint_bench.measure import Run, figures_of

__all__ = ["PROGRAMS", "Program", "Result", "Side", "SideFault"]

PROGRAMS = Path(__file__).parent / "programs"
"""Files that run in interpreters of their own, not modules of this package."""

_GRACE_S = 30.0
_LAST_WORDS = 300
_OF_ANOTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME")


class SideFault(HardpointError):
    """A side of the benchmark did not do what it was asked for, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Program:
    """``modules`` to ``packages``: what must be importable in ``python``, and what to install for it."""

    name: str
    adapter: Path
    python: str = sys.executable
    modules: Mapping[str, str] = field(default_factory=dict)

    def environment(self, threads: int | None) -> dict[str, str]:
        """Ours, without what belongs to our interpreter where it is another one."""
        given = dict(os.environ)
        if self.python != sys.executable:
            given = {name: value for name, value in given.items() if name not in _OF_ANOTHER_PYTHON}
        return given if threads is None else {**given, "OMP_NUM_THREADS": str(threads)}


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a side. ``phases``: seconds since its process was started, by phase, in their order.

    ``stacks``: of a sampled run, seconds by stack of Python frames, the innermost last.
    """

    run: Run
    peak_memory_mib: float
    phases: Mapping[str, float]
    stacks: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        return {**figures_of(self.run), "peak_memory_mib": self.peak_memory_mib}

    @property
    def start_s(self) -> float:
        """From the start of the process to the end of its first run."""
        return sum(seconds for name, seconds in self.phases.items() if name != "further")


class Side:
    """A process with a loaded engine. A context manager: afterwards the process has ended, whatever happened.

    ``facts`` are the adapter's. Raises ``ConfigError`` for an interpreter that cannot be run or lacks the engine; what
    the engine refused, as the error it raised where it is one of ours; :class:`SideFault` for any other failure.
    """

    def __init__(self, program: Program, job: Mapping[str, Any], *, threads: int | None = None) -> None:
        self.program = program
        # What engines print on their way matters to nobody unless they fail.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [program.python, str(PROGRAMS / "side.py"), str(program.adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=program.environment(threads),
            )
        except OSError as error:
            self._words.close()
            raise ConfigError(
                f"--peer-python {program.python!r} cannot be run ({error.strerror}); give the path of a Python "
                f"interpreter that has {program.name} installed"
            ) from None
        try:
            self.facts: dict[str, Any] = self._ask({**job, "started": started})["ready"]
        except BaseException:
            self._end(grace_s=0)
            raise

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(grace_s=_GRACE_S if kind is None else 0)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, prompts: Sequence[Sequence[int]], output_len: int, *, sample_every_s: float | None = None) -> Result:
        """All ``prompts`` at once, with samples of what runs if asked for.

        Raises :class:`SideFault` when fewer tokens came than were asked for.
        """
        answer = self._ask({"prompts": prompts, "output_len": output_len, "sample_every_s": sample_every_s})
        run = Run(**answer["run"])
        wanted = (sum(map(len, prompts)), output_len * len(prompts))
        if (run.num_prompt_tokens, run.num_output_tokens) != wanted:
            raise SideFault(
                f"{self.program.name}: {wanted[0]} prompt and {wanted[1]} output tokens were asked for, "
                f"{run.num_prompt_tokens} and {run.num_output_tokens} were computed"
            )
        return Result(run, answer["peak_memory_mib"], answer["phases"], answer["stacks"])

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one order."""
        orders, answers = self._process.stdin, self._process.stdout
        if orders is None or answers is None:
            raise SideFault(f"{self.program.name}: its process has ended already")
        with contextlib.suppress(BrokenPipeError):  # its end tells more
            orders.write(json.dumps(order).encode() + b"\n")
            orders.flush()
        line = answers.readline()
        if not line:
            code = self._process.wait()
            raise SideFault(f"{self.program.name}: its process ended ({describe_exit(code)}): {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._fault(**answer["error"])
        return answer

    def _fault(self, kind: str, text: str, missing: str | None) -> HardpointError:
        name = self.program.name
        if missing is not None and (package := self.program.modules.get(missing.partition(".")[0])):
            return ConfigError(
                f"{name} cannot run: {self.program.python} has no module {missing!r}; install it there "
                f"({self.program.python} -m pip install {package}) or name an interpreter that has it with "
                f"--peer-python {name}=PATH"
            )
        words = " ".join(text.split())
        known = None if self.program.modules else as_raised(kind, text)
        return known or SideFault(f"{name}: {kind}: {words}")

    def _last_words(self) -> str:
        self._words.seek(0)
        return " ".join(self._words.read().decode(errors="replace").split())[-_LAST_WORDS:] or "without a word"

    def _end(self, *, grace_s: float) -> None:
        """Idempotent. Without grace the process is killed; what it started ends with it."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            if grace_s:
                process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            self._words.close()
