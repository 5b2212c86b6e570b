"""FlashAttention backends over fabricated devices, their layers and steps, for tests of the adaptor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.interfaces.attention import AttentionNeed, BlockSizeRule, CommonAttentionMetadata
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_attention.flash import FlashBackend, FlashOptions, FlashSurroundings, InstalledKernels
from hardpoint_attention.flash.builder import FlashMetadataBuilder
from hardpoint_attention.flash.impl import FlashImpl
from hardpoint_testing_torch import AttentionProblem, AttentionShape, make_problem

__all__ = ["DEVICES", "FlashCase", "OnCpuTensors", "flash_backend"]

DEVICES = {
    2: DeviceDescription(device_type="cuda", name="A100", capability=(8, 0)),
    3: DeviceDescription(device_type="cuda", name="H100", capability=(9, 0)),
    4: DeviceDescription(device_type="cuda", name="B200", capability=(10, 0)),
}
"""A device for each generation that is the best one there."""


class OnCpuTensors(FlashBackend):
    """Answers for the fabricated device when asked about a CPU, whose tensors the doubles compute with."""

    def refuse(self, need: AttentionNeed) -> str | None:
        return super().refuse(self._moved(need))

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return super().block_sizes(self._moved(need))

    def _moved(self, need: AttentionNeed) -> AttentionNeed:
        return replace(need, device=self.surroundings.device) if need.device.device_type == "cpu" else need


def flash_backend(
    generation: int, *, others: Sequence[int] = (), options: FlashOptions | None = None, **surroundings: Any
) -> OnCpuTensors:
    """A backend whose layers get ``generation``; ``others`` are installed beside it."""
    installed = InstalledKernels(dict.fromkeys((generation, *others), "test"), {2: 256})
    return OnCpuTensors(FlashSurroundings(DEVICES[generation], installed, **surroundings), options or FlashOptions())


@dataclass(slots=True)
class FlashCase:
    """A backend with layers of one group. The first layer's shape is that of ``problem``."""

    backend: FlashBackend
    shape: AttentionShape
    builder: FlashMetadataBuilder
    layers: list[FlashImpl]

    @classmethod
    def create(
        cls,
        generation: int,
        shape: AttentionShape | None = None,
        *,
        windows: Sequence[int | None] = (None,),
        spec: Any = None,
        max_rows: int = 16,
        max_tokens: int = 2048,
        **backend: Any,
    ) -> FlashCase:
        """One layer for each of ``windows``, and the builder of their group."""
        shape = shape or AttentionShape(dtype=torch.bfloat16, block_size=256 if generation == 2 else 16)
        made = flash_backend(generation, **backend)
        problem = make_problem(shape, [(1, 1)])
        names = [f"layer.{index}" for index in range(len(windows))]
        layers = [
            made.create_impl(replace(problem.params(name), sliding_window=window))
            for name, window in zip(names, windows, strict=True)
        ]
        builder = made.create_builder(spec or problem.spec(), names, max_rows, max_tokens, torch.device("cpu"))
        assert isinstance(builder, FlashMetadataBuilder)
        assert all(isinstance(layer, FlashImpl) for layer in layers)
        return cls(made, shape, builder, layers)  # type: ignore[arg-type]

    def problem(self, rows: Sequence[tuple[int, int]], seed: int = 0) -> AttentionProblem:
        return make_problem(self.shape, rows, seed)

    def common(self, rows: Sequence[tuple[int, int]], **changes: Any) -> CommonAttentionMetadata:
        return replace(self.problem(rows).common(), **changes)

    def run(self, problem: AttentionProblem, layer: int = 0, **changes: Any) -> torch.Tensor:
        """Write, build and compute a step; ``changes`` of its common metadata."""
        impl, cache, output = self.layers[layer], problem.kv_cache(), problem.empty_output()
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
        metadata = self.builder.build(replace(problem.common(), **changes))
        return impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
