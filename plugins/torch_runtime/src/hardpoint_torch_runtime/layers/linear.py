"""Linear layers, split over tensor-parallel ranks. Arithmetic and storage belong to the layer's linear method.

Legend: I input size, O output size (both of this rank). A fused layer has several parts along O; every part is split
over the ranks by itself, so that a rank holds matching slices of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.layers.linear_method import (
    PlacingLinearMethod,
    StreamingLinearMethod,
    UnquantizedLinearMethod,
)
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import (
    GROUPED,
    TRANSPOSED,
    GroupedPlacement,
    OutputPart,
    Placement,
    SegmentedPlacement,
    TransposedPlacement,
    place_parts,
)
from hardpoint_torch_runtime.layers.stored_weights import StoredLinearMethod, StoredWeight

__all__ = [
    "Adapter",
    "ColumnParallelLinear",
    "LinearFactory",
    "MergedColumnParallelLinear",
    "OutputPart",
    "ParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]

Adapter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with (input [..., I], output [..., O]); returns the corrected output."""


@dataclass(frozen=True, slots=True)
class LinearFactory:
    """What every linear of a model has in common. ``choose`` picks the method from layer name and local shape."""

    choose: Callable[[str, LinearShape], LinearMethod]
    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class ParallelLinear(torch.nn.Module):
    """[..., I] to [..., O] through ``method``. ``adapter`` stays None until an adapter plugin wraps the layer.

    ``on_adapter``: called when ``adapter`` was set, for whoever computes many layers at once and cannot ask each of
    them in every step.
    """

    on_adapter: Callable[[], None] | None = None

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        *,
        input_total: int,
        input_length: int,
        parts: Mapping[str, OutputPart],
        bias: bool,
    ) -> None:
        super().__init__()
        self.name = name
        self.parallel = factory.parallel
        self.parts = dict(parts)
        self.shape = LinearShape(input_length, tuple(part.length for part in parts.values()), factory.dtype_name)
        self._input_total = input_total
        self.method = factory.choose(name, self.shape)
        self.method.create_weights(self, self.shape)
        self.bias: torch.nn.Parameter | None = None
        if bias:
            empty = torch.empty(self.shape.output_size, dtype=factory.dtype, device=factory.device)
            self.bias = torch.nn.Parameter(empty, requires_grad=False)
        self.adapter: Adapter | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "adapter" and self.on_adapter is not None:
            self.on_adapter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x, self.bias)

    def project(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Product, bias and adapter of this rank, without any collective."""
        output = self.method.apply(self, x, bias)
        return output if self.adapter is None else self.adapter(x, output)

    def finish_loading(self) -> None:
        """Called once all tensors are in: the method repacks what it wants to."""
        self.method.process_after_loading(self)

    def stored(self) -> StoredWeight | None:
        """What the method keeps, for a kernel to work on; None where it does not tell."""
        return self.method.stored(self) if isinstance(self.method, StoredLinearMethod) else None

    def release(self) -> None:
        """Drop what :meth:`stored` gave, which a kernel has copied; the layer can compute no more."""
        if isinstance(self.method, StoredLinearMethod):
            self.method.release(self)

    def place(self, parameter: str, shard: str | None) -> Placement:
        """See ``ShardedModule``. Parameters beyond weight and bias are placed by the linear method."""
        weight = self._place_weight(None if shard == TRANSPOSED else shard)
        if not isinstance(self.method, UnquantizedLinearMethod | StreamingLinearMethod):
            self._require_rows_in_order(weight, shard)
        if shard == TRANSPOSED:
            return TransposedPlacement.of(weight)
        if parameter == "bias":
            return self._place_bias(weight)
        if isinstance(self.method, PlacingLinearMethod):
            return self.method.place(self, parameter, shard, weight)
        return weight

    def _require_rows_in_order(self, weight: Placement, shard: str | None) -> None:
        """Raise ``ConfigError`` where a stored tensor must be taken apart, which packed formats do not allow."""
        method = type(self.method).__name__
        if isinstance(weight, SegmentedPlacement):
            raise ConfigError(
                f"layer {self.name!r} has {len(weight.parts)} projections in one stored tensor, whose shares "
                f"{method} cannot take apart; set --tensor-parallel-size 1 or leave it unquantized"
            )
        if isinstance(weight, GroupedPlacement) or shard == TRANSPOSED:
            raise ConfigError(
                f"layer {self.name!r} is stored in another order of rows or columns than it computes in, which "
                f"{method} cannot change; choose a dense checkpoint, or leave the layer unquantized"
            )

    def _place_bias(self, weight: Placement) -> Placement:
        if isinstance(weight, SegmentedPlacement):
            return place_parts(weight.parts)
        if isinstance(weight, GroupedPlacement):
            return replace(weight, stored_shape=weight.stored_shape[:1])
        return Placement(weight.stored_shape[:1], 0, weight.source_start, weight.target_start, weight.length)

    def _place_weight(self, shard: str | None) -> Placement:
        """``shard`` None: the file has all parts in one tensor, in their order."""
        if shard is None and len(self.parts) > 1:
            return place_parts(tuple(self.parts.values()), (self._input_total,))
        target_start = 0
        for part_name, part in self.parts.items():
            if part_name == shard or (shard is None and len(self.parts) == 1):
                return Placement((part.total, self._input_total), 0, part.start, target_start, part.length)
            target_start += part.length
        raise KeyError(f"layer {self.name!r} has no part {shard!r}; its parts are {', '.join(self.parts)}")

    def extra_repr(self) -> str:
        sizes = ", ".join(f"{name}={part.length}" for name, part in self.parts.items())
        return f"{self.name}, in={self.shape.input_size}, {sizes}, {type(self.method).__name__}"


class MergedColumnParallelLinear(ParallelLinear):
    """Several projections of one input as one matrix product. ``parts`` maps part names to sizes over all ranks."""

    def __init__(
        self, name: str, factory: LinearFactory, input_size: int, parts: Mapping[str, int], *, bias: bool = False
    ) -> None:
        parallel = factory.parallel
        shares = {part: parallel.divide(total, f"{name}: size of part {part!r}") for part, total in parts.items()}
        super().__init__(
            name,
            factory,
            input_total=input_size,
            input_length=input_size,
            parts={part: OutputPart(parts[part], parallel.rank * share, share) for part, share in shares.items()},
            bias=bias,
        )


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One projection split along its output. ``gather_output``: every rank gets all columns."""

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        gather_output: bool = False,
    ) -> None:
        super().__init__(name, factory, input_size, {"weight": output_size}, bias=bias)
        self._gathers = gather_output and factory.parallel.size > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.project(x, self.bias)
        return self.parallel.all_gather(output) if self._gathers else output


class ReplicatedLinear(ParallelLinear):
    """A projection that every rank computes whole, for results that all of them need and that are small."""

    def __init__(
        self, name: str, factory: LinearFactory, input_size: int, output_size: int, *, bias: bool = False
    ) -> None:
        parts = {"weight": OutputPart(output_size, 0, output_size)}
        super().__init__(name, factory, input_total=input_size, input_length=input_size, parts=parts, bias=bias)


class QKVParallelLinear(ParallelLinear):
    """Query, key and value projections as one product: output [..., (H + 2 K) D] of this rank, in that order.

    With fewer KV heads than ranks, neighboring ranks hold the same KV head.
    """

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        input_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool = False,
    ) -> None:
        parallel = factory.parallel
        local_heads = parallel.divide(num_heads, f"{name}: number of query heads")
        self_kv, kv_rank = _kv_share(name, num_kv_heads, parallel)
        query = OutputPart(num_heads * head_size, parallel.rank * local_heads * head_size, local_heads * head_size)
        key = OutputPart(num_kv_heads * head_size, kv_rank * self_kv * head_size, self_kv * head_size)
        super().__init__(
            name,
            factory,
            input_total=input_size,
            input_length=input_size,
            parts={"q": query, "k": key, "v": key},
            bias=bias,
        )
        self.num_heads = local_heads
        self.num_kv_heads = self_kv
        self._head_size = head_size

    def _place_weight(self, shard: str | None) -> Placement:
        if shard != GROUPED:
            return super()._place_weight(shard)
        parts = tuple(self.parts.values())
        shape = (sum(part.total for part in parts), self._input_total)
        return GroupedPlacement(shape, 0, 0, 0, self.shape.output_size, head_size=self._head_size, parts=parts)


def _kv_share(name: str, num_kv_heads: int, parallel: TensorParallel) -> tuple[int, int]:
    """(KV heads per rank, index of this rank's share)."""
    if num_kv_heads >= parallel.size:
        return parallel.divide(num_kv_heads, f"{name}: number of key/value heads"), parallel.rank
    if parallel.size % num_kv_heads:
        raise ConfigError(
            f"{name}: {num_kv_heads} key/value heads cannot be repeated evenly over "
            f"tensor_parallel_size={parallel.size}; choose a multiple of the heads"
        )
    return 1, parallel.rank * num_kv_heads // parallel.size


class RowParallelLinear(ParallelLinear):
    """A projection split along its input; the ranks' partial products are summed unless ``reduce`` is off."""

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        share = factory.parallel.divide(input_size, f"{name}: input size")
        super().__init__(
            name,
            factory,
            input_total=input_size,
            input_length=share,
            parts={"weight": OutputPart(output_size, 0, output_size)},
            bias=bias,
        )
        self._reduces = reduce and factory.parallel.size > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Only one rank may add the bias, or the sum would hold it once per rank.
        bias = self.bias if self.parallel.rank == 0 else None
        output = self.project(x, bias)
        return self.parallel.all_reduce(output) if self._reduces else output

    def _place_weight(self, shard: str | None) -> Placement:
        if shard is not None:
            raise KeyError(f"layer {self.name!r} is not fused and has no part {shard!r}")
        start = self.parallel.rank * self.shape.input_size
        return Placement((self.shape.output_size, self._input_total), 1, start, 0, self.shape.input_size)

    def _place_bias(self, weight: Placement) -> Placement:
        return Placement.whole(weight.stored_shape[:1])
