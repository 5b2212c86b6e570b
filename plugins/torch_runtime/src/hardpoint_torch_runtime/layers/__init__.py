"""The layer library models are built from. Models receive a :class:`LayerToolkit`, not these classes."""

from hardpoint_torch_runtime.layers.activation import GeluTanhAndMul, SiluAndMul
from hardpoint_torch_runtime.layers.attention import AttentionLayer
from hardpoint_torch_runtime.layers.embedding import LMHead, VocabEmbedding
from hardpoint_torch_runtime.layers.linear import (
    ColumnParallelLinear,
    LinearFactory,
    MergedColumnParallelLinear,
    ParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from hardpoint_torch_runtime.layers.linear_method import (
    PackedLinearMethod,
    PlacingLinearMethod,
    UnquantizedLinearMethod,
)
from hardpoint_torch_runtime.layers.moe import ExpertMLP, MixtureOfExperts, MixtureSizes, RoutedExperts
from hardpoint_torch_runtime.layers.norm import RMSNorm
from hardpoint_torch_runtime.layers.parallel import Communicator, TensorParallel
from hardpoint_torch_runtime.layers.placement import Placement, ShardedModule
from hardpoint_torch_runtime.layers.rope_parameters import RopeParameters
from hardpoint_torch_runtime.layers.rotary import RotaryEmbedding
from hardpoint_torch_runtime.layers.routing import ExpertRouter, RoutingParameters
from hardpoint_torch_runtime.layers.toolkit import LayerToolkit

__all__ = [
    "AttentionLayer",
    "ColumnParallelLinear",
    "Communicator",
    "ExpertMLP",
    "ExpertRouter",
    "GeluTanhAndMul",
    "LMHead",
    "LayerToolkit",
    "LinearFactory",
    "MergedColumnParallelLinear",
    "MixtureOfExperts",
    "MixtureSizes",
    "PackedLinearMethod",
    "ParallelLinear",
    "Placement",
    "PlacingLinearMethod",
    "QKVParallelLinear",
    "RMSNorm",
    "RopeParameters",
    "RotaryEmbedding",
    "RoutedExperts",
    "RoutingParameters",
    "RowParallelLinear",
    "ShardedModule",
    "SiluAndMul",
    "TensorParallel",
    "UnquantizedLinearMethod",
    "VocabEmbedding",
]
