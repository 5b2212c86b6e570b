"""Plugins called in a step, each under its name: what one does wrong is told with the plugin and its distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch

from hardpoint.errors import PluginError
from hardpoint.interfaces.kernel_override import KernelOverride
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import NewRow

__all__ = ["NamedLogitsProcessor", "named_kernel"]


class NamedLogitsProcessor(LogitsProcessor):
    """Passes every call on to ``processor``. Raises ``PluginError`` with ``label`` for what that raises, and for
    logits of another shape, dtype or device than it was given: tokens drawn from them would look like an answer."""

    def __init__(self, processor: LogitsProcessor, label: str) -> None:
        if not isinstance(processor, LogitsProcessor):
            raise PluginError(f"{label} returned a {type(processor).__name__}, not a LogitsProcessor")
        self.argmax_invariant = processor.argmax_invariant
        self._label = label
        self._add = _named(processor.add, label, "add")
        self._remove = _named(processor.remove, label, "remove")
        self._observe = _named(processor.observe, label, "observe")
        self._apply = _named(processor.apply, label, "apply")

    def __str__(self) -> str:
        return self._label

    def add(self, row: NewRow) -> bool:
        is_affected: bool = self._add(row)
        return is_affected

    def remove(self, slot: int) -> None:
        self._remove(slot)

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        self._observe(slots, token_ids)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        wanted = _form(logits)
        result = self._apply(logits, slots)
        if not isinstance(result, torch.Tensor) or _form(result) != wanted:
            raise PluginError(
                f"{self._label} returned {_described(result)} from apply, but was given {_described(logits)} and must "
                "keep that form"
            )
        return result


def named_kernel(override: Any, label: str) -> Any:
    """The ``KernelOverride`` with a function that turns what is raised into ``PluginError`` with ``label``."""
    if not isinstance(override, KernelOverride) or not callable(override.function):
        return override  # Refused, with a message of its own, where kernels are chosen.
    return replace(override, function=_named(override.function, label, f"the kernel of seam {override.seam!r}"))


def _named(function: Callable[..., Any], label: str, what: str) -> Callable[..., Any]:
    @wraps(function, updated=())
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{label} failed in {what}: {type(error).__name__}: {error}") from error

    return call


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
