"""The shortest correct paged attention: row by row in float32. Kits run models over it where no backend is under test,
and it is what the mutants of the attention rules are made of.

Legend: H query heads, K KV heads, D head size, V size of a head's values; q query tokens of a row, k keys of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint_testing_torch.attention_storage import StoredStates
from hardpoint_torch_runtime.layers import Partial

__all__ = ["PlainAttention", "PlainAttentionBackend"]

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8_per_token_head"}
"""Caches by the dtype of their elements."""


class PlainBuilder(AttentionMetadataBuilder):
    """The common metadata is all that plain attention needs."""

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CommonAttentionMetadata:
        del fast
        return common


class PlainAttention(AttentionImpl):
    """All that the interface has words for; also selected keys, and contexts that are dealt out among ranks."""

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        self.require_whole(metadata)
        self._rows(query, (key, value), kv_cache, metadata, output)
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.require_whole(metadata)
        nothing = output[:0]
        return output, self._rows(query, (nothing, nothing), kv_cache, metadata, output)

    def forward_selected(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        selected: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        self.require_whole(metadata)
        self._rows(query, (key, value), kv_cache, metadata, output, selected)
        return output

    def has_context(self, metadata: CommonAttentionMetadata) -> bool:
        rows = metadata.num_rows
        return bool((metadata.seq_lens_cpu[:rows] > np.diff(metadata.query_start_loc_cpu[: rows + 1])).any())

    def context_partial(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: CommonAttentionMetadata, output: torch.Tensor
    ) -> Partial:
        nothing, lengths = output[:0], self.local_lengths(metadata)
        part = replace(metadata, seq_lens_cpu=lengths, causal=False)
        return Partial(output, self.without_sinks()._rows(query, (nothing, nothing), kv_cache, part, output))

    def step_partial(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
    ) -> Partial:
        part = replace(metadata, seq_lens_cpu=np.diff(metadata.query_start_loc_cpu))
        return Partial(output, self._rows(query, (key, value), None, part, output))

    def local_lengths(self, metadata: CommonAttentionMetadata) -> np.ndarray:
        """How many keys of each row are on this rank. Raises ``ValueError`` where the step does not say."""
        if metadata.dcp_local_seq_lens_cpu is None:
            raise ValueError("contexts that are dealt out among ranks need dcp_local_seq_lens_cpu; fill it")
        return metadata.dcp_local_seq_lens_cpu

    def without_sinks(self) -> PlainAttention:
        other = copy.copy(self)
        other.params = replace(self.params, sinks=None)
        return other

    def require_whole(self, metadata: CommonAttentionMetadata) -> None:
        """Raises ``RuntimeError`` where this rank has a share of the contexts only."""
        if metadata.dcp_local_seq_lens is not None:
            raise RuntimeError("this rank holds a share of each context only; merge the partial results of all ranks")

    def _rows(
        self,
        query: torch.Tensor,
        states: tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor | None,
        metadata: CommonAttentionMetadata,
        output: torch.Tensor,
        selected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fills ``output`` and returns the log-sum-exp float32 [T, H]."""
        starts, num_keys = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
        lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
        first_key = 0
        for row in range(metadata.num_rows):
            step = slice(int(starts[row]), int(starts[row + 1]))
            if cache is not None:
                keys, values = self.read(self.stored(cache, metadata, row), output.shape[-1])
            else:
                fresh = slice(first_key, first_key := first_key + int(num_keys[row]))
                keys, values = states[0][fresh], states[1][fresh]
            visible = self.visible(metadata, row, step.stop - step.start, len(keys)).to(query.device)
            if selected is not None:
                visible &= self.chosen(selected[step], len(keys))
            answer = self.attend(query[step].float(), keys.float(), values.float(), visible)
            output[step], lse[step] = answer[0].to(output.dtype), answer[1]
        return lse

    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        """What the cache holds [k, K, width] of everything the row may see."""
        length = int(metadata.seq_lens_cpu[row])
        blocks = metadata.block_table[row, : -(-length // metadata.block_size)].long()
        by_token = _as_bytes(cache)[blocks].transpose(1, 2).flatten(0, 1)[:length]
        return by_token.view(cache.dtype)

    def read(self, stored: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [k, K, D] and values [k, K, V]. Latents hold the latter in the former."""
        return self.stored_as(stored, value_size).decode(stored, self.params.head_size)

    def stored_as(self, states: torch.Tensor, value_size: int) -> StoredStates:
        """How a cache of these states keeps keys and values."""
        params = self.params
        name = QUANTIZED.get(states.dtype, str(states.dtype).removeprefix("torch."))
        is_latent = states.shape[-1] == params.head_size
        return StoredStates(name, params.key_scale, params.value_scale, value_size if is_latent else None)

    def chosen(self, selected: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Bool [q, k] of positions [q, N] within the row; others than its k keys choose nothing."""
        is_key = (selected >= 0) & (selected < num_keys)
        chosen = torch.zeros(len(selected), num_keys + 1, dtype=torch.bool, device=selected.device)
        return chosen.scatter_(1, torch.where(is_key, selected, num_keys).long(), True)[:, :num_keys]

    def visible(self, metadata: CommonAttentionMetadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        """Bool [q, k] of one row whose queries are the last of its tokens."""
        params = self.params
        if params.kind is AttentionKind.ENCODER_DECODER:
            return torch.ones(num_queries, num_keys, dtype=torch.bool)
        queries = torch.arange(num_keys - num_queries, num_keys)[:, None]
        keys = torch.arange(num_keys)
        is_causal = self.is_causal(metadata, row)
        distance = queries - keys if is_causal else (queries - keys).abs()
        visible = (distance >= 0) & self.near(distance, keys, metadata, row)
        if params.chunk_size is not None:
            visible &= queries // params.chunk_size == keys // params.chunk_size
        for begin, end in metadata.mm_ranges[row] if metadata.mm_ranges is not None else ():
            visible |= (begin <= queries) & (queries < end) & (begin <= keys) & (keys < end)
        return visible

    def is_causal(self, metadata: CommonAttentionMetadata, row: int) -> bool:
        if isinstance(metadata.causal, bool):
            return metadata.causal
        return bool(metadata.causal[row] if metadata.row_causal_cpu is None else metadata.row_causal_cpu[row])

    def near(
        self, distance: torch.Tensor, keys: torch.Tensor, metadata: CommonAttentionMetadata, row: int
    ) -> torch.Tensor:
        """What the window leaves, if there is one."""
        window = self.params.sliding_window
        if window is None:
            return torch.ones_like(distance, dtype=torch.bool)
        if self.params.keeps_prompt and metadata.prompt_lens_cpu is not None:
            return (distance < window) | (keys < int(metadata.prompt_lens_cpu[row]))
        return distance < window

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[q, H, V] and the log-sum-exp [q, H] of one row."""
        params = self.params
        # There may be heads of other ranks.
        group = query.shape[1] // params.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * params.scale
        if params.logits_soft_cap is not None:
            scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
        if params.alibi_slopes is not None:
            slopes = torch.tensor(tuple(params.alibi_slopes), device=query.device)
            places = torch.arange(len(keys), device=query.device)
            scores = scores - slopes[:, None, None] * (places[len(keys) - len(query) :, None] - places)
        if params.relative_bias is not None:
            places = torch.arange(len(keys), device=query.device)
            distance = places[len(keys) - len(query) :, None] - places
            scores = scores + params.relative_bias[:, distance.clamp(0, params.relative_bias.shape[1] - 1)]
        scores = scores.masked_fill(~visible, -torch.inf)
        if params.sinks is not None:
            scores = torch.cat((scores, params.sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
            values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
        lse = torch.logsumexp(scores, dim=-1)
        # Zero where a query sees nothing.
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)), lse.transpose(0, 1)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        real = (slot_mapping >= 0).nonzero().flatten()
        slots, size = slot_mapping[real], kv_cache.shape[2]
        states = self.stored_as(kv_cache, value.shape[-1]).encode(key[real], value[real])
        _as_bytes(kv_cache).transpose(1, 2)[slots // size, slots % size] = _as_bytes(states)


class PlainAttentionBackend(AttentionBackend):
    """``impl`` is replaced by mutants."""

    name = "plain"
    returns_lse = True
    known_needs = AttentionBackend.known_needs | {
        *("chunk_size", "keeps_prompt", "uses_mm_prefix", "uses_row_causality", "per_head_scales", "needs_lse"),
        "uses_relative_bias",
        *("uses_sparse", "dcp_size"),
    }
    impl: type[PlainAttention] = PlainAttention

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.device.device_type != "cpu":
            return f"plain attention runs on the CPU, not on {need.device.device_type}"
        if need.dtype not in DTYPES:
            return f"plain attention computes {', '.join(DTYPES)}, not {need.dtype}"
        stored = (*DTYPES, *QUANTIZED.values())
        if need.kv_cache_dtype not in stored:
            return f"plain attention reads caches of {', '.join(stored)}, not of {need.kv_cache_dtype}"
        if need.uses_sparse and need.kind is not AttentionKind.DECODER:
            return f"keys are selected among those of a decoder, not of attention kind {need.kind}"
        if need.dcp_size > 1 and (reason := self._refuse_ranks(need)):
            return reason
        if need.uses_mla:
            return self._refuse_latents(need)
        if need.batch_invariant:
            return "plain attention does not promise equal bits in every batch"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads cannot be shared out among {need.num_kv_heads} KV heads"
        return None

    def _refuse_ranks(self, need: AttentionNeed) -> str | None:
        is_plain = need.kind is AttentionKind.DECODER and need.kv_cache_dtype == need.dtype
        places = need.sliding_window is not None or need.chunk_size is not None or need.uses_alibi
        places = places or need.uses_relative_bias
        if is_plain and not places and not need.uses_mm_prefix and not need.uses_sparse:
            return None
        return "a rank that holds a share of a context knows no places of its keys, and stores what it computed with"

    def _refuse_latents(self, need: AttentionNeed) -> str | None:
        if need.num_kv_heads != 1:
            return f"latents are one KV head that all heads share, not {need.num_kv_heads}"
        if need.kind is not AttentionKind.DECODER:
            return f"latents are read from a cache, which attention kind {need.kind} has not"
        if need.kv_cache_dtype == "int8_per_token_head":
            return "latents are not told from keys and values in a cache with scales in it"
        return "plain attention does not promise equal bits in every batch" if need.batch_invariant else None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BlockSizeRule(multiple_of=1)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del spec, layer_names, max_rows, max_tokens, device
        return PlainBuilder()

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return self.impl(params)


def _as_bytes(states: torch.Tensor) -> torch.Tensor:
    """Torch does not index all dtypes of one byte; their bytes it does."""
    return states.view(torch.uint8) if states.dtype.itemsize == 1 else states
