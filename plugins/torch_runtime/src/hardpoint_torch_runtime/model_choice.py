"""Which ``model`` plugin runs an architecture: its own, one named by hand, or the fallback for those without."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ModelChoice", "ModelOptions", "choose_model"]


class ModelOptions(Protocol):
    """The settings that decide, see ``TorchWorkerOptions``."""

    @property
    def model(self) -> str | None: ...
    @property
    def fallback_model(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """``reason``: for people, why it is not the plugin of the architecture's name; empty where it is."""

    plugin: str
    reason: str = ""
    is_fallback: bool = False


def choose_model(architecture: str, installed: Collection[str], options: ModelOptions) -> ModelChoice:
    """``installed``: the names of all ``model`` plugins. Whether the choice is there shows where it is created."""
    named = options.model
    if named is not None:
        return ModelChoice(named, "" if named == architecture else f"worker.torch.model names {named!r}")
    fallback = options.fallback_model
    if architecture in installed or fallback is None or fallback not in installed:
        return ModelChoice(architecture)
    return ModelChoice(fallback, f"no installed model plugin is named {architecture!r}", is_fallback=True)
