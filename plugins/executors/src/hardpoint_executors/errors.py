"""How failures of workers read for the caller."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hardpoint.errors import HardpointError, WorkerError, as_raised
from hardpoint_executors.rpc import RpcFailure

__all__ = ["start_error", "worker_error"]


def worker_error(
    method: str,
    failures: Mapping[int, RpcFailure],
    results: Mapping[int, Any],
    world: int,
    *,
    late: Collection[int] = (),
) -> WorkerError:
    """One error for all failed ranks, under the lowest of them; the others' answers ride along.

    ``late`` are ranks that have said nothing and are waited for no longer.
    """
    rank = min(failures)
    first = failures[rank]
    message = f"worker rank {rank} failed in {method}: {first.kind}: {first.message}"
    if len(failures) > 1 and len({(failure.kind, failure.message) for failure in failures.values()}) == 1:
        message += f" ({len(failures)} of {world} ranks failed alike)"
    elif len(failures) > 1:
        others = "; ".join(f"rank {r}: {f.kind}: {f.message}" for r, f in sorted(failures.items()) if r != rank)
        message += f" ({len(failures)} of {world} ranks failed; {others})"
    if late:
        message += f" (ranks {sorted(late)} have not answered since)"
    traceback = "\n".join(f"[rank {r}] {failure.traceback}" for r, failure in sorted(failures.items()))
    return WorkerError(message, rank=rank, remote_traceback=traceback, kind=first.kind, results=results)


def start_error(rank: int, failure: RpcFailure) -> HardpointError:
    """The error a worker raised while it started; the project's own errors keep their class and message."""
    return as_raised(failure.kind, failure.message) or WorkerError(
        f"worker rank {rank} failed to start: {failure.kind}: {failure.message}",
        rank=rank,
        remote_traceback=failure.traceback,
        kind=failure.kind,
    )
