"""How long it takes to find a long prompt whose KV is all there."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces import Int32Array
from hardpoint_bench.clocked_loop import ClockedLoop
from hardpoint_bench.faults import require
from hardpoint_bench.requests import make_request
from hardpoint_bench.rig import Rig, Sizes

__all__ = ["Lookup", "lookup_sizes", "measure_lookup"]

_REPEATS = 5
_BATCHED = 8_192
_FIRST = 100_000


@dataclass(frozen=True, slots=True)
class Lookup:
    """Medians. ``lookup_ms`` is the whole ``schedule`` call that finds, adopts and sends the blocks of the prompt;
    ``hash_ms`` the ``add`` call before it, which hashes. ``cached_tokens`` is what was found."""

    tokens: int
    cached_tokens: int
    lookup_ms: float
    hash_ms: float
    blocks_leaked: int


def lookup_sizes(num_tokens: int, block_size: int) -> Sizes:
    """Room for the prompt once, and once more for what is not shared."""
    if num_tokens < 2:
        raise ConfigError(f"--lookup {num_tokens} must be at least 2: the last token of a prompt is always computed")
    return Sizes(2, _BATCHED, num_tokens + 8, 2 * -(-num_tokens // block_size) + 8)


def measure_lookup(rig: Rig, num_tokens: int) -> Lookup:
    """Compute the prompt once, then ask for it again. Raises ``SchedulerFault`` when less than all of it is found."""
    if not rig.caches_prefixes:
        raise ConfigError(f"--lookup needs prefix caching, which {rig.plugin.label} does not do with these settings")
    scheduler, worker = rig.create()
    free = scheduler.stats().num_free_blocks
    loop = ClockedLoop(scheduler, worker.execute, rig.limits.max_inflight_steps)
    prompt: Int32Array = np.arange(_FIRST, _FIRST + num_tokens, dtype=np.int32)
    due = (num_tokens - 1) // rig.block_size * rig.block_size
    hash_ms, lookup_ms, cached = [], [], 0
    for repeat in range(_REPEATS + 1):
        request = make_request(f"lookup-{repeat}", prompt.copy(), 1)
        started = perf_counter_ns()
        refusal = scheduler.add(request)
        added = perf_counter_ns()
        if refusal is not None:
            raise ConfigError(f"a prompt of {num_tokens} tokens can never run; raise --blocks or --max-model-len")
        cached = sum(output.num_cached_tokens for output in loop.turn())
        first_turn = loop.schedule_ns
        while loop.has_work():
            cached += sum(output.num_cached_tokens for output in loop.turn())
        if repeat:
            hash_ms.append((added - started) / 1e6)
            lookup_ms.append(first_turn / 1e6)
            require(cached == due, f"all {due} tokens in full blocks are found", f"{cached} were")
    leaked = free - scheduler.stats().num_free_blocks
    require(leaked == 0, "every block is free again once everybody has ended", f"{leaked} leaked")
    return Lookup(num_tokens, cached, median(lookup_ms), median(hash_ms), leaked)
