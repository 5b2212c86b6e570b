"""Which ``model`` plugin runs an architecture: its own, one named by hand, or the fallback for those without."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from hardpoint_torch_runtime.worker_options import TorchWorkerOptions

__all__ = ["ModelChoice", "choose_model"]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """``reason``: for people, why it is not the plugin of the architecture's name; empty where it is."""

    plugin: str
    reason: str = ""
    is_fallback: bool = False

    def told_of(self, architecture: str) -> str:
        """A line for people; empty where there is nothing to explain."""
        return f"model plugin {self.plugin!r} runs {architecture}: {self.reason}" if self.reason else ""

    def log(self, logger: logging.Logger, architecture: str) -> None:
        """A fallback is worth a warning."""
        if line := self.told_of(architecture):
            logger.log(logging.WARNING if self.is_fallback else logging.INFO, "%s", line)


def choose_model(architecture: str, installed: Collection[str], options: TorchWorkerOptions) -> ModelChoice:
    """``installed``: the names of all ``model`` plugins. Whether the choice is there shows where it is created."""
    named = options.model
    if named is not None:
        return ModelChoice(named, "" if named == architecture else f"worker.torch.model names {named!r}")
    fallback = options.fallback_model
    if architecture in installed or fallback is None or fallback not in installed:
        return ModelChoice(architecture)
    return ModelChoice(fallback, f"no installed model plugin is named {architecture!r}", is_fallback=True)
