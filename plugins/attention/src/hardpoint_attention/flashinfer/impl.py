"""One layer's attention by FlashInfer's wrappers.

Legend: T query tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hardpoint.interfaces.attention import AttentionImpl, AttentionKind, AttentionLayerParams
from hardpoint_attention.flash.cache_write import CacheWriter
from hardpoint_attention.flashinfer.metadata import FlashInferMetadata
from hardpoint_attention.flashinfer.plans import PlanKey
from hardpoint_attention.flashinfer.steps import Step

__all__ = ["FlashInferImpl", "plan_key"]

LN2 = math.log(2.0)
LEAST_BINARY = -4e4
"""Log-sum-exps below are the package's finite stand-in for minus infinity: of queries that saw no key. No score comes
near."""


def plan_key(params: AttentionLayerParams) -> PlanKey:
    """What a layer's wrappers are planned for."""
    window = params.sliding_window
    return PlanKey(
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_size=params.head_size,
        scale=params.scale,
        causal=params.kind is AttentionKind.DECODER,
        window_left=-1 if window is None else window - 1,
        soft_cap=params.logits_soft_cap or 0.0,
    )


class FlashInferImpl(AttentionImpl):
    """Wrappers give the log-sum-exp to base 2, know no sinks and no scales per head; these are applied around them.

    That is exact: a sink only adds to the softmax's denominator, a key's scale may as well multiply the query, and a
    value's the output.
    """

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params
        self._writer = CacheWriter(params)
        self._key = plan_key(params)
        self._views: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: FlashInferMetadata | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        if kv_cache is None:
            self._over_fresh(query, key, value, metadata, output)
        else:
            self._over_pages(query, kv_cache, metadata, output, None)
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashInferMetadata, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(output.shape[:2], -torch.inf, dtype=torch.float32, device=output.device)
        self._over_pages(query, kv_cache, metadata, output, lse)
        return output, lse

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._writer.write(key, value, kv_cache, slot_mapping)

    def _over_pages(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashInferMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        step, plans = metadata.step, metadata.plans
        pages = self._cached_views(kv_cache)
        decodes, end = step.num_decode_tokens, step.num_tokens
        scaled = self._scaled_query(query)
        key = self._key_for(step)
        if step.decodes is not None:
            wrapper = plans.decode(key, step, query.dtype)
            self._run(wrapper, (scaled[:decodes], pages), output[:decodes], None if lse is None else lse[:decodes])
        if step.others is not None:
            wrapper = plans.prefill(key, step, query.dtype)
            rest = slice(decodes, end)
            self._run(wrapper, (scaled[rest], pages), output[rest], None if lse is None else lse[rest])

    def _over_fresh(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FlashInferMetadata,
        output: torch.Tensor,
    ) -> None:
        """The step's own keys, without a cache (R5.46)."""
        step, is_cross = metadata.step, self.params.kind is AttentionKind.ENCODER_DECODER
        wrapper = metadata.plans.fresh(self._key_for(step), step, query.dtype, is_cross=is_cross)
        # Wrappers want exactly the tokens they were planned for.
        count = int(step.fresh_key_starts[-1]) if is_cross else step.num_tokens
        tokens = query[: step.num_tokens], key[:count], value[:count]
        self._run(wrapper, tokens, output[: step.num_tokens], None, scales=False)

    def _run(
        self,
        wrapper: Any,
        arguments: tuple[Any, ...],
        output: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        scales: bool = True,
    ) -> None:
        sinks = self.params.sinks
        if lse is None and sinks is None:
            wrapper.run(*arguments, out=output)
        else:
            _, binary = wrapper.run(*arguments, out=output, return_lse=True)
            natural = torch.where(binary < LEAST_BINARY, -torch.inf, binary * LN2)
            if sinks is not None:
                total = torch.logaddexp(natural, sinks.float())
                output.mul_(torch.exp(natural - total).unsqueeze(-1))
                natural = total
            if lse is not None:
                lse.copy_(natural)
        if scales and self.params.value_scale is not None:
            output.mul_(self._per_head(self.params.value_scale))

    def _key_for(self, step: Step) -> PlanKey:
        if step.causal or not self._key.causal:
            return self._key
        if self._key.window_left >= 0:
            raise TypeError(
                f"layer {self.params.layer_name!r} has a window and a step that is not causal; FlashInfer's windows "
                "look back only. Choose another backend with --attention-backend"
            )
        key = self._key
        return PlanKey(key.num_heads, key.num_kv_heads, key.head_size, key.scale, False, -1, key.soft_cap)

    def _scaled_query(self, query: torch.Tensor) -> torch.Tensor:
        scale = self.params.key_scale
        return query if scale is None else (query * self._per_head(scale)).to(query.dtype)

    def _per_head(self, scale: torch.Tensor) -> torch.Tensor:
        """[1, 1] or [H, 1] of a scale [1] or [K]."""
        if scale.numel() > 1:
            scale = scale.repeat_interleave(self.params.num_heads // self.params.num_kv_heads)
        return scale.view(-1, 1)

    def _cached_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [blocks, K, block size, D] of the cache; the same objects while the cache is the same."""
        if self._views is None or self._views[0] is not kv_cache:
            size = self.params.head_size
            if kv_cache.shape[-1] != 2 * size:
                raise ValueError(
                    f"KV cache of shape {tuple(kv_cache.shape)} does not hold keys and values side by side; expected "
                    f"[blocks, KV heads, block size, {2 * size}]"
                )
            self._views = kv_cache, (kv_cache[..., :size], kv_cache[..., size:])
        return self._views[1]
