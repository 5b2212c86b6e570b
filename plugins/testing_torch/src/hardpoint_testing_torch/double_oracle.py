"""A Hugging Face model computed in float64 throughout, where its own float32 leaves too few digits to judge by."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["DoubleOracle"]


class _InDouble(TorchFunctionMode):
    """Whatever asks for float32 gets float64: models widen softmax, norms and recurrences to float32 and no further."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        chosen = torch.Tensor.double if func is torch.Tensor.float else func
        return chosen(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class DoubleOracle:
    """Called as the model is. Weights, and tables that the model made when it was built, keep their float32 values.

    Raises ``ValueError`` for a model that does not generate.
    """

    def __init__(self, model: Any) -> None:
        if not model.can_generate():
            raise ValueError(f"{type(model).__name__} does not generate; only logits of tokens are judged in float64")
        self._model = copy.deepcopy(model).double()
        # The kernel that multiplies all experts at once knows no float64.
        if hasattr(self._model.config, "num_experts"):
            self._model.set_experts_implementation("eager")

    @property
    def config(self) -> Any:
        return self._model.config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, with float64 in it. Raises ``TypeError`` if something in it was narrowed anyway."""
        with _InDouble():
            found = self._model(*args, **kwargs)
        if found.logits.dtype is not torch.float64:
            raise TypeError(f"{type(self._model).__name__} computes {found.logits.dtype} even when told not to")
        return found
