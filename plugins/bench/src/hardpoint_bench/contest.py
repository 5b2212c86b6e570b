"""Hardpoint and its peers on one workload, in alternation: the same ids on each side, fresh ones in each repeat."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.config import AppConfig
from hardpoint.errors import ConfigError, HardpointError
from hardpoint_bench.measure import Figure, condensed
from hardpoint_bench.peers import OURS, ChosenPeer
from hardpoint_bench.sides import Program, Result, Side
from hardpoint_bench.stored import weights_of
from hardpoint_bench.workloads import Workload, make_prompts

__all__ = ["SETTLE_S", "Contest", "Entrant"]

SETTLE_S = 0.4
"""Between turns of different sides: threads of OpenMP look for work this long before they sleep, in all engines."""
_SEEDS_APART = 1_000_003
"""Runs of neighboring seeds draw ids of their own as long as there are fewer repeats than this."""


@dataclass(slots=True, eq=False)
class Entrant:
    """``facts`` are known, and ``results`` filled, once it ran; the unmeasured run is not among them."""

    program: Program
    job: Mapping[str, Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def figures(self, *, starts: bool) -> dict[str, Figure]:
        return condensed(self.each(starts=starts))

    def each(self, *, starts: bool) -> list[dict[str, float]]:
        """Figures of every repeat; of a start only what belongs to it."""
        if not starts:
            return [result.figures for result in self.results]
        return [{"start_s": one.start_s, "peak_memory_mib": one.peak_memory_mib} for one in self.results]

    def phases(self) -> dict[str, Figure]:
        return condensed([result.phases for result in self.results])


class Contest:
    """``config`` is our side's; ``precision`` the class that all sides are to run in, where there is one.

    Raises what :class:`Side` raises, and ``ConfigError`` for prompts that fit no side. With ``tolerant`` a peer that
    fails leaves instead, and ``faults`` has its name and why; without ours there is nothing to compare.
    """

    def __init__(
        self,
        workload: Workload,
        config: AppConfig,
        peers: Sequence[ChosenPeer],
        *,
        seed: int,
        threads: int | None,
        precision: str | None = None,
        tolerant: bool = False,
        settle_s: float = SETTLE_S,
        ours: Program = OURS,
        tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
    ) -> None:
        self.workload = workload
        self._peers = peers
        self._seed = seed
        self._threads = threads
        self._precision = precision
        self._tolerant = tolerant
        self._settle_s = settle_s
        self._tell = tell
        self.faults: dict[str, str] = {}
        self._vocab_size: int | None = None
        self.ours = Entrant(ours, {"config": config.model_dump(mode="json")})
        self.entrants = [self.ours]

    def run(self, repeats: int) -> None:
        """One unmeasured run of each side, then ``repeats`` measured ones, whose order turns each time."""
        with ExitStack() as stack:
            sides = {self.ours.program.name: stack.enter_context(self._side(self.ours))}
            self._enter_peers()
            for entrant in self.entrants[1:]:
                with self._allowed_to_fail(entrant):
                    sides[entrant.program.name] = stack.enter_context(self._side(entrant))
            for repeat, entrant in self._turns(repeats):
                with self._allowed_to_fail(entrant):
                    self._run(sides[entrant.program.name], entrant, repeat)

    def run_starts(self, repeats: int) -> None:
        """The same with a new process for every run, one at a time."""
        for repeat, entrant in self._turns(repeats):
            with self._allowed_to_fail(entrant), self._side(entrant) as side:
                self._run(side, entrant, repeat)

    @contextmanager
    def _allowed_to_fail(self, entrant: Entrant) -> Iterator[None]:
        """A peer that failed takes no further part, and what it had done so far counts for nothing."""
        try:
            yield
        except HardpointError as error:
            if entrant is self.ours or not self._tolerant:
                raise
            self._tell(f"{self.workload.name}: {entrant.program.name} failed and leaves: {error}")
            self.faults[entrant.program.name] = str(error)
            self.entrants.remove(entrant)

    def _turns(self, repeats: int) -> Iterator[tuple[int, Entrant]]:
        for repeat in range(repeats + 1):
            order = list(self.entrants)
            for entrant in order if repeat % 2 == 0 else order[::-1]:
                if entrant not in self.entrants:
                    continue
                self._tell(f"{self.workload.name}: {entrant.program.name}, run {repeat} of {repeats}")
                if len(self.entrants) > 1:
                    time.sleep(self._settle_s)
                yield repeat, entrant
                if repeat == 0 and entrant is self.ours and len(self.entrants) == 1:
                    self._enter_peers()
                    order += self.entrants[1:]

    def _enter_peers(self) -> None:
        """Once our side told which files it read and how; then they are in, however it goes on."""
        facts, workload = self.ours.facts, self.workload
        sizes = {"batch": workload.num_requests, "max_len": workload.prompt_length + workload.output}
        entering, self._peers = self._peers, ()
        for peer in entering:
            model = peer.model or facts["model_path"]
            job = {
                "model": model,
                "dtype": facts["dtype"],
                "threads": self._threads or facts["threads"],
                "workload": workload.name,
                "precision": self._precision,
                "weights": weights_of(Path(model)),
                **sizes,
            }
            self.entrants.append(Entrant(peer.program, job))

    @contextmanager
    def _side(self, entrant: Entrant) -> Iterator[Side]:
        with Side(entrant.program, entrant.job, threads=self._threads or self.ours.facts.get("threads")) as side:
            entrant.facts = side.facts
            self._check(side)
            yield side

    def _check(self, side: Side) -> None:
        workload, longest = self.workload, side.facts["max_model_len"]
        needed = workload.prompt_length + workload.output
        if longest is not None and needed > longest:
            raise ConfigError(
                f"--prompt-len {workload.prompt_length} and --output-len {workload.output} need {needed} tokens; the "
                f"context length of {side.program.name} is {longest}: lower them, or raise --max-model-len as far as "
                "the model goes"
            )
        known = [size for size in (self._vocab_size, side.facts["vocab_size"]) if size is not None]
        self._vocab_size = min(known, default=None)

    def _run(self, side: Side, entrant: Entrant, repeat: int) -> None:
        if self._vocab_size is None:
            raise RuntimeError("no side was started yet")
        prompts = make_prompts(self.workload, self._vocab_size, self._seed * _SEEDS_APART + repeat)
        result = side.run(prompts, self.workload.output)
        if repeat:
            entrant.results.append(result)
