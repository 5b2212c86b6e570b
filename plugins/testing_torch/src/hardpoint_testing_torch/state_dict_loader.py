"""A weight loader over tensors in memory, for tests that are not about files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightTensor

__all__ = ["StateDictLoader", "weight_tensor"]


def weight_tensor(name: str, tensor: torch.Tensor) -> WeightTensor:
    """``tensor`` as a loader of dense formats yields it; bfloat16 travels as uint16."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    contiguous = tensor.detach().contiguous().cpu()
    data = contiguous.view(torch.uint16) if tensor.dtype == torch.bfloat16 else contiguous
    return WeightTensor(name, dtype, tuple(tensor.shape), data.numpy())


class StateDictLoader(WeightLoader):
    """Yields ``tensors`` in their order."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def accepts(self, artifact: ModelArtifact) -> bool:
        del artifact
        return False

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        raise TypeError(f"tensors in memory say nothing about {artifact.name!r}; build the ModelInfo yourself")

    def num_bytes(self, info: ModelInfo) -> int:
        del info
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        del info
        for name, tensor in self._tensors.items():
            yield weight_tensor(name, tensor)
