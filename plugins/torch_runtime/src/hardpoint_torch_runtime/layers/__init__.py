"""The layer library models are built from. Models receive a :class:`LayerToolkit`, not these classes."""

from hardpoint_torch_runtime.layers.activation import ACTIVATIONS, Activation, ClampedSwiGLU, GeluTanhAndMul, SiluAndMul
from hardpoint_torch_runtime.layers.attention import AttentionLayer, AttentionSinks
from hardpoint_torch_runtime.layers.causal_conv import CausalConv
from hardpoint_torch_runtime.layers.context_ranks import ContextRanks, SharedContextImpl, attend_over_ranks
from hardpoint_torch_runtime.layers.context_shards import ContextPlace, ContextShards, LocalLengths
from hardpoint_torch_runtime.layers.delta_mixer import DeltaMixer, DeltaSizes
from hardpoint_torch_runtime.layers.dense_attention import ScoreBias, dense_attention
from hardpoint_torch_runtime.layers.embedding import EmbeddingTable, LMHead, VocabEmbedding
from hardpoint_torch_runtime.layers.linear import (
    ColumnParallelLinear,
    LinearFactory,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from hardpoint_torch_runtime.layers.linear_method import (
    LoadingObserver,
    PackedLinearMethod,
    PlacingLinearMethod,
    StreamingLinearMethod,
    TableLinearMethod,
    TableQuantization,
    UnquantizedLinearMethod,
)
from hardpoint_torch_runtime.layers.mla import LatentAttention, LatentSizes, LatentUpProjection
from hardpoint_torch_runtime.layers.moe import ExpertMLP, MixtureOfExperts, MixtureSizes, RoutedExperts
from hardpoint_torch_runtime.layers.norm import LayerNorm, RMSNorm, ShardedRMSNorm
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.partial_attention import Partial, merge_partials, rank_share, total_lse
from hardpoint_torch_runtime.layers.placement import (
    GROUPED,
    TRANSPOSED,
    GroupedPlacement,
    OutputPart,
    Placement,
    ShardedModule,
    TransposedPlacement,
)
from hardpoint_torch_runtime.layers.recurrent import RecurrentLayer
from hardpoint_torch_runtime.layers.relative_bias import RelativeBias
from hardpoint_torch_runtime.layers.rope_parameters import RopeParameters
from hardpoint_torch_runtime.layers.rotary import RotaryEmbedding
from hardpoint_torch_runtime.layers.routing import ExpertRouter, RoutingParameters
from hardpoint_torch_runtime.layers.segments import SegmentedColumnLinear
from hardpoint_torch_runtime.layers.selected_keys import SelectedKeysImpl
from hardpoint_torch_runtime.layers.selective_mixer import SelectiveMixer, SelectiveSizes
from hardpoint_torch_runtime.layers.ssm_mixer import GatedRMSNorm, MambaMixer, MambaSizes
from hardpoint_torch_runtime.layers.state_plan import StateMetadata, StateMetadataBuilder
from hardpoint_torch_runtime.layers.stored_weights import (
    NIBBLE_RUN,
    ChannelInt8Weight,
    DenseWeight,
    GGUFPart,
    GGUFWeight,
    GroupedInt4Weight,
    StoredLinearMethod,
    StoredWeight,
)
from hardpoint_torch_runtime.layers.toolkit import LayerToolkit
from hardpoint_torch_runtime.layers.uncompiled import UncompiledLayer

__all__ = [
    "ACTIVATIONS",
    "GROUPED",
    "NIBBLE_RUN",
    "TRANSPOSED",
    "Activation",
    "AttentionLayer",
    "AttentionSinks",
    "CausalConv",
    "ChannelInt8Weight",
    "ClampedSwiGLU",
    "ColumnParallelLinear",
    "ContextPlace",
    "ContextRanks",
    "ContextShards",
    "DeltaMixer",
    "DeltaSizes",
    "DenseWeight",
    "EmbeddingTable",
    "ExpertMLP",
    "ExpertRouter",
    "GGUFPart",
    "GGUFWeight",
    "GatedRMSNorm",
    "GeluTanhAndMul",
    "GroupedInt4Weight",
    "GroupedPlacement",
    "LMHead",
    "LatentAttention",
    "LatentSizes",
    "LatentUpProjection",
    "LayerNorm",
    "LayerToolkit",
    "LinearFactory",
    "LoadingObserver",
    "LocalLengths",
    "MambaMixer",
    "MambaSizes",
    "MergedColumnParallelLinear",
    "MixtureOfExperts",
    "MixtureSizes",
    "OutputPart",
    "PackedLinearMethod",
    "ParallelLinear",
    "Partial",
    "Placement",
    "PlacingLinearMethod",
    "QKVParallelLinear",
    "RMSNorm",
    "RecurrentLayer",
    "RelativeBias",
    "ReplicatedLinear",
    "RopeParameters",
    "RotaryEmbedding",
    "RoutedExperts",
    "RoutingParameters",
    "RowParallelLinear",
    "ScoreBias",
    "SegmentedColumnLinear",
    "SelectedKeysImpl",
    "SelectiveMixer",
    "SelectiveSizes",
    "ShardedModule",
    "ShardedRMSNorm",
    "SharedContextImpl",
    "SiluAndMul",
    "StateMetadata",
    "StateMetadataBuilder",
    "StoredLinearMethod",
    "StoredWeight",
    "StreamingLinearMethod",
    "TableLinearMethod",
    "TableQuantization",
    "TensorParallel",
    "TransposedPlacement",
    "UncompiledLayer",
    "UnquantizedLinearMethod",
    "VocabEmbedding",
    "attend_over_ranks",
    "dense_attention",
    "merge_partials",
    "rank_share",
    "total_lse",
]
