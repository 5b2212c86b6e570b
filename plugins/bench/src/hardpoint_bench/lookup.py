"""How long it takes to find a long prompt whose KV is all there."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces import Int32Array
from hardpoint_bench.bounds import check_option
from hardpoint_bench.clocked_loop import ClockedLoop
from hardpoint_bench.faults import blaming, require
from hardpoint_bench.requests import make_request, own_tokens
from hardpoint_bench.rig import Rig, Sizes

__all__ = ["Lookup", "lookup_sizes", "measure_lookup"]

_REPEATS = 9
_BATCHED = 8_192
_FIRST = 100_000


@dataclass(frozen=True, slots=True)
class Lookup:
    """Medians. ``first_ms`` is ``add`` and the first attempt to admit the prompt, which hash it; ``lookup_ms`` all of
    the later ``schedule`` call that finds, adopts and sends its blocks, ``lookup_cpu_ms`` the same by the thread's own
    clock. ``cached_tokens`` is what was found."""

    tokens: int
    cached_tokens: int
    lookup_ms: float
    lookup_cpu_ms: float
    first_ms: float
    blocks_leaked: int


def lookup_sizes(num_tokens: int, block_size: int) -> Sizes:
    """Room for the prompt, but not beside another request of two blocks. Raises ``ConfigError`` for too few tokens."""
    check_option("lookup", num_tokens)
    if block_size < 2:
        raise ConfigError(f"--lookup needs a --block-size of 2 or more, not {block_size}")
    return Sizes(2, _BATCHED, max(num_tokens, block_size) + 8, -(-num_tokens // block_size) + 2)


class _LookupRun:
    """One scheduler. The prompt is computed once; then it is asked for while another request holds the last blocks, so
    that the scheduler hashes it and looks it up in vain, and admitted when that one has ended."""

    def __init__(self, rig: Rig, num_tokens: int) -> None:
        self._rig = rig
        self._scheduler, self._worker = rig.create()
        self._loop = ClockedLoop(self._scheduler, self._worker.execute, rig.limits.max_inflight_steps)
        self._prompt: Int32Array = np.arange(_FIRST, _FIRST + num_tokens, dtype=np.int32)

    def fill(self) -> None:
        self._add("fill", self._prompt, 1)
        self._drain()

    def ask(self, repeat: int) -> tuple[float, float, float, int]:
        """Milliseconds of the first attempt and of the lookup by both clocks, and tokens found."""
        name, holder = f"lookup-{repeat}", f"holder-{repeat}"
        self._worker.ending = False
        self._add(holder, own_tokens(repeat, self._rig.block_size + 1), 4)
        self._loop.turn()
        self._worker.ending = True
        first_ms = self._add(name, self._prompt.copy(), 1)
        lookup_ms, lookup_cpu_ms, cached, is_first = 0.0, 0.0, 0, True
        while self._loop.has_work():
            cached += sum(output.num_cached_tokens for output in self._loop.turn())
            step, spent = self._loop.step, self._loop.schedule_ns / 1e6
            if step is not None and any(row.request_id == name for row in step.new_rows):
                lookup_ms, lookup_cpu_ms = spent, self._loop.schedule_cpu_ns / 1e6
            if is_first:
                first_ms, is_first = first_ms + spent, False
        return first_ms, lookup_ms, lookup_cpu_ms, cached

    def _add(self, name: str, prompt: Int32Array, max_tokens: int) -> float:
        request = make_request(name, prompt, max_tokens)
        started = perf_counter_ns()
        refusal = self._scheduler.add(request)
        if refusal is not None:
            raise ConfigError(f"a prompt of {len(prompt)} tokens can never run; leave out --max-model-len")
        return (perf_counter_ns() - started) / 1e6

    def _drain(self) -> None:
        while self._loop.has_work():
            self._loop.turn()

    @property
    def num_free_blocks(self) -> int:
        return self._scheduler.stats().num_free_blocks


def measure_lookup(rig: Rig, num_tokens: int) -> Lookup:
    """With a rig of :func:`lookup_sizes`. Raises ``SchedulerFault`` when less than all of the prompt is found."""
    if not rig.caches_prefixes:
        raise ConfigError(f"--lookup needs prefix caching, which {rig.plugin.label} does not do with these settings")
    with blaming(rig.plugin.label):
        return _measure(rig, num_tokens)


def _measure(rig: Rig, num_tokens: int) -> Lookup:
    run = _LookupRun(rig, num_tokens)
    free = run.num_free_blocks
    run.fill()
    due = (num_tokens - 1) // rig.block_size * rig.block_size
    answers = [run.ask(repeat) for repeat in range(_REPEATS)]
    for *_, cached in answers:
        require(cached == due, f"all {due} tokens in full blocks are found", f"{cached} were")
    leaked = free - run.num_free_blocks
    require(leaked == 0, "every block is free again once everybody has ended", f"{leaked} leaked")
    first_ms, lookup_ms, lookup_cpu_ms = (median(answer[index] for answer in answers) for index in range(3))
    return Lookup(num_tokens, due, lookup_ms, lookup_cpu_ms, first_ms, leaked)
