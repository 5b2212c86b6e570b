"""The executor ``external_launcher``: one rank, in this process; others are processes that somebody started.

Every process runs an engine of its own and is given the same requests in the same order. Nothing is sent from engine to
engine: scheduling depends on the requests alone, so all engines plan the same steps, and their workers meet in the
collectives of the model. ``torchrun`` and the like set the variables that tell a process its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ExecutorContext, NoOptions, ParallelSlice, WorkerConfig, plugin
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint_executors.uniproc import UniprocExecutor

__all__ = ["ExternalLauncherExecutor", "create", "place_from_environment"]

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@plugin("executor", options=NoOptions)
class ExternalLauncherExecutor(UniprocExecutor):
    """As ``uniproc``, for whichever rank this process is: calls reach its own worker only.

    Raises ``ConfigError`` for a process that no launcher started, for one of another number of ranks than the
    configuration's, and in a server, whose processes are not started alike.
    """

    @classmethod
    def _at_its_place(cls, ctx: ExecutorContext, config: WorkerConfig) -> WorkerConfig:
        if ProcessRole.WORKER not in ctx.roles:
            raise ConfigError(
                "executor 'external_launcher' keeps its worker in the process that was launched, and a server's engine "
                "has a process of its own; use it with LLM or `hardpoint generate`, or serve with --executor multiproc"
            )
        return msgspec.structs.replace(config, parallel=place_from_environment(config.parallel, os.environ))


create = ExternalLauncherExecutor


def place_from_environment(parallel: ParallelSlice, environment: Mapping[str, str]) -> ParallelSlice:
    """``parallel`` as the process sees it that ``environment`` belongs to; collectives meet where the launcher says.

    Raises ``ConfigError`` that names every missing or impossible variable.
    """
    missing = [name for name in (*_NUMBERS, *_ADDRESS) if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"executor 'external_launcher' needs {', '.join(missing)} in the environment; start every rank with "
            f"`torchrun --nproc-per-node {parallel.world_size} ...` or set them by hand, or choose --executor multiproc"
        )
    given = {name: environment[name] for name in (*_NUMBERS, "MASTER_PORT")}
    odd = [f"{name}={text!r}" for name, text in given.items() if not text.isdecimal()]
    if odd:
        raise ConfigError(f"executor 'external_launcher' needs whole numbers, not {', '.join(odd)}")
    rank, local_rank, world_size = (int(given[name]) for name in _NUMBERS)
    if world_size != parallel.world_size:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but tensor_parallel_size {parallel.tensor_parallel_size} times "
            f"pipeline_parallel_size {parallel.pipeline_parallel_size} is {parallel.world_size}; set "
            f"--tensor-parallel-size {world_size}, or launch {parallel.world_size} processes"
        )
    if rank >= world_size:
        raise ConfigError(f"RANK is {rank}; with WORLD_SIZE={world_size} it must be below that")
    address = "env://" if world_size > 1 else parallel.init_method
    return msgspec.structs.replace(parallel, rank=rank, local_rank=local_rank, init_method=address)
