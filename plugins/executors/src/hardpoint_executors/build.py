"""Builds the worker plugin in the current process; the same for an in-process worker and a worker process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hardpoint.interfaces import PluginAccess, Worker, WorkerConfig, WorkerContext

__all__ = ["build_worker", "load_model", "nothing_collected"]


def build_worker(plugins: PluginAccess, name: str, config: WorkerConfig, attributes: Mapping[str, Any]) -> Worker:
    """Raises the plugin errors of ``hardpoint.errors``, also when the factory returns something else."""
    base = plugins.context("worker", name)
    context = WorkerContext(
        name=base.name,
        api_version=base.api_version,
        roles=base.roles,
        rank=config.parallel.rank,
        platform=base.platform,
        logger=base.logger,
        plugins=plugins,
        config=config,
        attributes=attributes,
    )
    with nothing_collected():
        worker: Worker = plugins.create("worker", name, context)
    return worker


def load_model(worker: Worker, plugins: PluginAccess, config: WorkerConfig) -> None:
    """Load, and tell this process's hooks."""
    started = time.perf_counter()
    with nothing_collected():
        worker.load_model()
    seconds = time.perf_counter() - started
    name, rank = config.model.artifact.name, config.parallel.rank
    plugins.notify("model_loaded", model_name=name, rank=rank, load_seconds=seconds)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Keep the search for cyclic garbage off: what imports and loading make stays, and looking through all of it again
    and again takes a tenth of a start."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
