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
from hardpoint_torch_runtime.layers.context_ranks import ContextRanks, SharedContextImpl, attend_over_ranks
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.layers.selected_keys import SelectedKeysImpl
from hardpoint_torch_runtime.layers.uncompiled import UncompiledLayer

__all__ = ["AttentionLayer", "AttentionSinks"]


class AttentionSinks(torch.nn.Module):
    """``weight`` float32 [H]: for each head of this rank a logit that takes part in the softmax and has no value."""

    def __init__(self, name: str, num_heads: int, parallel: TensorParallel, device: torch.device) -> None:
        """``num_heads`` are those of all ranks."""
        super().__init__()
        self._total = num_heads
        self._share = parallel.divide(num_heads, f"{name}: number of attention sinks")
        self._start = parallel.rank * self._share
        empty = torch.empty(self._share, dtype=torch.float32, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def place(self, parameter: str, shard: str | None) -> Placement:
        """See ``ShardedModule``."""
        if parameter != "weight" or shard is not None:
            raise KeyError(f"attention sinks have only a whole 'weight', not {parameter!r} / {shard!r}")
        return Placement((self._total,), 0, self._start, 0, self._share)


class AttentionLayer(UncompiledLayer):
    """Query [T, H * D], key [T, K * D] and value [T, K * V] to [T, H * V]. ``value_size``: V, by default D.

    In cross-attention keys and values are of the encoder tokens that come with the step, which may be none.

    Without a ``backend`` one has to be bound before the first forward: which one serves is decided once all layers of a
    model are known.

    ``ranks``: those among which its contexts are dealt out, as its ``spec`` says too. ``selects_keys``: each forward is
    given which keys its queries see (sparse attention).

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
        ranks: ContextRanks | None = None,
        selects_keys: bool = False,
        uses_mm_prefix: bool = False,
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.selects_keys = selects_keys
        self.uses_mm_prefix = uses_mm_prefix
        self.params = params
        self.value_size = params.head_size if value_size is None else value_size
        self.name = params.layer_name
        self.spec = spec
        self._keeps_kv = spec is not None and not isinstance(spec, EncoderOnlyAttentionSpec)
        self._writes_kv = False
        self._backend: AttentionBackend | None = None
        self._impl: AttentionImpl | None = None
        self._sharing: SharedContextImpl | None = None
        self._selecting: SelectedKeysImpl | None = None
        if backend is not None:
            self.bind(backend)

    def bind(self, backend: AttentionBackend) -> None:
        """Compute with ``backend`` from now on. Raises ``TypeError`` for one that lacks a method this layer calls."""
        impl = backend.create_impl(self.params)
        sharing = impl if isinstance(impl, SharedContextImpl) else None
        selecting = impl if isinstance(impl, SelectedKeysImpl) else None
        if self.ranks is not None and sharing is None:
            raise TypeError(self._lacking(backend, impl, "SharedContextImpl", "contexts are dealt out among ranks"))
        if self.selects_keys and selecting is None:
            raise TypeError(self._lacking(backend, impl, "SelectedKeysImpl", "queries see selected keys only"))
        self._backend, self._impl, self._sharing, self._selecting = backend, impl, sharing, selecting
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

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, selected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``selected`` int32 [T, N] as :class:`SelectedKeysImpl` takes it, for layers that select keys and no others:
        anything else raises ``TypeError``."""
        if (selected is not None) != self.selects_keys:
            raise TypeError(
                f"attention layer {self.name!r} was {'not ' if selected is None else ''}given a selection of keys, but "
                f"was created with selects_keys={self.selects_keys}"
            )
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
        if selected is not None and self._selecting is not None:
            self._selecting.forward_selected(query, key, value, cache, metadata, selected, output)
        elif self.ranks is not None and self._sharing is not None and cache is not None:
            attend_over_ranks(self._sharing, self.ranks, (query, key, value), cache, metadata, output)
        else:
            impl.forward(query, key, value, cache, metadata, output)
        return output.flatten(1)

    def _lacking(self, backend: AttentionBackend, impl: AttentionImpl, contract: str, why: str) -> str:
        return (
            f"attention backend {backend.name!r} accepted layer {self.name!r}, whose {why}, but its "
            f"{type(impl).__name__} lacks methods of {contract}; let the backend refuse, or choose another one"
        )

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
