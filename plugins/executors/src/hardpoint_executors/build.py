"""Builds and calls the worker plugin in the current process; the same for an in-process worker and a worker process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.interfaces import PluginAccess, Worker, WorkerConfig, WorkerContext

__all__ = ["build_worker", "call_worker"]


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
    worker: Worker = plugins.create("worker", name, context)
    return worker


def call_worker(
    worker: Worker, method: str, arguments: Sequence[Any], plugins: PluginAccess, config: WorkerConfig
) -> Any:
    """The method's result. This process's hooks hear of a loaded model."""
    started = time.perf_counter()
    result = getattr(worker, method)(*arguments)
    if method == "load_model":
        plugins.notify(
            "model_loaded",
            model_name=config.model.artifact.name,
            rank=config.parallel.rank,
            load_seconds=time.perf_counter() - started,
        )
    return result
