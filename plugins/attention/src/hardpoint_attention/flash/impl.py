"""One layer's attention by FlashAttention kernels.

Legend: T query tokens, H query heads, K KV heads, D head size, N blocks, B block size, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hardpoint.interfaces.attention import AttentionImpl, AttentionKind, AttentionLayerParams
from hardpoint_attention.flash.cache_write import CacheWriter
from hardpoint_attention.flash.calls import AttentionCall, FlashKernel
from hardpoint_attention.flash.masks import MaskShape, mask_for
from hardpoint_attention.flash.metadata import CascadeParts, ContextParts, FlashMetadata, RowPart
from hardpoint_attention.flash.views import FULL_WINDOW, cache_views, canonicalized, window_pair
from hardpoint_torch_runtime.layers.partial_attention import Partial, merge_partials

__all__ = ["FlashImpl", "LayerKernels"]

FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The kernels of one layer. ``load`` gives a generation's, importing its package when first asked.

    ``generation`` serves the layer as such, ``masked`` steps with multimodal ranges and ``encoder`` calls without a
    cache; None: nothing installed does.
    """

    load: Callable[[int], FlashKernel]
    generation: int
    masked: int | None
    encoder: int


class FlashImpl(AttentionImpl):
    """Forward reads the cache only; writing is an operation of its own (R5.70)."""

    def __init__(self, params: AttentionLayerParams, kernels: LayerKernels) -> None:
        self.params = params
        self._writer = CacheWriter(params)
        self._kernels = kernels
        self._is_bidirectional = params.kind is not AttentionKind.DECODER
        slopes = params.alibi_slopes
        self._slopes = None if slopes is None else torch.tensor(list(slopes), dtype=torch.float32)
        self._views: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._view = params.sliding_window, params.chunk_size
        self._may_cascade = (
            params.sliding_window is None
            and params.chunk_size is None
            and slopes is None
            and params.kind is AttentionKind.DECODER
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: FlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Raises ``TypeError`` for an ``output_scale``: these kernels do not quantize what they write (R5.40)."""
        if output_scale is not None:
            raise TypeError("FlashAttention does not quantize its output; quantize it in an operation of its own")
        if metadata is None:
            return output.zero_()
        self._require_whole_contexts(metadata)
        if kv_cache is None:
            self._over_fresh(query, key, value, metadata, output)
        elif metadata.cascade is not None and self._may_cascade:
            self._in_cascade(query, kv_cache, metadata, metadata.cascade, output)
        else:
            self._over_pages(query, kv_cache, metadata, metadata.plain, output)
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashMetadata, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._require_whole_contexts(metadata)
        lse = self._over_pages(query, kv_cache, metadata, metadata.plain, output, wants_lse=True)
        # Kernels say +inf of a query that saw no key.
        known = _by_token(lse)
        return output, torch.where(known == torch.inf, -torch.inf, known)

    def has_context(self, metadata: FlashMetadata) -> bool:
        """Whether any row had tokens before this step, on whatever rank; a decision of the host (R5.90)."""
        return self._context(metadata).has_context

    def context_partial(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashMetadata, output: torch.Tensor
    ) -> Partial:
        """This rank's share of the contexts, for the heads of all ranks, into ``output``; without sinks."""
        part = self._context(metadata).context
        kernel = self._kernels.load(self._kernels.generation)
        keys, values = self._cached_views(kv_cache, kernel)
        lse = kernel(
            AttentionCall(
                query=self._query(query, keys.dtype, kernel),
                key=keys,
                value=values,
                output=output,
                cu_query_lens=part.cu_query_lens,
                max_query_len=part.max_query_len,
                max_key_len=part.max_key_len,
                scale=self.params.scale,
                causal=False,
                window=FULL_WINDOW,
                soft_cap=self.params.logits_soft_cap or 0.0,
                key_lens=part.key_lens,
                page_table=part.page_table,
                num_splits=1,
                wants_lse=True,
            )
        )
        return Partial(output, _by_token(lse))

    def step_partial(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashMetadata, output: torch.Tensor
    ) -> Partial:
        """The step's own tokens alone, into ``output``; with sinks."""
        part = metadata.plain
        kernel = self._kernels.load(self._kernels.generation)
        lse = kernel(
            AttentionCall(
                query=_fit(query, kernel),
                key=_fit(key, kernel),
                value=_fit(value, kernel),
                output=output,
                cu_query_lens=part.cu_query_lens,
                max_query_len=part.max_query_len,
                max_key_len=part.max_query_len,
                scale=self.params.scale,
                causal=part.causal,
                window=FULL_WINDOW,
                soft_cap=self.params.logits_soft_cap or 0.0,
                cu_key_lens=part.cu_query_lens,
                sinks=self.params.sinks,
                wants_lse=True,
            )
        )
        return Partial(output, _by_token(lse))

    def _context(self, metadata: FlashMetadata) -> ContextParts:
        if metadata.context is None:
            raise ValueError(
                f"layer {self.params.layer_name!r}: nothing says how much of each context this rank holds; the builder "
                "must be told of context_shards, and the step of dcp_local_seq_lens"
            )
        return metadata.context

    def _require_whole_contexts(self, metadata: FlashMetadata) -> None:
        if metadata.context is not None:
            raise RuntimeError(
                f"layer {self.params.layer_name!r}: this rank holds a share of each context only (dcp_local_seq_lens); "
                "merge context_partial of all ranks and step_partial instead"
            )

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._writer.write(key, value, kv_cache, slot_mapping)

    def _over_pages(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashMetadata,
        part: RowPart,
        output: torch.Tensor,
        *,
        wants_lse: bool = False,
        has_sinks: bool = True,
    ) -> torch.Tensor | None:
        params = self.params
        kernel = self._kernel(metadata)
        keys, values = self._cached_views(kv_cache, kernel)
        causal = part.causal and not self._is_bidirectional
        rows = part.key_lens.shape[0]
        if kernel.needs_cu_key_lens:
            self._require_key_sums(part)
        call = AttentionCall(
            query=self._query(query, keys.dtype, kernel),
            key=keys,
            value=values,
            output=output,
            cu_query_lens=part.cu_query_lens,
            max_query_len=part.max_query_len,
            max_key_len=part.max_key_len,
            scale=params.scale,
            causal=causal,
            window=window_pair(params.sliding_window, causal),
            soft_cap=params.logits_soft_cap or 0.0,
            key_lens=part.key_lens,
            cu_key_lens=part.cu_key_lens,
            page_table=part.page_table,
            alibi_slopes=self._slopes_on(query.device),
            sinks=params.sinks if has_sinks else None,
            key_descale=_per_row(params.key_scale, rows, params.num_kv_heads),
            value_descale=_per_row(params.value_scale, rows, params.num_kv_heads),
            num_splits=metadata.max_splits,
            schedule=part.schedule if metadata.scheduled_view == self._view else None,
            chunk_size=params.chunk_size or 0,
            wants_lse=wants_lse,
        )
        if kernel.generation == 4:
            self._install_mask(call, metadata)
        return kernel(call)

    def _install_mask(self, call: AttentionCall, metadata: FlashMetadata) -> None:
        """R5.50, R5.51: with a mask the built-in causality and window are off, or they would cut the mask short."""
        params = self.params
        has_ranges = metadata.ranges is not None and params.kind is AttentionKind.DECODER
        if not (has_ranges or params.keeps_prompt or params.chunk_size is not None):
            return
        is_causal = call.causal or params.keeps_prompt
        shape = MaskShape(is_causal, params.sliding_window, params.chunk_size, params.keeps_prompt, has_ranges)
        call.mask, call.mask_tensors = mask_for(shape), self._mask_tensors(metadata, has_ranges=has_ranges)
        call.causal, call.window, call.chunk_size = False, FULL_WINDOW, 0

    def _mask_tensors(self, metadata: FlashMetadata, *, has_ranges: bool) -> list[torch.Tensor]:
        """What the mask reads, in the order of :func:`mask_for`."""
        tensors = [metadata.ranges] if has_ranges and metadata.ranges is not None else []
        if self.params.keeps_prompt:
            if metadata.prompt_lens is None:
                raise RuntimeError(
                    f"layer {self.params.layer_name!r} keeps prompts beyond its window, but the step does not say how "
                    "long they are; fill prompt_lens"
                )
            tensors.append(metadata.prompt_lens)
        return tensors

    def _over_fresh(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashMetadata, output: torch.Tensor
    ) -> None:
        """The step's own keys, without a cache and in both directions (R5.46)."""
        part, params = metadata.plain, self.params
        kernel = self._kernels.load(self._kernels.encoder)
        is_cross = params.kind is AttentionKind.ENCODER_DECODER
        if is_cross:
            self._require_key_sums(part)
        causal = part.causal and not self._is_bidirectional
        kernel(
            AttentionCall(
                query=_fit(query, kernel),
                key=_fit(key, kernel),
                value=_fit(value, kernel),
                output=output,
                cu_query_lens=part.cu_query_lens,
                max_query_len=part.max_query_len,
                max_key_len=part.max_key_len if is_cross else part.max_query_len,
                scale=params.scale,
                causal=causal,
                window=window_pair(params.sliding_window, causal),
                soft_cap=params.logits_soft_cap or 0.0,
                cu_key_lens=part.cu_key_lens if is_cross else part.cu_query_lens,
                sinks=params.sinks,
                num_splits=metadata.max_splits,
            )
        )

    def _in_cascade(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashMetadata,
        parts: CascadeParts,
        output: torch.Tensor,
    ) -> None:
        """R5.83: the prefix once for all queries, then each row's rest. Sinks are scores of the prefix part only."""
        shared = torch.empty_like(output)
        prefix_lse = self._over_pages(query, kv_cache, metadata, parts.prefix, shared, wants_lse=True)
        suffix_lse = self._over_pages(query, kv_cache, metadata, parts.suffix, output, wants_lse=True, has_sinks=False)
        partials = Partial(shared, _by_token(prefix_lse)), Partial(output, _by_token(suffix_lse))
        merge_partials(partials, out=output)

    def _kernel(self, metadata: FlashMetadata) -> FlashKernel:
        kernels = self._kernels
        if metadata.ranges is None or kernels.generation == 4 or self._is_bidirectional:
            return kernels.load(kernels.generation)
        if kernels.masked is None:
            raise RuntimeError(
                f"layer {self.params.layer_name!r} got multimodal ranges, which only FlashAttention 4 takes; declare "
                "uses_mm_prefix so that a backend that can is chosen"
            )
        return kernels.load(kernels.masked)

    def _require_key_sums(self, part: RowPart) -> None:
        if part.cu_key_lens is None:
            raise RuntimeError(
                f"layer {self.params.layer_name!r} needs prefix sums of key lengths, which its group's builder did not "
                "make: the layer was not there when the first step was built. Create layers before"
            )

    def _cached_views(self, kv_cache: torch.Tensor, kernel: FlashKernel) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, B, K, D] of the cache; the same objects while the cache is the same (P5.7)."""
        if self._views is None or self._views[0] is not kv_cache:
            keys, values = cache_views(kv_cache, self.params.head_size)
            self._views = kv_cache, _fit(keys, kernel), _fit(values, kernel)
        return self._views[1], self._views[2]

    def _query(self, query: torch.Tensor, stored: torch.dtype, kernel: FlashKernel) -> torch.Tensor:
        """Kernels want queries of the cache's dtype where that has 8 bits."""
        if stored is not query.dtype and stored.itemsize == 1:
            query = query.clamp(-FP8_MAX, FP8_MAX).to(stored)
        return _fit(query, kernel)

    def _slopes_on(self, device: torch.device) -> torch.Tensor | None:
        if self._slopes is not None and self._slopes.device != device:
            self._slopes = self._slopes.to(device)
        return self._slopes


def _fit(values: torch.Tensor, kernel: FlashKernel) -> torch.Tensor:
    return canonicalized(values) if kernel.needs_canonical_strides else values


def _per_row(scale: torch.Tensor | None, rows: int, kv_heads: int) -> torch.Tensor | None:
    """[R, K] by expansion, never materialized (R5.43)."""
    return None if scale is None else scale.expand(rows, kv_heads)


def _by_token(lse: torch.Tensor | None) -> torch.Tensor:
    """[T, H] of a kernel's [H, T]."""
    if lse is None:
        raise RuntimeError("a FlashAttention kernel returned no log-sum-exp although it was asked for")
    return lse.t()
