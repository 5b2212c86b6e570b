"""The communicator ``nccl``: ranks on graphics processors. The framework calls AMD's library by the same name."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_parallel.process_group import ProcessGroupCommunicator
from hardpoint_parallel.rendezvous import GroupPlace, meet

__all__ = ["NcclCommunicator", "NcclOptions", "create", "join"]

_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


class NcclOptions(BaseModel):
    """Options under ``plugins.communicator.nccl``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=1_000_000,
        description="seconds after which a collective that some rank does not join fails",
    )
    meeting_timeout_s: float = Field(
        default=120.0, gt=0, le=1_000_000, description="seconds that a rank waits at the start for the others to appear"
    )
    blocking: bool = Field(
        default=False,
        description="let the host wait for each collective: slower, but one that fails raises an error with its name; "
        "otherwise the framework ends the process `timeout_s` after a rank was lost",
    )


class NcclCommunicator(ProcessGroupCommunicator):
    """Collectives are queued on the current stream, and the host goes on."""

    def close(self) -> None:
        """Give up what is under way instead of waiting for ranks that may be gone. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def join(
    ctx: WorkerContext, options: NcclOptions, backend: Any, environment: MutableMapping[str, str]
) -> NcclCommunicator:
    """Meet the other ranks and exchange a first number with them, over the process group class ``backend``.

    Raises ``ConfigError`` for a context without configuration or device, a missing address, and when ranks stay away.
    """
    if ctx.config is None or ctx.device is None:
        raise ConfigError("communicator 'nccl' was created without a worker configuration or device in its context")
    parallel = ctx.config.parallel
    place = GroupPlace.of(parallel)
    store = meet(parallel, options.meeting_timeout_s)
    if options.blocking:
        environment[_BLOCKING] = "1"
    settings = backend.Options()
    settings._timeout = timedelta(seconds=options.timeout_s)
    advice = f"a rank ended, or was slower than plugins.communicator.nccl.timeout_s ({options.timeout_s:g} s)"
    try:
        communicator = NcclCommunicator(backend(store, place.rank, place.size, settings), place, advice)
        # The library connects the ranks at the first collective: now, rather than in the first forward.
        present = communicator.all_reduce(torch.ones(1, device=ctx.device))
        if int(present.item()) != place.size:
            raise RuntimeError(f"{int(present.item())} ranks answered instead of {place.size}")
    except RuntimeError as error:
        raise ConfigError(
            f"rank {place.rank} of {place.label} cannot reach the others on {ctx.device}: {error}; see the links in "
            "`hardpoint plugins doctor`, run with NCCL_DEBUG=INFO, or set --tensor-parallel-size 1"
        ) from error
    return communicator


@plugin("communicator", options=NcclOptions)
def create(ctx: WorkerContext, options: NcclOptions) -> NcclCommunicator:
    """Waits until every rank of the group is there. Raises ``ConfigError`` as :func:`join` does, and for a framework
    that was built without the library."""
    backend = getattr(torch.distributed, "ProcessGroupNCCL", None)
    if backend is None:
        raise ConfigError(
            f"torch {torch.__version__} is built without NCCL; install a build for your devices, or name another "
            "communicator under plugins.worker.<name>.communicator"
        )
    return join(ctx, options, backend, os.environ)
