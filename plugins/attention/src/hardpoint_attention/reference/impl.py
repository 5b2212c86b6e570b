"""One layer's attention over the groups of a step.

Legend: T tokens of the step, H query heads, K KV heads, D head size of queries and keys, V of values and outputs.

Latent layers (MLA) cache no values: these are the first V entries of the keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.interfaces.attention import AttentionImpl, AttentionKind, AttentionLayerParams
from hardpoint_attention.reference.groups import RowGroup, Spelling
from hardpoint_attention.reference.layer_cache import LayerCache
from hardpoint_attention.reference.metadata import KeyPart, LayerView, ReferenceMetadata
from hardpoint_attention.reference.scores import ScoreRules, attend, attend_explicitly
from hardpoint_torch_runtime.layers.partial_attention import Partial, merge_partials

__all__ = ["ReferenceImpl"]

TILE_QUERIES = 512
EXPLICIT_TILE_QUERIES = 64
"""Smaller, since scores [H, Q, S] are held in float32."""


class ReferenceImpl(AttentionImpl):
    """Plain layers run on torch's fused attention; soft cap, ALiBi, relative bias, sinks, log-sum-exp, cascade and
    values of another size than keys on explicit scores."""

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params
        slopes = params.alibi_slopes
        self._slopes = None if slopes is None else torch.tensor(list(slopes), dtype=torch.float32)
        self._views: dict[tuple[tuple[int, int], bool, bool], LayerView] = {}
        self._has_distances = slopes is not None or params.relative_bias is not None
        self._needs_scores = self._has_distances or params.logits_soft_cap is not None or params.sinks is not None

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
        cache = None if kv_cache is None else self._cache(kv_cache)
        self._require_whole_contexts(metadata)
        # The fused kernel wants values as wide as keys.
        is_explicit = self._needs_scores or output.shape[-1] != query.shape[-1]
        view = self._view(cache, query.dtype, explicit=is_explicit)
        if cache is not None and self._takes_cascade(metadata, view):
            return self._cascade(query, cache, metadata, output, (key, value)).output
        step = (key, value)
        if is_explicit:
            return self._explicit(query, step, cache, metadata, view, output).output
        for group in metadata.groups(view):
            if group.num_keys == 0:
                group.fill(output, 0)
                continue
            keys, values = self._keys_values(group, step, cache, metadata, output.shape[-1], query.dtype)
            picked = group.pick(query).to(keys.dtype)
            group.put(output, attend(group, picked, keys, values, self.params.scale))
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: ReferenceMetadata, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._require_whole_contexts(metadata)
        cache = self._cache(kv_cache)
        view = self._view(cache, query.dtype, explicit=True, cache_only=True)
        if self._takes_cascade(metadata, view):
            partial = self._cascade(query, cache, metadata, output, None)
        else:
            partial = self._explicit(query, None, cache, metadata, view, output)
        return partial.output, partial.lse

    def forward_selected(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: ReferenceMetadata | None,
        selected: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Queries that see those of their visible keys which ``selected`` int32 [T, N] names; see
        :class:`~hardpoint_torch_runtime.layers.SelectedKeysImpl`."""
        if metadata is None:
            return output.zero_()
        self._require_whole_contexts(metadata)
        cache = None if kv_cache is None else self._cache(kv_cache)
        view = self._view(cache, query.dtype, explicit=True)
        view = replace(view, spelling=replace(view.spelling, positions=True))
        return self._explicit(query, (key, value), cache, metadata, view, output, selected=selected).output

    def has_context(self, metadata: ReferenceMetadata) -> bool:
        """Whether any row had tokens before this step, on whatever rank."""
        return bool((metadata.batch.seq_lens > metadata.batch.query_lens).any())

    def context_partial(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: ReferenceMetadata, output: torch.Tensor
    ) -> Partial:
        """Attention of all queries over this rank's share of their contexts, written into ``output``; without sinks.

        Raises ``ValueError`` for metadata without ``dcp_local_seq_lens``.
        """
        cache = self._cache(kv_cache)
        view = replace(self._view(cache, query.dtype, explicit=True, cache_only=True), part=KeyPart.CONTEXT)
        return self._explicit(query, None, cache, metadata, view, output, with_sinks=False)

    def step_partial(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: ReferenceMetadata,
        output: torch.Tensor,
    ) -> Partial:
        """Attention of all queries over the step's own tokens, written into ``output``; with sinks."""
        view = replace(self._view(None, query.dtype, explicit=True), part=KeyPart.STEP)
        return self._explicit(query, (key, value), None, metadata, view, output)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._cache(kv_cache).write(key, value, slot_mapping)

    def _require_whole_contexts(self, metadata: ReferenceMetadata) -> None:
        if metadata.context_lens is not None:
            raise RuntimeError(
                f"layer {self.params.layer_name!r}: this rank holds a share of each context only (dcp_local_seq_lens); "
                "merge context_partial of all ranks and step_partial instead"
            )

    def _cache(self, kv_cache: torch.Tensor) -> LayerCache:
        return LayerCache(kv_cache, self.params.head_size, (self.params.key_scale, self.params.value_scale))

    def _view(
        self, cache: LayerCache | None, dtype: torch.dtype, *, explicit: bool, cache_only: bool = False
    ) -> LayerView:
        # What a narrower cache makes of keys is what later steps see, so this one is to see the same.
        cache_only = cache_only or (cache is not None and cache.dtype != dtype)
        pages = (0, 0) if cache is None else (cache.pages_per_block, cache.page_bytes)
        view = self._views.get((pages, explicit, cache_only))
        if view is None:
            view = self._views[pages, explicit, cache_only] = self._new_view(pages, explicit, cache_only)
        return view

    def _new_view(self, pages: tuple[int, int], explicit: bool, cache_only: bool) -> LayerView:
        params = self.params
        is_cross = params.kind is AttentionKind.ENCODER_DECODER
        return LayerView(
            window=None if is_cross else params.sliding_window,
            num_kv_heads=params.num_kv_heads,
            pages_per_block=pages[0],
            page_bytes=pages[1],
            tile_queries=EXPLICIT_TILE_QUERIES if explicit else TILE_QUERIES,
            spelling=Spelling(masks=explicit, distances=self._has_distances),
            cache_only=cache_only or is_cross,
            chunk=None if is_cross else params.chunk_size,
            keeps_prompt=params.keeps_prompt,
            is_cross=is_cross,
        )

    def _takes_cascade(self, metadata: ReferenceMetadata, view: LayerView) -> bool:
        return metadata.takes_cascade(view, self.params.num_heads, uses_alibi=self._has_distances)

    def _cascade(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: ReferenceMetadata,
        output: torch.Tensor,
        step: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> Partial:
        """The common prefix once for all rows, then each row's other keys (R5.83)."""
        view = self._view(cache, query.dtype, explicit=True, cache_only=step is None)
        partials = []
        for part in (KeyPart.PREFIX, KeyPart.SUFFIX):
            attended = torch.empty(output.shape, dtype=torch.float32, device=output.device)
            part_view = replace(view, part=part)
            # A sink counts once: in the prefix.
            with_sinks = part is KeyPart.PREFIX
            partials.append(self._explicit(query, step, cache, metadata, part_view, attended, with_sinks=with_sinks))
        return merge_partials(partials, output)

    def _explicit(
        self,
        query: torch.Tensor,
        step: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache | None,
        metadata: ReferenceMetadata,
        view: LayerView,
        output: torch.Tensor,
        *,
        with_sinks: bool = True,
        selected: torch.Tensor | None = None,
    ) -> Partial:
        """Every group on explicit scores, into ``output``; of keys that are ``selected``, where some are."""
        params = self.params
        sinks = params.sinks if with_sinks else None
        rules = ScoreRules(params.scale, params.logits_soft_cap, self._slopes, sinks, params.relative_bias)
        lse = torch.full(output.shape[:2], -torch.inf, dtype=torch.float32, device=output.device)
        for group in metadata.groups(view):
            if group.num_keys == 0:
                group.fill(output, 0)
                if sinks is not None:
                    shape = (group.num_rows, group.num_queries, len(sinks))
                    group.put(lse, sinks.float().to(lse.device).expand(shape))
                continue
            keys, values = self._keys_values(group, step, cache, metadata, output.shape[-1], query.dtype)
            if selected is not None:
                group = group.narrowed(selected)
            attended, group_lse = attend_explicitly(group, group.pick(query), keys, values, rules)
            group.put(output, attended)
            group.put(lse, group_lse)
        return Partial(output, lse)

    def _keys_values(
        self,
        group: RowGroup,
        step: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache | None,
        metadata: ReferenceMetadata,
        value_size: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [R, K, S, D] and values [R, K, S, V], from the cache or from the ``step``'s own."""
        if group.pages is not None and cache is not None:
            return cache.read(group, value_size, dtype, metadata.workspace)
        if step is None:
            raise RuntimeError(f"layer {self.params.layer_name!r} was planned to read keys that it was not given")
        keys, values = (group.pick_keys(states).transpose(1, 2) for states in step)
        return keys, values
