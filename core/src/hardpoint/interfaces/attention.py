"""Plugin kind ``attention_backend``: capability answers, per-step metadata, and the kernels behind one layer call.

Legend: R rows (requests), T tokens of the step, H query heads, K KV heads, D head size, B blocks per row.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
    """What a model's layers ask of a backend on a given device. Dtypes by name.

    ``uses_mla``: latent layers. Keys are latents of ``head_size`` that all heads share (one KV head), and values are
    no more than the first entries of these. See ``AttentionImpl``.
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


@dataclass(frozen=True, slots=True)
class AttentionLayerParams:
    """One layer's fixed properties. ``scale`` multiplies query-key products. ``sinks`` (float32 [H]) is an extra logit
    per head that takes part in the softmax and has no value; it is read at every call, so it may be loaded later."""

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


@dataclass(slots=True)
class CommonAttentionMetadata:
    """Per-step facts shared by all backends. Device tensors with host-side copies or upper bounds beside them, so that
    building never waits for the device.

    Attributes:
        query_start_loc: int32 [R + 1], prefix sums of query lengths; ``query_start_loc_cpu`` the same on the host.
        seq_lens: int32 [R], cached plus new tokens per row; ``seq_lens_cpu`` the same on the host.
        block_table: int32 [R, B]; rows beyond real requests hold the null block.
        slot_mapping: int64 [T]; -1 where nothing may be written.
        num_rows, num_tokens: real counts, padding excluded.
        seq_lens_is_exact: False when the host copies are upper bounds only (drafts whose fate the host does not know).
        for_graph: the metadata will be captured or replayed.
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
    causal: bool = True
    num_common_prefix_blocks: int = 0


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
        own ``key`` and ``value`` [T, K, D] (encoders). Rows beyond ``num_tokens`` are undefined.
        """

    @abstractmethod
    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Scatter ``key`` and ``value`` by slot; the mapping's length counts, negative slots are skipped (R5.71-72)."""

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``forward``, also returning the log-sum-exp float32 [T, H]; only where ``returns_lse`` is declared."""
        raise TypeError(f"{type(self).__name__} declares no log-sum-exp; choose a backend that does")


class AttentionBackend(ABC):
    """What an ``attention_backend`` factory returns; stateless, cheap, shared by all layers."""

    name: str
    kv_write_mode: KVWriteMode = KVWriteMode.SEPARATE
    returns_lse: bool = False

    @abstractmethod
    def refuse(self, need: AttentionNeed) -> str | None:
        """Reason why this backend cannot serve ``need``, or None. A pure function of its argument."""

    @abstractmethod
    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule: ...

    @abstractmethod
    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder: ...

    @abstractmethod
    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl: ...
