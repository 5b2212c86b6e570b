"""Plugin kind ``attention_backend``: capability answers, per-step metadata, and the kernels behind one layer call.

Legend: R rows (requests), T tokens of the step, H query heads, K KV heads, D head size, B blocks per row.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.block_size import BlockSizeRule as BlockSizeRule
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.platform import DeviceDescription

if TYPE_CHECKING:
    import numpy as np
    import torch


class AttentionKind(enum.StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class GraphSupport(enum.IntEnum):
    """How far metadata building tolerates graph capture; larger includes smaller."""

    NEVER = 0
    DECODE_ONLY = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class KVWriteMode(enum.StrEnum):
    """``SEPARATE``: the layer calls ``write_kv`` before ``forward``; ``FUSED``: ``forward`` writes."""

    SEPARATE = "separate"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What a model's layers ask of a backend on a given device. Each default asks for nothing.

    Attributes:
        dtype: of activations, by name. ``kv_cache_dtype``: what ``kv_storage`` reads, such as ``fp8``.
        chunk_size: chunked local attention; a query sees only keys of its own chunk of that many positions.
        keeps_prompt: beside its ``sliding_window`` a query sees all keys of its row's prompt (R-SWA).
        uses_mm_prefix: steps may have ``mm_ranges``.
        uses_row_causality: ``causal`` may be a tensor, which differs by row.
        uses_mla: latent layers. Keys are latents of ``head_size`` that all heads share (one KV head), and values are no
            more than the first entries of these. See ``AttentionImpl``.
        uses_sparse: a query sees only those keys that an index of the model selects.
        per_head_scales: scales of a quantized cache may have one entry per KV head.
        needs_lse: ``forward_with_lse`` will be called. dcp_size: ranks that a row's context is dealt out among.
        uses_relative_bias: layers have a ``relative_bias``.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str
    device: DeviceDescription
    block_size: int | None = None
    kind: AttentionKind = AttentionKind.DECODER
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    uses_alibi: bool = False
    uses_sinks: bool = False
    uses_mla: bool = False
    batch_invariant: bool = False
    chunk_size: int | None = None
    keeps_prompt: bool = False
    uses_mm_prefix: bool = False
    uses_row_causality: bool = False
    uses_sparse: bool = False
    per_head_scales: bool = False
    needs_lse: bool = False
    dcp_size: int = 1
    uses_relative_bias: bool = False


@dataclass(frozen=True, slots=True)
class AttentionLayerParams:
    """One layer's fixed properties. They win over those of the layer's KV cache group, whose layers may differ.

    Tensors are read at every call, so they may be loaded later.

    Attributes:
        scale: multiplies query-key products, before ``logits_soft_cap`` c makes them ``c * tanh(x / c)``.
        sliding_window, chunk_size, keeps_prompt: what is visible, see ``CommonAttentionMetadata``.
        alibi_slopes: [H]; ``slope * (k - q)`` is added to the (capped) score of query position q and key position k.
        relative_bias: float32 [H, N]; what it holds for the distance ``q - k``, or for the nearest one from 0 to N - 1,
            is added to the (capped) score of query position q and key position k.
        sinks: float32 [H], an extra logit per head that takes part in the softmax and has no value.
        key_scale, value_scale: float32 [1] or [K] of a cache quantized per tensor or per head, where real values are
            ``stored * scale``. None: 1. See ``AttentionImpl``.
    """

    layer_name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    kind: AttentionKind = AttentionKind.DECODER
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Sequence[float] | None = None
    sinks: torch.Tensor | None = None
    chunk_size: int | None = None
    keeps_prompt: bool = False
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    relative_bias: torch.Tensor | None = None


@dataclass(slots=True)
class CommonAttentionMetadata:
    """Per-step facts shared by all backends. Device tensors with host-side copies or upper bounds beside them, so that
    building never waits for the device.

    The queries of a row are the last of its ``seq_lens`` tokens. Query position q sees key position k of its row where

    - ``(not causal or k <= q) and (window is None or distance < window) and (chunk_size is None or q // chunk_size ==
      k // chunk_size)``, with the distance ``q - k`` in causal rows and ``abs(q - k)`` in others,
    - with ``keeps_prompt`` instead where ``k <= q and (k < prompt_len or q - k < window)``,
    - and in any case where q and k are in the same one of ``mm_ranges``.

    In cross-attention (``AttentionKind.ENCODER_DECODER``) the two count apart: ``seq_lens`` are a row's encoder tokens,
    every query sees all of them, and ``slot_mapping`` has those that come with this step, of which there may be none.

    Attributes:
        query_start_loc: int32 [R + 1], prefix sums of query lengths; ``query_start_loc_cpu`` the same on the host.
        seq_lens: int32 [R], cached plus new tokens per row; ``seq_lens_cpu`` the same on the host.
        block_table: int32 [R, B]; rows beyond real requests hold the null block.
        slot_mapping: int64 [T]; -1 where nothing may be written.
        num_rows, num_tokens: real counts, padding excluded.
        seq_lens_is_exact: False when the host copies are upper bounds only (drafts whose fate the host does not know).
        for_graph: the metadata will be captured or replayed.
        causal: whether queries see keys up to their own only; bool [R] where rows differ, with ``row_causal_cpu`` the
            same on the host.
        num_common_prefix_blocks: leading blocks that all rows share.
        mm_ranges: per row, half-open ranges of absolute positions that see each other in both directions; such a
            range may begin before this step's queries and end behind them.
        prompt_lens: int32 [R] for layers with ``keeps_prompt``; ``prompt_lens_cpu`` the same on the host.
        dcp_local_seq_lens: int32 [R], where contexts are dealt out among ranks (DCP): how many of a row's tokens of
            before this step are in this rank's cache; ``dcp_local_seq_lens_cpu`` the same on the host.
    """

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_cpu: np.ndarray
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    seq_lens_is_exact: bool = True
    for_graph: bool = False
    causal: bool | torch.Tensor = True
    num_common_prefix_blocks: int = 0
    row_causal_cpu: np.ndarray | None = None
    mm_ranges: Sequence[Sequence[tuple[int, int]]] | None = None
    prompt_lens: torch.Tensor | None = None
    prompt_lens_cpu: np.ndarray | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: np.ndarray | None = None


class AttentionMetadataBuilder(ABC):
    """One per KV cache group; owns persistent buffers, allocated at construction only."""

    graph_support: GraphSupport = GraphSupport.NEVER
    reorder_threshold: int | None = None
    """Rows with at most this many query tokens are moved to the front of the batch; None: any order."""

    @abstractmethod
    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> Any:
        """Metadata for this backend's ``forward``. No host-device synchronization. ``fast``: skip costly planning."""


class AttentionImpl(ABC):
    """The computation behind one attention layer.

    ``kv_cache`` is [blocks, K, block size, 2 D], the keys' D before the values'; its blocks may be further apart than
    they are long. Where it is quantized, queries see what is stored, of this step's tokens as well, and by
    ``KVQuantization`` of its spec:

    - ``PER_TENSOR``: its elements are float8, ``real / scale`` with the scales of ``AttentionLayerParams``, and what
      would be out of range becomes the largest that is not.
    - ``PER_TOKEN_HEAD``: it is int8 [blocks, K, block size, 2 D + 8]. The last 8 bytes of each head and token are two
      float32, the scale of its key and that of its value, which writing chooses so that ``stored * scale`` is as near
      the real values as int8 allows.

    Of a latent layer (``AttentionNeed.uses_mla``) the cache holds keys only, [blocks, 1, block size, D]. ``value``
    [T, 1, V] is the first V entries of ``key`` [T, 1, D], cached values are those of cached keys, and ``output`` is
    [T, H, V].
    """

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Write attention of ``query`` [T, H, D] into ``output`` [T, H, D] and return it.

        ``metadata`` None (memory profiling): fill with zeros, touch no cache (R5.40). ``kv_cache`` None: use the step's
        own ``key`` and ``value`` [T, K, D] (encoders; in cross-attention those of all rows, one after another).
        Rows beyond ``num_tokens`` are undefined. A query that sees no key gets zeros.
        """

    @abstractmethod
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Scatter ``key`` and ``value`` by slot; the mapping's length counts, negative slots are skipped (R5.71-72)."""

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``forward`` with everything in the cache, also returning the log-sum-exp float32 [T, H] of all scores,
        sinks included (natural; ``-inf`` where a query sees no key and has no sink).

        Raises ``TypeError`` unless ``returns_lse`` is declared.
        """
        raise TypeError(f"{type(self).__name__} declares no log-sum-exp; choose a backend that does")


class AttentionBackend(ABC):
    """What an ``attention_backend`` factory returns; stateless, cheap, shared by all layers.

    ``known_needs`` are the optional fields of ``AttentionNeed`` that ``refuse`` judges. What is asked for by others,
    those of later versions among them, is refused without it: a backend says that it knows one by listing it.
    """

    name: str
    kv_write_mode: KVWriteMode = KVWriteMode.SEPARATE
    returns_lse: bool = False
    known_needs: frozenset[str] = frozenset(
        {"kind", "sliding_window", "logits_soft_cap", "uses_alibi", "uses_sinks", "uses_mla", "batch_invariant"}
    )

    def objection(self, need: AttentionNeed) -> str | None:
        """Reason why this backend is no choice for ``need``, or None; what is to be asked of backends."""
        asked = {field.name for field in fields(need) if field.default not in (MISSING, getattr(need, field.name))}
        unknown = ", ".join(sorted(asked - self.known_needs - {"block_size"}))
        return f"it does not know the need for {unknown}" if unknown else self.refuse(need)

    @abstractmethod
    def refuse(self, need: AttentionNeed) -> str | None:
        """Reason why this backend cannot serve ``need`` as far as ``known_needs`` go, or None. A pure function of its
        argument; to be overridden, not called: see :meth:`objection`."""

    @abstractmethod
    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule: ...

    @abstractmethod
    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder: ...

    @abstractmethod
    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl: ...
