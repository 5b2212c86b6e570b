"""Linear layers of every kind a decoder has, loaded through the real loading path, beside their float64 answer.

Legend: T tokens, I input size, O output size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import msgspec
import torch

from hardpoint.interfaces.model import Model, WeightRule
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightTensor
from hardpoint.interfaces.quantization import QuantizationMethod
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_testing_torch.local_driver import worker_config
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_testing_torch.state_dict_loader import TensorLoader, weight_tensor
from hardpoint_torch_runtime import LayerToolkit, load_weights

__all__ = ["LAYERS", "LinearBench", "Store", "bench_info", "make_weights", "relative_norm"]

Store = Callable[[str, torch.Tensor], Sequence[WeightTensor]]
"""``(name of the projection, float32 weight [O, I]) -> what a checkpoint of the method's format holds for it``."""

PREFIX = "model.layers.0"
LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "o_proj": ("o_proj",),
        "down_proj": ("down_proj",),
    }
)
"""Layers with the stored projections that each is fused from, in output order."""

SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": "gate", "up_proj": "up"}


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """Sizes of the layers. ``heads`` are (query, KV)."""

    hidden: int = 64
    heads: tuple[int, int] = (4, 2)
    head_size: int = 16
    wide: int = 96

    def stored(self) -> dict[str, tuple[int, int]]:
        """Shape [O, I] of each stored projection."""
        query, kv = (count * self.head_size for count in self.heads)
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "gate_proj": (self.wide, self.hidden),
            "up_proj": (self.wide, self.hidden),
            "o_proj": (self.hidden, query),
            "down_proj": (self.hidden, self.wide),
        }


SIZES: Mapping[str, BenchSizes] = {
    "even": BenchSizes(),
    "larger": BenchSizes(hidden=128, heads=(8, 2), head_size=32, wide=256),
    "odd": BenchSizes(hidden=60, heads=(3, 1), head_size=20, wide=44),
    "tiny": BenchSizes(hidden=2, heads=(1, 1), head_size=2, wide=3),
}


def bench_info() -> ModelInfo:
    """A description for layers that belong to no model."""
    return ModelInfo(
        artifact=ModelArtifact(name="linear-bench", root="/nowhere", files=(), source="test"),
        architecture="LinearBench",
        config={},
        max_position=64,
        vocab_size=16,
        dtype="float32",
        loader="memory",
    )


def make_weights(sizes: BenchSizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights [O, I] by projection, drawn like those of a trained layer."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in sizes.stored().items()}


def relative_norm(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the deviation over the norm of ``expected``; infinite if anything is not finite."""
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    scale = float(expected.norm())
    error = float((actual.double() - expected).norm())
    return error / scale if scale else error


class _NoPeers:
    """Collectives of a rank that is looked at alone: partial results stay partial."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        del dim
        return tensor

    def close(self) -> None: ...


class LinearBench(torch.nn.Module):
    """All layers of one size under one quantization method. ``biases`` are float32 [O] by projection.

    ``rank`` of ``ranks`` holds its share of each layer; row-parallel outputs are then partial sums.
    """

    def __init__(
        self,
        method: QuantizationMethod | None,
        sizes: BenchSizes,
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: str = "float32",
        biases: Mapping[str, torch.Tensor] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        super().__init__()
        self.weights, self.biases = dict(weights), dict(biases or {})
        share = ParallelSlice(rank=rank, world_size=ranks, tensor_parallel_size=ranks)
        toolkit = LayerToolkit.create(
            msgspec.structs.replace(worker_config(bench_info(), dtype=dtype), parallel=share),
            device=torch.device("cpu"),
            dtype=getattr(torch, dtype),
            attention_backend=PlainAttentionBackend(),
            quantization=method,
            communicator=_NoPeers() if ranks > 1 else None,
        )
        has_bias = bool(self.biases)
        heads, kv_heads = sizes.heads
        attention, mlp = f"{PREFIX}.self_attn", f"{PREFIX}.mlp"
        self.qkv_proj = toolkit.qkv_linear(
            f"{attention}.qkv_proj",
            sizes.hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=sizes.head_size,
            bias=has_bias,
        )
        parts = {"gate": sizes.wide, "up": sizes.wide}
        self.gate_up_proj = toolkit.merged_column_linear(f"{mlp}.gate_up_proj", sizes.hidden, parts, bias=has_bias)
        self.o_proj = toolkit.row_linear(f"{attention}.o_proj", heads * sizes.head_size, sizes.hidden, bias=has_bias)
        self.down_proj = toolkit.row_linear(f"{mlp}.down_proj", sizes.wide, sizes.hidden, bias=has_bias)

    def weight_rules(self) -> list[WeightRule]:
        """Stored ``q_proj.*`` into ``qkv_proj.*`` and so on, as a model's rules have it."""
        return [
            WeightRule(f"{stored}.*", f"{layer}.*", SHARDS.get(stored))
            for layer, parts in LAYERS.items()
            for stored in parts
        ]

    def load(self, store: Store, *, without: str | None = None, extra: Sequence[WeightTensor] = ()) -> LinearBench:
        """Fill the layers through the real loading path. ``without`` leaves out the stored tensor of that name."""
        tensors = [tensor for name, weight in self.weights.items() for tensor in store(name, weight)]
        tensors += [weight_tensor(f"{name}.bias", bias) for name, bias in self.biases.items()]
        kept = [tensor for tensor in tensors if tensor.name != without]
        loader = TensorLoader([*kept, *extra])
        load_weights(cast("Model", self), loader, bench_info(), show_progress=False)
        return self

    def layer(self, name: str) -> Any:
        """The layer ``name`` of :data:`LAYERS`."""
        return getattr(self, name)

    def expected(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """float64 [..., O] of the stored weights."""
        parts = []
        for stored in LAYERS[name]:
            part = x.double() @ self.weights[stored].double().T
            parts.append(part + self.biases[stored].double() if stored in self.biases else part)
        return torch.cat(parts, dim=-1)

    def num_weights(self, name: str) -> int:
        return sum(self.weights[stored].numel() for stored in LAYERS[name])

    def num_bytes(self, name: str) -> int:
        """Everything the layer keeps for its weight: parameters, buffers and plain tensors, the bias excepted."""
        layer = self.layer(name)
        kept = [*layer.parameters(), *layer.buffers(), *(v for v in vars(layer).values() if torch.is_tensor(v))]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t is not layer.bias}
        return sum(storages.values())
