"""Normalization over the last dimension. Legend: T tokens, C normalized size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import OutputPart, Placement
from hardpoint_torch_runtime.ops.seams import Kernels

__all__ = ["LayerNorm", "RMSNorm", "ShardedRMSNorm"]


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * weight`` over the last dimension, accumulated in float32.

    With ``residual`` the sum ``x + residual`` is normalized and returned as the new residual; ``residual`` is updated
    in place, so the caller must own it. The kernels are those of the seams ``rms_norm`` and ``add_rms_norm``.
    ``weight_offset``: checkpoints hold the weight less this number; it is added when they are loaded, and not again.
    Without ``has_weight`` there is nothing to load, and nothing is multiplied by.
    """

    weight: torch.Tensor

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        *,
        weight_offset: float = 0.0,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        kernels = kernels or Kernels()
        self.size = size
        self.eps = eps
        self.weight_offset = weight_offset
        self._norm, self._add_norm = kernels.rms_norm, kernels.add_rms_norm
        ones = torch.ones(size, dtype=dtype, device=device)
        if has_weight:
            self.weight = torch.nn.Parameter(ones, requires_grad=False)
        else:
            self.register_buffer("weight", ones, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized sum, the sum). ``residual`` None starts a stream: ``x`` becomes the residual, uncopied."""
        if residual is None:
            return self._norm(x, self.weight, self.eps), x
        return self._add_norm(x, residual, self.weight, self.eps)

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter != "weight" or shard is not None:
            raise KeyError(f"a norm has only a whole 'weight', not {parameter!r} / {shard!r}")
        return Placement.whole((self.size,), self.weight_offset)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class ShardedRMSNorm(RMSNorm):
    """The same over all values of a column-parallel projection, of which this rank has a ``part`` [T, C / ranks].

    A part that several ranks hold must be held by equally many as any other.
    """

    def __init__(
        self,
        part: OutputPart,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(part.length, eps, dtype, device, kernels)
        self._part = part
        self._parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_of((self,), (x,))[0]

    @staticmethod
    def all_of(norms: Sequence[ShardedRMSNorm], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each of ``inputs`` [T, C / ranks] by the norm in its place, with one exchange among the ranks for all."""
        parallel = norms[0]._parallel
        if parallel.size == 1:
            return [norm._norm(x, norm.weight, norm.eps) for norm, x in zip(norms, inputs, strict=True)]
        exact = [x.float() for x in inputs]
        # Values that several ranks hold are in the sum several times, and in the count as often.
        sums = parallel.all_reduce(torch.stack([x.square().sum(dim=-1) for x in exact], dim=-1))
        outputs = []
        for index, (norm, x) in enumerate(zip(norms, exact, strict=True)):
            mean = sums[:, index : index + 1] / (norm.size * parallel.size)
            outputs.append((x * torch.rsqrt(mean + norm.eps) * norm.weight.float()).to(inputs[index].dtype))
        return outputs

    def place(self, parameter: str, shard: str | None) -> Placement:
        whole, part = super().place(parameter, shard), self._part
        return Placement((part.total,), whole.dim, part.start, 0, part.length)


class LayerNorm(torch.nn.Module):
    """``(x - mean) / std * weight + bias`` over the last dimension, accumulated in float32. Every rank holds all of it.

    Without ``bias`` the sum ends before it, and ``bias`` is None.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, *, bias: bool = True) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)
        self.bias: torch.nn.Parameter | None = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized sum, the sum); ``residual`` is updated in place, so the caller must own it. None starts a stream:
        ``x`` becomes the residual, uncopied."""
        total = x if residual is None else residual.add_(x)
        return self(total), total

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter not in ("weight", "bias") or shard is not None:
            raise KeyError(f"a layer norm has a whole 'weight' and perhaps a 'bias', not {parameter!r} / {shard!r}")
        return Placement.whole((self.size,))

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, bias={self.bias is not None}"
