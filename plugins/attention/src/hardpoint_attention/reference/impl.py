"""One layer's attention over the groups of a step.

Legend: T tokens of the step, n tokens of a group (R rows x Q queries), H query heads, K KV heads, G = H / K,
D head size of queries and keys, V of values and outputs, S key positions, B block size, W = D + V cached per token.

Latent layers (MLA) cache no values: W = D, and the values are the first V entries of the keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hardpoint.interfaces.attention import AttentionImpl, AttentionLayerParams
from hardpoint_attention.reference.groups import RowGroup
from hardpoint_attention.reference.metadata import LayerView, ReferenceMetadata, Workspace

__all__ = ["ReferenceImpl"]

TILE_QUERIES = 512
EXPLICIT_TILE_QUERIES = 64
"""Smaller, since scores [H, Q, S] are held in float32."""


class ReferenceImpl(AttentionImpl):
    """Plain layers run on torch's fused attention; soft cap, ALiBi, sinks, log-sum-exp and values of another size than
    keys on explicit scores."""

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params
        slopes = params.alibi_slopes
        self._slopes = None if slopes is None else torch.tensor(list(slopes), dtype=torch.float32)
        self._needs_scores = params.logits_soft_cap is not None or slopes is not None or params.sinks is not None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: ReferenceMetadata | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        cache = None if kv_cache is None else _Pages(kv_cache)
        # The fused kernel wants values as wide as keys.
        is_explicit = self._needs_scores or output.shape[-1] != query.shape[-1]
        for group in metadata.groups(self._view(cache, explicit=is_explicit)):
            keys, values = self._keys_values(group, key, value, cache, metadata.workspace)
            picked = group.pick(query)
            if is_explicit:
                group.put(output, self._explicit(group, picked, keys, values)[0])
            else:
                group.put(output, self._fused(group, picked, keys, values))
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: ReferenceMetadata, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(output.shape[:2], -torch.inf, dtype=torch.float32, device=output.device)
        cache = _Pages(kv_cache)
        for group in metadata.groups(self._view(cache, explicit=True, cache_only=True)):
            keys, values = self._keys_values(group, query, output, cache, metadata.workspace)
            attended, group_lse = self._explicit(group, group.pick(query), keys, values)
            group.put(output, attended)
            group.put(lse, group_lse)
        return output, lse

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        count = slot_mapping.shape[0]
        is_latent = kv_cache.shape[-1] == key.shape[-1]
        states = key[:count] if is_latent else torch.cat((key[:count], value[:count]), dim=-1)
        states = states.to(kv_cache.dtype)
        is_real = slot_mapping >= 0
        if not bool(is_real.all()):
            slot_mapping, states = slot_mapping[is_real], states[is_real]
        block_size = kv_cache.shape[2]
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        kv_cache.transpose(1, 2).index_put_((blocks, slot_mapping - blocks * block_size), states)

    def _view(self, cache: _Pages | None, *, explicit: bool, cache_only: bool = False) -> LayerView:
        return LayerView(
            window=self.params.sliding_window,
            num_kv_heads=self.params.num_kv_heads,
            pages_per_block=0 if cache is None else cache.pages_per_block,
            page_bytes=0 if cache is None else cache.page_bytes,
            tile_queries=EXPLICIT_TILE_QUERIES if explicit else TILE_QUERIES,
            biased=explicit,
            cache_only=cache_only,
        )

    def _keys_values(
        self, group: RowGroup, key: torch.Tensor, value: torch.Tensor, cache: _Pages | None, workspace: Workspace
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [R, K, S, D] and values [R, K, S, V] in the dtype of ``key``; views of scratch that the next group
        overwrites. ``value`` tells V where the cache has none."""
        if group.pages is None or cache is None:
            shape = (group.num_rows, group.num_keys)
            keys, values = (group.pick(states).unflatten(0, shape) for states in (key, value))
            return keys.transpose(1, 2), values.transpose(1, 2)
        pages = group.pages.shape[0]
        scratch = workspace.take(pages, cache.page_size, cache.flat.dtype)
        torch.index_select(cache.flat, 0, group.pages, out=scratch)
        entries = scratch.view(-1, cache.width)
        if group.stale is not None:
            entries.index_fill_(0, group.stale, 0)
        states = entries.view(group.num_rows, self.params.num_kv_heads, -1, cache.width)
        states = states[:, :, : group.num_keys]
        if states.dtype != key.dtype:
            states = states.to(key.dtype)
        size = self.params.head_size
        return states[..., :size], states[..., size:] if cache.width > size else states[..., : value.shape[-1]]

    def _fused(self, group: RowGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[n, H, D] to [R, Q, H, D]."""
        rows, queries, kv_heads = group.num_rows, group.num_queries, self.params.num_kv_heads
        heads, size = query.shape[1:]
        if queries == 1:
            # The G heads of a KV head act as G queries of one head: nothing is repeated.
            grouped = query.view(rows, kv_heads, heads // kv_heads, size)
            mask = None if group.mask is None else group.mask.expand(-1, -1, heads // kv_heads, -1)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=self.params.scale)
            return attended.reshape(rows, 1, heads, size)
        attended = F.scaled_dot_product_attention(
            query.view(rows, queries, heads, size).transpose(1, 2),
            keys,
            values,
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=self.params.scale,
            enable_gqa=heads != kv_heads,
        )
        return attended.transpose(1, 2)

    def _explicit(
        self, group: RowGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, H, D] to ([R, Q, H, V] and log-sum-exp [R, Q, H]), both float32."""
        rows, queries, kv_heads = group.num_rows, group.num_queries, self.params.num_kv_heads
        heads, size = query.shape[1:]
        grouped = query.float().view(rows, queries, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        # The G heads of a KV head act as more queries of one head: its keys and values are not repeated.
        merged = grouped.reshape(rows, kv_heads, -1, size)
        scores = torch.matmul(merged, keys.float().transpose(-1, -2)).mul_(self.params.scale)
        scores = scores.unflatten(2, (-1, queries))
        cap = self.params.logits_soft_cap
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        if self._slopes is not None and group.distance is not None:
            slopes = self._slopes.to(scores.device).view(1, kv_heads, -1, 1, 1)
            scores -= slopes * group.distance[:, None, None]
        if group.mask is not None:
            scores += group.mask.unsqueeze(1)
        lse = torch.logsumexp(scores, dim=-1)
        if self.params.sinks is not None:
            sinks = self.params.sinks.float().view(1, kv_heads, -1, 1)
            lse = torch.logaddexp(lse, sinks.expand_as(lse))
        weights = (scores - lse.unsqueeze(-1)).exp_()
        attended = torch.matmul(weights.flatten(2, 3), values.float()).unflatten(2, (-1, queries))
        output = attended.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)
        return output, lse.permute(0, 3, 1, 2).reshape(rows, queries, heads)


class _Pages:
    """A layer's cache [blocks, K, B, W] as rows of one head's page each."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        num_blocks, kv_heads, block_size, width = kv_cache.shape
        self.page_size = block_size * width
        self.width = width
        self.page_bytes = self.page_size * kv_cache.element_size()
        self.pages_per_block = kv_heads if num_blocks == 1 else kv_cache.stride(0) // self.page_size
        expected = (self.pages_per_block * self.page_size, self.page_size, width, 1)
        # The stride of a dimension of size one means nothing (R5.42).
        real = zip(kv_cache.shape, kv_cache.stride(), expected, strict=True)
        if any(stride != wanted for size, stride, wanted in real if size > 1):
            raise ValueError(
                f"KV cache strides {kv_cache.stride()} of shape {tuple(kv_cache.shape)} are not whole pages per head; "
                "expected [blocks, heads, block size, content] with contiguous blocks at a multiple of a page"
            )
        rows = (num_blocks - 1) * self.pages_per_block + kv_heads
        self.flat = kv_cache.as_strided((rows, self.page_size), (self.page_size, 1))
