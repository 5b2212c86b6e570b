"""The one object a model factory builds its layers with (``ModelContext.layers``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, AttentionLayerParams
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MLASpec,
    SlidingWindowSpec,
)
from hardpoint.interfaces.kv_dtypes import kv_storage
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.layers.activation import Activation, ClampedSwiGLU, GeluTanhAndMul, SiluAndMul
from hardpoint_torch_runtime.layers.attention import AttentionLayer, AttentionSinks
from hardpoint_torch_runtime.layers.context_ranks import ContextRanks
from hardpoint_torch_runtime.layers.context_shards import ContextShards
from hardpoint_torch_runtime.layers.delta_mixer import DeltaMixer, DeltaSizes
from hardpoint_torch_runtime.layers.embedding import EmbeddingTable, LMHead, VocabEmbedding
from hardpoint_torch_runtime.layers.linear import (
    ColumnParallelLinear,
    LinearFactory,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from hardpoint_torch_runtime.layers.linear_method import TableQuantization, UnquantizedLinearMethod
from hardpoint_torch_runtime.layers.mla import LatentAttention, LatentSizes
from hardpoint_torch_runtime.layers.moe import MixtureOfExperts, MixtureSizes
from hardpoint_torch_runtime.layers.norm import LayerNorm, RMSNorm, ShardedRMSNorm
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import OutputPart
from hardpoint_torch_runtime.layers.recurrent import RecurrentLayer
from hardpoint_torch_runtime.layers.rope_parameters import RopeParameters
from hardpoint_torch_runtime.layers.rotary import RotaryEmbedding
from hardpoint_torch_runtime.layers.routing import RoutingParameters
from hardpoint_torch_runtime.layers.selective_mixer import SelectiveMixer, SelectiveSizes
from hardpoint_torch_runtime.layers.ssm_mixer import MambaMixer, MambaSizes
from hardpoint_torch_runtime.ops.seams import Kernels

__all__ = ["LayerToolkit"]

CachingLayer = TypeVar("CachingLayer", bound=AttentionLayer | RecurrentLayer)


@dataclass(frozen=True, slots=True)
class LayerToolkit:
    """Creates layers for one worker: right dtype, device, rank share, linear methods and attention backend.

    Sizes passed in are those of the whole model; layers take this rank's share. ``name`` is the layer's dotted path in
    the model; it selects the quantization method and keys the forward context.
    """

    config: WorkerConfig
    device: torch.device
    dtype: torch.dtype
    attention_backend: AttentionBackend | None
    """None: layers are bound to one by :meth:`bind_attention`, once all of them are known."""

    quantization: QuantizationMethod | None
    parallel: TensorParallel
    kernels: Kernels = field(default_factory=Kernels)
    """The kernels at the seams, which every layer takes its own from when it is created."""

    state_mode: MambaCacheMode = MambaCacheMode.NONE
    """Which states of a sequence recurrent layers keep."""

    context_shards: ContextShards | None = None
    """How contexts are dealt out among the ranks, whose layers keep the same of them; None: they are whole."""

    attention_layers: dict[str, AttentionLayer | RecurrentLayer] = field(default_factory=dict)
    """Every attention layer created, and every recurrent one that is in the place of one, by name, in model order."""

    _rotary: dict[tuple[int, RopeParameters, bool], RotaryEmbedding] = field(default_factory=dict)

    @classmethod
    def create(
        cls,
        config: WorkerConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention_backend: AttentionBackend | None = None,
        quantization: QuantizationMethod | None = None,
        communicator: Communicator | None = None,
        kernels: Kernels | None = None,
        state_mode: MambaCacheMode = MambaCacheMode.NONE,
        context_shards: ContextShards | None = None,
    ) -> LayerToolkit:
        """Raises ``ConfigError`` when ``config.parallel`` asks for tensor parallelism without a ``communicator``."""
        parallel = TensorParallel.from_slice(config.parallel, communicator)
        kernels = kernels or Kernels()
        return cls(
            config, device, dtype, attention_backend, quantization, parallel, kernels, state_mode, context_shards
        )

    # Linear layers.

    def linear_method(self, name: str, shape: LinearShape) -> LinearMethod:
        """The quantization's method for this layer, or the plain one."""
        chosen = self.quantization.linear_method(name, shape) if self.quantization is not None else None
        return chosen if chosen is not None else UnquantizedLinearMethod(self.dtype, self.device, self.kernels.linear)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def linear_factory(self) -> LinearFactory:
        return LinearFactory(self.linear_method, self.parallel, self.dtype, self.device)

    def column_linear(
        self, name: str, input_size: int, output_size: int, *, bias: bool = False, gather_output: bool = False
    ) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            name, self.linear_factory, input_size, output_size, bias=bias, gather_output=gather_output
        )

    def row_linear(
        self, name: str, input_size: int, output_size: int, *, bias: bool = False, reduce: bool = True
    ) -> RowParallelLinear:
        return RowParallelLinear(name, self.linear_factory, input_size, output_size, bias=bias, reduce=reduce)

    def merged_column_linear(
        self, name: str, input_size: int, parts: Mapping[str, int], *, bias: bool = False
    ) -> MergedColumnParallelLinear:
        """``parts`` maps shard names (``gate``, ``up``) to sizes, in output order."""
        return MergedColumnParallelLinear(name, self.linear_factory, input_size, parts, bias=bias)

    def qkv_linear(
        self, name: str, input_size: int, *, num_heads: int, num_kv_heads: int, head_size: int, bias: bool = False
    ) -> QKVParallelLinear:
        return QKVParallelLinear(
            name,
            self.linear_factory,
            input_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            bias=bias,
        )

    def mixture_of_experts(
        self, name: str, sizes: MixtureSizes, routing: RoutingParameters, activation: torch.nn.Module | None = None
    ) -> MixtureOfExperts:
        """Gated feed-forward blocks chosen token by token; every linear of every expert has a method of its own.

        ``activation`` [T, 2 M] to [T, M] is the experts', by default :meth:`silu_and_mul`.
        """
        activation = self.silu_and_mul() if activation is None else activation
        return MixtureOfExperts(name, self.linear_factory, sizes, routing, activation)

    # Vocabulary.

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> VocabEmbedding:
        method, quantization = None, cast("object", self.quantization)
        if isinstance(quantization, TableQuantization):
            rows = -(-vocab_size // self.parallel.size)
            method = quantization.table_method(name, LinearShape(hidden_size, (rows,), self.dtype_name))
        return VocabEmbedding(
            name, vocab_size, hidden_size, self.parallel, self.dtype, self.device, self.kernels, method
        )

    def embedding_table(self, name: str, num_rows: int, hidden_size: int) -> EmbeddingTable:
        """A small table (positions, token types) that every rank holds whole."""
        return EmbeddingTable(name, num_rows, hidden_size, self.dtype, self.device)

    def lm_head(
        self, name: str, vocab_size: int, hidden_size: int, *, tied_to: VocabEmbedding | None = None, bias: bool = False
    ) -> LMHead:
        return LMHead(name, self.linear_factory, vocab_size, hidden_size, tied_to, bias=bias, kernels=self.kernels)

    # Everything else.

    def rms_norm(self, size: int, eps: float, *, weight_offset: float = 0.0, has_weight: bool = True) -> RMSNorm:
        """``weight_offset``: what checkpoints leave off the weight (1 where they hold the deviation from one)."""
        return RMSNorm(
            size, eps, self.dtype, self.device, self.kernels, weight_offset=weight_offset, has_weight=has_weight
        )

    def sharded_rms_norm(self, part: OutputPart, eps: float) -> ShardedRMSNorm:
        """Over all values of a projection of which this rank computes ``part``."""
        return ShardedRMSNorm(part, eps, self.dtype, self.device, self.parallel, self.kernels)

    def layer_norm(self, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        return LayerNorm(size, eps, self.dtype, self.device, bias=bias)

    def activation(self, name: str) -> Activation:
        """By its name in configurations. Raises ``UnsupportedModelError`` for one not in the library."""
        return Activation(name)

    def silu_and_mul(self) -> SiluAndMul:
        return SiluAndMul(self.kernels.silu_and_mul)

    def gelu_tanh_and_mul(self) -> GeluTanhAndMul:
        return GeluTanhAndMul()

    def clamped_swiglu(self, slope: float, limit: float) -> ClampedSwiGLU:
        return ClampedSwiGLU(slope, limit)

    def rotary(self, head_size: int, rope: RopeParameters, *, pairs_are_neighbors: bool = False) -> RotaryEmbedding:
        """A table long enough for ``max_model_len``; equal requests share one."""
        key = (head_size, rope, pairs_are_neighbors)
        if key not in self._rotary:
            self._rotary[key] = RotaryEmbedding(
                head_size,
                self.config.max_model_len,
                rope,
                self.device,
                self.kernels.rotary_embedding,
                pairs_are_neighbors=pairs_are_neighbors,
            )
        return self._rotary[key]

    def attention(
        self,
        name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        sliding_window: int | None = None,
        chunk_size: int | None = None,
        keeps_prompt: bool = False,
        logits_soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sinks: torch.Tensor | None = None,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
        kind: AttentionKind = AttentionKind.DECODER,
        relative_bias: torch.Tensor | None = None,
        max_encoder_tokens: int | None = None,
        selects_keys: bool = False,
        uses_mm_prefix: bool = False,
    ) -> AttentionLayer:
        """``num_heads`` and ``num_kv_heads`` are this rank's (as ``QKVParallelLinear`` reports them), everything else
        is as in ``AttentionLayerParams``.

        Layers of kind ``ENCODER_ONLY`` see both sides of a token and keep nothing. Those of kind ``ENCODER_DECODER``
        attend to an encoder's output and keep the keys and values of ``max_encoder_tokens`` of it at most. With
        ``selects_keys`` each forward is given which keys its queries see. With ``uses_mm_prefix`` tokens of one media
        item see each other in both directions.
        """
        params = AttentionLayerParams(
            layer_name=name,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            kind=kind,
            sliding_window=sliding_window,
            chunk_size=chunk_size,
            keeps_prompt=keeps_prompt,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            relative_bias=relative_bias,
        )
        spec = self._kv_spec(params, max_encoder_tokens)
        ranks = self._ranks_of(spec)
        layer = AttentionLayer(
            params, self.attention_backend, spec, ranks=ranks, selects_keys=selects_keys, uses_mm_prefix=uses_mm_prefix
        )
        return self._add(layer)

    def attention_sinks(self, name: str, num_heads: int) -> AttentionSinks:
        """What :meth:`attention` takes as ``sinks``, as a module that loads this rank's share of ``num_heads``."""
        return AttentionSinks(name, num_heads, self.parallel, self.device)

    def latent_attention(
        self,
        name: str,
        sizes: LatentSizes,
        *,
        rotary: RotaryEmbedding,
        scale: float,
        norm_eps: float,
        bias: bool = False,
    ) -> LatentAttention:
        """Attention with its projections, over one latent per token that the heads of all ranks share.

        ``rotary`` turns the rotated part of a head. ``bias`` is that of the projections from and to the hidden size,
        queries without compression apart.
        """
        params = AttentionLayerParams(
            layer_name=f"{name}.attn",
            num_heads=self.parallel.divide(sizes.num_heads, f"{name}: number of heads"),
            num_kv_heads=1,
            head_size=sizes.latent_size,
            scale=scale,
        )
        spec = MLASpec(**self._stored_fields(params), context_shards=self._num_shards)
        layer = AttentionLayer(
            params, self.attention_backend, spec, value_size=sizes.latent_rank, ranks=self._ranks_of(spec)
        )
        return LatentAttention(
            name,
            self.linear_factory,
            sizes,
            norm=lambda size: self.rms_norm(size, norm_eps),
            rotary=rotary,
            attend=self._add(layer),
            bias=bias,
        )

    def mamba_mixer(self, name: str, sizes: MambaSizes) -> MambaMixer:
        """A Mamba-2 mixer with its projections, whose states are kept in the KV cache."""
        return self._add(MambaMixer(name, sizes, self.linear_factory, self.config.block_size, self.state_mode))

    def selective_mixer(self, name: str, sizes: SelectiveSizes) -> SelectiveMixer:
        """A Mamba-1 mixer with its projections, whose states are kept in the KV cache."""
        factory, block_size = self.linear_factory, self.config.block_size
        return self._add(SelectiveMixer(name, sizes, factory, self.rms_norm, block_size, self.state_mode))

    def delta_mixer(self, name: str, sizes: DeltaSizes) -> DeltaMixer:
        """A gated delta network with its projections, whose states are kept in the KV cache."""
        return self._add(DeltaMixer(name, sizes, self.linear_factory, self.config.block_size, self.state_mode))

    def _add(self, layer: CachingLayer) -> CachingLayer:
        if layer.name in self.attention_layers:
            raise ValueError(f"attention layer {layer.name!r} exists already; layer names must be unique in a model")
        self.attention_layers[layer.name] = layer
        return layer

    def bind_attention(self, backend: AttentionBackend) -> None:
        """Let every attention layer created so far compute with ``backend``."""
        for layer in self.attention_layers.values():
            if isinstance(layer, AttentionLayer):
                layer.bind(backend)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What the layers created so far keep in the KV cache, by layer name in model order."""
        return {name: layer.spec for name, layer in self.attention_layers.items() if layer.spec is not None}

    def _kv_spec(self, params: AttentionLayerParams, max_encoder_tokens: int | None) -> KVCacheSpec | None:
        if params.kind is AttentionKind.ENCODER:
            return None
        fields = self._stored_fields(params)
        if params.kind is AttentionKind.ENCODER_DECODER:
            if max_encoder_tokens is None:
                raise ValueError(f"layer {params.layer_name!r} attends to an encoder's output; say max_encoder_tokens")
            return CrossAttentionSpec(**fields, max_encoder_tokens=max_encoder_tokens)
        if params.kind is AttentionKind.ENCODER_ONLY:
            return EncoderOnlyAttentionSpec(**fields)
        if params.chunk_size is not None:
            return ChunkedLocalAttentionSpec(**fields, chunk_size=params.chunk_size)
        if params.sliding_window is None or params.keeps_prompt:  # which is needed to the end
            return FullAttentionSpec(**fields, context_shards=1 if params.keeps_prompt else self._num_shards)
        return SlidingWindowSpec(**fields, sliding_window=params.sliding_window)

    @property
    def _num_shards(self) -> int:
        return 1 if self.context_shards is None else self.context_shards.num_ranks

    def _ranks_of(self, spec: KVCacheSpec | None) -> ContextRanks | None:
        """Those that a layer of this ``spec`` merges its answers with. Without a communicator nothing is computed."""
        communicator = self.parallel.communicator
        if communicator is None or not isinstance(spec, FullAttentionSpec) or spec.context_shards == 1:
            return None
        return ContextRanks(communicator, spec.context_shards, self.parallel.rank)

    def _stored_fields(self, params: AttentionLayerParams) -> dict[str, Any]:
        """What attention specs of all kinds have in common."""
        stored = self.config.kv_cache_dtype
        storage = kv_storage(self.dtype_name if stored == "auto" else stored)
        return {
            "block_size": self.config.block_size,
            "num_kv_heads": params.num_kv_heads,
            "head_size": params.head_size,
            "dtype": storage.dtype,
            "quantization": storage.quantization,
            "scale_bytes": storage.scale_bytes,
        }
