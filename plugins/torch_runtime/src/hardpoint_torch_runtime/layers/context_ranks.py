"""Attention over contexts that are dealt out among ranks: what a backend computes of it, and how ranks merge that.

Legend: N ranks, T tokens of the step (padding included), H query heads of a rank, K KV heads, D head size, V size of a
head's values. All ranks hold the same K heads, each of them a share of what was cached before the step
(:mod:`hardpoint_torch_runtime.layers.context_shards`), and have the step's own keys and values at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hardpoint.interfaces.communicator import Communicator
from hardpoint_torch_runtime.layers.partial_attention import Partial, merge_partials, rank_share, total_lse

__all__ = ["ContextRanks", "SharedContextImpl", "attend_over_ranks"]


@runtime_checkable
class SharedContextImpl(Protocol):
    """What an ``AttentionImpl`` has beside its usual methods if its backend accepts ``AttentionNeed.dcp_size`` > 1.

    Its builder's spec says ``context_shards``, and metadata is built from ``dcp_local_seq_lens``. ``forward`` and
    ``forward_with_lse`` raise ``RuntimeError`` for such metadata: a share of the context gives no answer. Results are
    written into ``output`` and returned with their log-sum-exp, natural and in float32.
    """

    def has_context(self, metadata: Any) -> bool:
        """Whether any row had tokens before this step, on whatever rank: all ranks conclude the same, those whose own
        share is empty too, since they wait for one another where it is True."""

    def context_partial(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> Partial:
        """Attention of ``query`` [T, H', D] over this rank's share of its row's context: the first
        ``dcp_local_seq_lens`` entries in the row's blocks. All of them are visible, and sinks take no part.

        H' is a multiple of H: the heads of several ranks, all those of the first KV head before those of the second.
        """

    def step_partial(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> Partial:
        """Attention of ``query`` [T, H, D] over the step's own ``key`` and ``value`` of its row, up to its own; sinks
        count here."""


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share contexts, over a communicator of exactly these; all of them call it in the same order.

    Exchanged are the queries, a log-sum-exp per token, head and rank, and the sum of the outputs.
    """

    communicator: Communicator
    num_ranks: int
    rank: int

    def gather_heads(self, query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """[T, H, D] of every rank as [T, N * H, D]: KV head by KV head, and for each of them rank by rank."""
        by_kv_head = query.unflatten(1, (num_kv_heads, -1))
        return self.communicator.all_gather(by_kv_head, 2).flatten(1, 2)

    def merge_heads(self, partial: Partial, num_kv_heads: int) -> Partial:
        """Merge all ranks' partial results over [T, N * H, V] by log-sum-exp, and keep this rank's H heads."""
        lses = list(self.communicator.all_gather(partial.known_lse.unsqueeze(0), 0).unbind(0))
        merged = self.communicator.all_reduce(rank_share(partial, lses))
        return Partial(self._own(merged, num_kv_heads), self._own(total_lse(lses), num_kv_heads))

    def _own(self, states: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """[T, H, ...] of [T, N * H, ...]."""
        by_rank = states.unflatten(1, (num_kv_heads, self.num_ranks, -1))
        return by_rank[:, :, self.rank].flatten(1, 2)


def attend_over_ranks(
    impl: SharedContextImpl,
    ranks: ContextRanks,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
) -> torch.Tensor:
    """Fill ``output`` [T, H, V] with attention of the rank's own heads over everything, and return it.

    ``states``: the step's query [T, H, D], key [T, K, D] and value [T, K, V].
    """
    query, key, value = states
    own = impl.step_partial(query, key, value, metadata, output)
    if not impl.has_context(metadata):
        return output
    kv_heads = key.shape[1]
    everyone = ranks.gather_heads(query, kv_heads)
    shared = everyone.new_empty(*everyone.shape[:2], output.shape[-1])
    context = impl.context_partial(everyone, kv_cache, metadata, shared)
    return merge_partials([own, ranks.merge_heads(context, kv_heads)], out=output).output
