"""A weight loader over tensors in memory, for tests that are not about files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightTensor

__all__ = ["StateDictLoader", "TensorLoader", "weight_tensor"]


def weight_tensor(name: str, tensor: torch.Tensor) -> WeightTensor:
    """``tensor`` as a loader of dense formats yields it; bfloat16 travels as uint16."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    contiguous = tensor.detach().contiguous().cpu()
    data = contiguous.view(torch.uint16) if tensor.dtype == torch.bfloat16 else contiguous
    return WeightTensor(name, dtype, tuple(tensor.shape), data.numpy())


class TensorLoader(WeightLoader):
    """Yields ``stored`` tensors in their order."""

    def __init__(self, stored: Sequence[WeightTensor]) -> None:
        self._stored = stored

    def accepts(self, artifact: ModelArtifact) -> bool:
        del artifact
        return False

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        raise TypeError(f"tensors in memory say nothing about {artifact.name!r}; build the ModelInfo yourself")

    def num_bytes(self, info: ModelInfo) -> int:
        del info
        return sum(tensor.data.nbytes for tensor in self._stored)

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        del info
        yield from self._stored


class StateDictLoader(TensorLoader):
    """The same over a state dict of dense tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__([weight_tensor(name, tensor) for name, tensor in tensors.items()])
