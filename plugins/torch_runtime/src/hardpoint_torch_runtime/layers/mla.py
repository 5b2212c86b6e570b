"""Multi-head latent attention (MLA): what is cached of a token is one vector that all heads share.

It holds the compressed keys and values, from which every head's own could be projected, and a rotated key. They never
are: what a head would do to the latents, it does to its query before attention and to its answer after it (the
absorbed form). So decoding and prefill read the paged cache alike, through the attention backend, as one KV head.

Legend: T tokens, C hidden size, H heads of this rank, P and R unrotated and rotated part of a head's query, V values of
a head, L compressed size; a latent has L + R entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hardpoint_torch_runtime.layers.attention import AttentionLayer
from hardpoint_torch_runtime.layers.linear import (
    ColumnParallelLinear,
    LinearFactory,
    ParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from hardpoint_torch_runtime.layers.linear_method import UnquantizedLinearMethod
from hardpoint_torch_runtime.layers.norm import RMSNorm
from hardpoint_torch_runtime.layers.rotary import RotaryEmbedding

__all__ = ["LatentAttention", "LatentSizes", "LatentUpProjection"]


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes over all ranks.

    Attributes:
        query_rank: queries are compressed to this size first; None: they are projected at once.
        latent_rank: L.
        plain_size, rotary_size, value_size: P, R and V.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent_rank: int
    plain_size: int
    rotary_size: int
    value_size: int

    @property
    def query_size(self) -> int:
        """Of one head, P + R."""
        return self.plain_size + self.rotary_size

    @property
    def latent_size(self) -> int:
        """What is cached per token, L + R."""
        return self.latent_rank + self.rotary_size


class LatentUpProjection(ColumnParallelLinear):
    """From L to every head's keys and values [H * (P + V)], held for its matrix: nothing is ever projected by it."""

    def __init__(self, name: str, factory: LinearFactory, sizes: LatentSizes) -> None:
        heads = factory.parallel.divide(sizes.num_heads, f"{name}: number of heads")
        per_head = sizes.plain_size + sizes.value_size
        super().__init__(name, factory, sizes.latent_rank, sizes.num_heads * per_head)
        self._view = (heads, per_head, sizes.latent_rank)
        self._plain_size = sizes.plain_size
        self._dtype, self._device = factory.dtype, factory.device
        self._dense: torch.Tensor | None = None

    def finish_loading(self) -> None:
        """Quantized weights are unpacked, once: what the method makes of unit vectors is its matrix."""
        super().finish_loading()
        if not isinstance(self.method, UnquantizedLinearMethod):
            unit = torch.eye(self._view[-1], dtype=self._dtype, device=self._device)
            self._dense = self.method.apply(self, unit, None).T.contiguous()

    def stored(self) -> None:
        """A kernel could compute nothing for this layer, which is read instead."""

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [H, P, L] and [H, V, L] that make keys and values of a latent.

        Raises ``RuntimeError`` where they would not be what the layer computes: with an adapter, or before a quantized
        weight has been loaded.
        """
        if self.adapter is not None:
            raise RuntimeError(f"layer {self.name!r} is absorbed into attention and takes no adapter; leave it out")
        whole = self._matrix().view(self._view)
        return whole[:, : self._plain_size], whole[:, self._plain_size :]

    def _matrix(self) -> torch.Tensor:
        if isinstance(self.method, UnquantizedLinearMethod):
            weight: torch.Tensor = self.weight  # type: ignore[assignment]
            return weight
        if self._dense is None:
            raise RuntimeError(f"layer {self.name!r} has no weight yet; call finish_loading() once its tensors are in")
        return self._dense


class LatentAttention(torch.nn.Module):
    """[T, C] to [T, C]. Heads are split over the ranks; every rank computes and caches all of the latents.

    Parameters are named as in Hugging Face checkpoints.
    """

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        sizes: LatentSizes,
        *,
        norm: Callable[[int], RMSNorm],
        rotary: RotaryEmbedding,
        attend: AttentionLayer,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        hidden, latent, rank = sizes.hidden_size, sizes.latent_rank, sizes.query_rank
        queries = sizes.num_heads * sizes.query_size
        self.q_proj: ParallelLinear | None = None
        if rank is None:
            self.q_proj = ColumnParallelLinear(f"{name}.q_proj", factory, hidden, queries)
        else:
            self.q_a_proj = ReplicatedLinear(f"{name}.q_a_proj", factory, hidden, rank, bias=bias)
            self.q_a_layernorm = norm(rank)
            self.q_b_proj = ColumnParallelLinear(f"{name}.q_b_proj", factory, rank, queries)
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            f"{name}.kv_a_proj_with_mqa", factory, hidden, sizes.latent_size, bias=bias
        )
        self.kv_a_layernorm = norm(latent)
        self.kv_b_proj = LatentUpProjection(f"{name}.kv_b_proj", factory, sizes)
        self.o_proj = RowParallelLinear(
            f"{name}.o_proj", factory, sizes.num_heads * sizes.value_size, hidden, bias=bias
        )
        self.attn = attend
        self.rotary = rotary

    def forward(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """``rotation`` as :meth:`RotaryEmbedding.lookup` gives it."""
        latent_rank = self.sizes.latent_rank
        queries = self._queries(hidden)
        plain, to_rotate = queries.split((self.sizes.plain_size, self.sizes.rotary_size), dim=-1)
        compressed = self.kv_a_proj_with_mqa(hidden)
        # The key turns like one more head.
        heads = torch.cat((to_rotate, compressed[:, None, latent_rank:]), dim=1)
        rotated = self.rotary.rotate_(heads, *rotation)
        latent = torch.cat((self.kv_a_layernorm(compressed[:, :latent_rank]), rotated[:, -1]), dim=-1)
        to_keys, to_values = self.kv_b_proj.matrices()
        absorbed = torch.bmm(plain.transpose(0, 1), to_keys).transpose(0, 1)
        attended = self.attn(torch.cat((absorbed, rotated[:, :-1]), dim=-1), latent, latent[:, :latent_rank])
        attended = attended.view(len(hidden), -1, latent_rank).transpose(0, 1)
        return self.o_proj(torch.bmm(attended, to_values.transpose(1, 2)).transpose(0, 1).flatten(1))

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H, P + R]."""
        if self.q_proj is not None:
            flat = self.q_proj(hidden)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return flat.view(len(hidden), -1, self.sizes.query_size)
