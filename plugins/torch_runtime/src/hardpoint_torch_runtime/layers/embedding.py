"""Vocabulary layers, split over ranks along the vocabulary, and small tables that every rank holds whole.

Legend: T tokens, C hidden size, V vocabulary, N rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.layers.linear import LinearFactory, OutputPart, ParallelLinear
from hardpoint_torch_runtime.layers.linear_method import TableLinearMethod
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.layers.stored_weights import DenseWeight, StoredLinearMethod, StoredWeight
from hardpoint_torch_runtime.ops.seams import Kernels

__all__ = ["EmbeddingTable", "LMHead", "VocabEmbedding"]


def _vocab_part(vocab_size: int, parallel: TensorParallel) -> OutputPart:
    """Ranks take equal shares of the vocabulary rounded up; the last ranks' shares may end in padding."""
    share = -(-vocab_size // parallel.size)
    start = min(parallel.rank * share, vocab_size)
    return OutputPart(vocab_size, start, min(share, vocab_size - start))


class VocabEmbedding(torch.nn.Module):
    """int64 [T] to [T, C]; ids outside [0, V) are the caller's fault.

    ``weight`` is [share of V, C]. With a ``method`` (a :class:`TableLinearMethod`) it is whatever that keeps instead,
    and a tied head applies the method to this module.

    ``rows``: what a compiler set in place of the look-up, int64 [T] to [T, C].
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, parallel: TensorParallel, dtype: torch.dtype,
        device: torch.device, kernels: Kernels | None = None, method: LinearMethod | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._kernel = (kernels or Kernels()).embedding
        self.rows: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.name = name
        self.vocab_size = vocab_size
        self.parallel = parallel
        self._part = _vocab_part(vocab_size, parallel)
        self.shape = LinearShape(hidden_size, (-(-vocab_size // parallel.size),), str(dtype).removeprefix("torch."))
        self.weight: torch.nn.Parameter
        self.method = method
        # Asked once: in every step it would take longer than the look-up.
        self._table: TableLinearMethod | None = method if isinstance(method, TableLinearMethod) else None
        if method is not None:
            method.create_weights(self, self.shape)
            return
        empty = torch.zeros(self.shape.output_size, hidden_size, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return self._look_up(token_ids)
        local = token_ids - self._part.start
        foreign = (local < 0) | (local >= self._part.length)
        embedded = self._look_up(local.masked_fill(foreign, 0))
        return self.parallel.all_reduce(embedded.masked_fill_(foreign.unsqueeze(-1), 0))

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            return self.rows(rows)
        if self._table is not None:
            return self._table.look_up(self, rows)
        return self._kernel(rows, self.weight)

    def finish_loading(self) -> None:
        """Called once all tensors are in."""
        if self.method is not None:
            self.method.process_after_loading(self)

    def stored(self) -> StoredWeight | None:
        """What is kept, for a kernel of a tied head; None where the method does not tell."""
        if self.method is None:
            return DenseWeight(self.weight)
        return self.method.stored(self) if isinstance(self.method, StoredLinearMethod) else None

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter != "weight" or shard is not None:
            raise KeyError(f"embedding {self.name!r} has only a whole 'weight', not {parameter!r} / {shard!r}")
        shape = (self.vocab_size, self.shape.input_size)
        return Placement(shape, 0, self._part.start, 0, self._part.length)


class EmbeddingTable(torch.nn.Module):
    """int64 [T] below N to [T, C], for positions and the like: ``weight`` is [N, C] on every rank."""

    def __init__(self, name: str, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.name = name
        empty = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.embedding(self.weight, rows)

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter != "weight" or shard is not None:
            raise KeyError(f"table {self.name!r} has only a whole 'weight', not {parameter!r} / {shard!r}")
        return Placement.whole(tuple(self.weight.shape))


class LMHead(torch.nn.Module):
    """[S, C] to logits [S, V] in the compute dtype. Tied heads use the embedding's parameter and own none.

    ``product``: what a compiler set in place of the product with the embedding, [S, C] to [S, rows of this rank].
    """

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabEmbedding | None = None,
        *,
        bias: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__()
        self._product = (kernels or Kernels()).linear
        self.product: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.name = name
        self.vocab_size = vocab_size
        self.parallel = factory.parallel
        # A tuple hides the embedding from module registration: its parameter must be listed (and loaded) once only.
        self._tied: tuple[VocabEmbedding, ...] = (tied_to,) if tied_to is not None else ()
        self.projection: _VocabLinear | None = None
        if tied_to is None:
            self.projection = _VocabLinear(name, factory, vocab_size, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.projection is not None:
            logits = self.projection(hidden)
        elif self.product is not None:
            logits = self.product(hidden)
        elif (method := self._tied[0].method) is not None:
            logits = method.apply(self._tied[0], hidden, None)
        else:
            logits = self._product(hidden, self._tied[0].weight, None)
        return logits if self.parallel.size == 1 else self.parallel.all_gather(logits)[..., : self.vocab_size]

    def stored(self) -> StoredWeight | None:
        """This rank's rows, tied ones included, for a kernel to work on; None where a method does not tell."""
        return self._tied[0].stored() if self.projection is None else self.projection.stored()

    def release(self) -> None:
        """Drop what :meth:`stored` gave, which a kernel has copied. A tied head keeps it: rows are looked up in it."""
        if self.projection is not None:
            self.projection.release()


class _VocabLinear(ParallelLinear):
    """Output rows rounded up to equal shares, so that gathering is uniform; only real rows are loaded."""

    def __init__(self, name: str, factory: LinearFactory, vocab_size: int, hidden_size: int, *, bias: bool) -> None:
        part = _vocab_part(vocab_size, factory.parallel)
        rows = -(-vocab_size // factory.parallel.size)
        super().__init__(
            name,
            factory,
            input_total=hidden_size,
            input_length=hidden_size,
            parts={"weight": OutputPart(vocab_size, part.start, rows)},
            bias=bias,
        )
        self._real_rows = part.length

    def _place_weight(self, shard: str | None) -> Placement:
        placed = super()._place_weight(shard)
        return Placement(placed.stored_shape, placed.dim, placed.source_start, 0, self._real_rows)
