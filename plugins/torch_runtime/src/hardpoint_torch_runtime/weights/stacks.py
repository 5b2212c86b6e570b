"""One stored tensor that bundles many: the same matrices of all experts, say, perhaps two of each behind one another.

Entries lie along the first dimension; the parts of an entry share its own first dimension equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import WeightTensor

__all__ = ["is_stack", "unstack"]


def is_stack(tensor: WeightTensor, num_parts: int) -> bool:
    """Whether the shape has entries that divide into ``num_parts``."""
    return len(tensor.shape) > 1 and tensor.shape[1] % num_parts == 0


def unstack(stack: WeightTensor, names: Sequence[str]) -> Iterator[WeightTensor]:
    """What ``stack`` holds, as views of its memory; the ``*`` of each of ``names`` becomes the number of the entry.

    Raises ``ModelFormatError`` for a packed format, whose pieces cannot be dequantized one by one.
    """
    if stack.dequantize is not None:
        raise ModelFormatError(
            f"tensor {stack.name!r} is a stack stored as {stack.dtype!r}; stacks are read from dense formats only. "
            f"Store {', '.join(names)} apart, or convert the file to a dense format"
        )
    entries = stack.data.reshape(stack.shape[0], len(names), -1)
    shape = (stack.shape[1] // len(names), *stack.shape[2:])
    for number, entry in enumerate(entries):
        for name, part in zip(names, entry, strict=True):
            yield WeightTensor(name.replace("*", str(number)), stack.dtype, shape, part.reshape(shape))
