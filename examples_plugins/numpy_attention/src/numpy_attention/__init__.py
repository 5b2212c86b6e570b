"""Paged attention in NumPy, row by row: slow, exact, and the whole contract of an attention backend.

Legend: T tokens of the step, H query heads, K KV heads, D head size, S block size; q query and k visible tokens of one
row. A layer's cache is [blocks, K, S, 2 * D]: keys, then values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hardpoint.interfaces import (
    BLOCK_SIZES_CAPABILITY,
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    AttentionSpec,
    BlockSizeRule,
    CommonAttentionMetadata,
    NoOptions,
    WorkerContext,
    plugin,
)

BLOCK_SIZES = BlockSizeRule(multiple_of=1)


class Builder(AttentionMetadataBuilder):
    """The facts that every step comes with are all this backend needs."""

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CommonAttentionMetadata:
        return common


class NumpyAttention(AttentionImpl):
    def __init__(self, params: AttentionLayerParams) -> None:
        self._params = params

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """``key`` and ``value`` [T', K, D] go to ``slot_mapping`` [T]; negative slots and tokens beyond it, nowhere."""
        slots = slot_mapping.numpy()
        real = slots >= 0
        size = kv_cache.shape[2]
        states = np.concatenate((key.numpy(), value.numpy()), axis=-1)[: len(slots)]
        kv_cache.numpy()[slots[real] // size, :, slots[real] % size] = states[real]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """``query`` [T, H, D] to ``output`` [T, H, D]; the step's own keys and values were written before."""
        if metadata is None or kv_cache is None:
            return output.zero_()
        queries, answers, cache = query.numpy(), output.numpy(), kv_cache.numpy()
        table, starts = metadata.block_table.numpy(), metadata.query_start_loc_cpu
        for row in range(metadata.num_rows):
            length = int(metadata.seq_lens_cpu[row])
            step = slice(int(starts[row]), int(starts[row + 1]))
            states = self._gather(cache, table[row], length)
            answers[step] = self._attend(queries[step], *np.split(states, 2, axis=-1))
        return output

    def _gather(self, cache: np.ndarray, table: np.ndarray, length: int) -> np.ndarray:
        """[k, K, 2 * D]: what the row's blocks hold, in the order of its tokens."""
        blocks = table[: -(-length // cache.shape[2])]
        return cache[blocks].swapaxes(1, 2).reshape(-1, cache.shape[1], cache.shape[3])[:length]

    def _attend(self, query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[q, H, D]; the queries are the last q of k tokens. Each KV head serves H / K query heads."""
        group = self._params.num_heads // self._params.num_kv_heads
        keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, keys) * self._params.scale
        num_queries, num_keys = len(query), len(keys)
        distance = np.arange(num_keys - num_queries, num_keys)[:, None] - np.arange(num_keys)
        hidden = distance < 0
        if self._params.sliding_window is not None:
            hidden |= distance >= self._params.sliding_window
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, values)


class NumpyBackend(AttentionBackend):
    name = "numpy"

    def refuse(self, need: AttentionNeed) -> str | None:
        """What is refused here is never computed wrongly later; the reason is shown to whoever asks why."""
        if need.device.device_type != "cpu":
            return f"NumPy computes on the CPU, not on {need.device.device_type}"
        if {need.dtype, need.kv_cache_dtype} != {"float32"}:
            return f"only float32 is computed, not {need.dtype} over a cache of {need.kv_cache_dtype}"
        if need.kind is not AttentionKind.DECODER:
            return f"only decoders are served, not {need.kind}"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads cannot be shared out among {need.num_kv_heads} KV heads"
        features = {
            "soft caps": need.logits_soft_cap is not None,
            "ALiBi": need.uses_alibi,
            "sinks": need.uses_sinks,
            "latent keys and values": need.uses_mla,
            "equal bits in every batch": need.batch_invariant,
        }
        missing = [name for name, wanted in features.items() if wanted]
        return f"it does not know {', '.join(missing)}" if missing else None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return BLOCK_SIZES

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        return Builder()

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return NumpyAttention(params)


@plugin("attention_backend", capabilities={BLOCK_SIZES_CAPABILITY: {"multiple_of": BLOCK_SIZES.multiple_of}})
def create(ctx: WorkerContext, options: NoOptions) -> AttentionBackend:
    return NumpyBackend()
