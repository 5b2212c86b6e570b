"""The attention layer: binds a model's layer to the selected backend, and holds no backend's branch.

Legend: T tokens (padding included), H query heads, K KV heads, D head size, V size of a head's values; all of this
rank.
"""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionImpl, AttentionLayerParams, KVWriteMode
from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.kv_cache_specs import EncoderOnlyAttentionSpec
from hardpoint_torch_runtime.forward_context import ForwardContext, get_forward_context
from hardpoint_torch_runtime.layers.uncompiled import UncompiledLayer

__all__ = ["AttentionLayer"]


class AttentionLayer(UncompiledLayer):
    """Query [T, H * D], key [T, K * D] and value [T, K * V] to [T, H * V]. ``value_size``: V, by default D.

    In cross-attention keys and values are of the encoder tokens that come with the step, which may be none.

    Without a ``backend`` one has to be bound before the first forward: which one serves is decided once all layers of a
    model are known.

    Attributes:
        spec: what the layer keeps in the KV cache; None for layers that no cache group serves (encoders of a model
            with a decoder).
    """

    def __init__(
        self,
        params: AttentionLayerParams,
        backend: AttentionBackend | None,
        spec: KVCacheSpec | None,
        *,
        value_size: int | None = None,
    ) -> None:
        super().__init__()
        self.params = params
        self.value_size = params.head_size if value_size is None else value_size
        self.name = params.layer_name
        self.spec = spec
        self._keeps_kv = spec is not None and not isinstance(spec, EncoderOnlyAttentionSpec)
        self._writes_kv = False
        self._backend: AttentionBackend | None = None
        self._impl: AttentionImpl | None = None
        if backend is not None:
            self.bind(backend)

    def bind(self, backend: AttentionBackend) -> None:
        """Compute with ``backend`` from now on."""
        self._backend, self._impl = backend, backend.create_impl(self.params)
        self._writes_kv = self._keeps_kv and backend.kv_write_mode is KVWriteMode.SEPARATE

    @property
    def impl(self) -> AttentionImpl:
        """The backend's computation for this layer. Raises ``RuntimeError`` before one is bound."""
        if self._impl is None:
            raise RuntimeError(f"attention layer {self.name!r} has no backend yet; bind one first")
        return self._impl

    @property
    def backend(self) -> AttentionBackend:
        """Raises ``RuntimeError`` before one is bound."""
        if self._backend is None:
            raise RuntimeError(f"attention layer {self.name!r} has no backend yet; bind one first")
        return self._backend

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, size = self.params.num_heads, self.params.num_kv_heads, self.params.head_size
        query = query.view(-1, heads, size)
        # Written out, since there may be none: an encoder's tokens come with one step only.
        key = key.view(key.shape[0], kv_heads, size)
        value = value.view(value.shape[0], kv_heads, self.value_size)
        output = torch.empty((query.shape[0], heads, self.value_size), dtype=query.dtype, device=query.device)
        context, impl = get_forward_context(), self.impl
        if context.attention_metadata is None:
            impl.forward(query, key, value, None, None, output)
            return output.flatten(1)
        cache = self._cache(context) if self._keeps_kv else None
        if self._writes_kv and cache is not None and key.shape[0]:
            impl.write_kv(key, value, cache, _entry(context.slot_mapping, self.name, "slot_mapping"))
        metadata = _entry(context.attention_metadata, self.name, "attention_metadata")
        impl.forward(query, key, value, cache, metadata, output)
        return output.flatten(1)

    def _cache(self, context: ForwardContext) -> torch.Tensor:
        return _entry(context.kv_caches, self.name, "kv_caches")

    def extra_repr(self) -> str:
        params, backend = self.params, "no backend" if self._backend is None else self._backend.name
        return f"{self.name}, heads={params.num_heads}/{params.num_kv_heads}x{params.head_size}, {backend}"


def _entry(entries: dict[str, Any], name: str, field: str) -> Any:
    try:
        return entries[name]
    except KeyError:
        raise RuntimeError(
            f"the forward context's {field} has no entry for layer {name!r}; it has {sorted(entries)[:4]} and "
            f"{max(len(entries) - 4, 0)} more"
        ) from None
