"""One stored tensor that bundles many: the same matrices of all experts, say, perhaps two of each in one.

Entries lie along the first dimension. The parts of an entry share its outputs equally, which are its own first
dimension unless a :class:`StackRule` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import WeightRule
from hardpoint.interfaces.model_source import WeightTensor

__all__ = ["StackLayout", "StackRule", "is_stack", "unstack"]


@dataclass(frozen=True, slots=True)
class StackRule(WeightRule):
    """A rule with ``unstacked`` for entries that are laid out in a way of their own.

    Attributes:
        is_transposed: matrices are [inputs, outputs]. Vectors (biases) are what they are.
        alternates: parts take turns, output by output, and do not lie behind one another.
    """

    is_transposed: bool = False
    alternates: bool = False


@dataclass(frozen=True, slots=True)
class StackLayout:
    """What each entry of a stack holds: a tensor for each of ``names``, in which ``*`` is the number of the entry.

    ``is_transposed`` and ``alternates`` are those of :class:`StackRule`.
    """

    names: tuple[str, ...]
    is_transposed: bool = False
    alternates: bool = False


def is_stack(tensor: WeightTensor, layout: StackLayout) -> bool:
    """Whether the shape has entries whose outputs divide into the parts."""
    if len(tensor.shape) < 2:
        return False
    num_outputs = tensor.shape[-1] if layout.is_transposed else tensor.shape[1]
    return num_outputs % len(layout.names) == 0


def unstack(stack: WeightTensor, layout: StackLayout) -> Iterator[WeightTensor]:
    """What ``stack`` holds, one tensor at a time: views of its memory, or copies where the layout is another.

    Raises ``ModelFormatError`` for a packed format, whose pieces cannot be dequantized one by one.
    """
    if stack.dequantize is not None:
        raise ModelFormatError(
            f"tensor {stack.name!r} is a stack stored as {stack.dtype!r}; stacks are read from dense formats only. "
            f"Store {', '.join(layout.names)} apart, or convert the file to a dense format"
        )
    for number, entry in enumerate(stack.data.reshape(stack.shape)):
        outputs = entry.T if layout.is_transposed else entry
        for place, name in enumerate(layout.names):
            part = np.ascontiguousarray(_part(outputs, place, layout))
            yield WeightTensor(name.replace("*", str(number)), stack.dtype, part.shape, part)


def _part(outputs: np.ndarray, place: int, layout: StackLayout) -> np.ndarray:
    count = len(layout.names)
    if layout.alternates:
        return outputs[place::count]
    size = len(outputs) // count
    return outputs[place * size : (place + 1) * size]
