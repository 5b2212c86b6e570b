"""Models of recurrent layers alone: Mamba and Mamba-2. No layer attends, and only states are kept of a sequence.

Legend: T tokens of the step, C hidden size. Parameters have the names that decoders give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardpoint.interfaces.model import Model, ModelContext, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import require_toolkit
from hardpoint_models.causal import CausalModel, LayerStack
from hardpoint_models.mamba_config import MambaConfig, read_mamba, read_mamba2
from hardpoint_torch_runtime.layers import LayerNorm, LayerToolkit, RMSNorm, SelectiveSizes

__all__ = ["MambaModel", "create_mamba", "create_mamba2"]


class MambaLayer(torch.nn.Module):
    """Normalized hidden states [T, C] to what is to be added, [T, C]."""

    def __init__(self, index: int, config: MambaConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name, sizes = f"model.layers.{index}.mixer", config.mixer
        self.norm = layers.rms_norm(config.hidden_size, config.norm_eps)
        self.mixer: torch.nn.Module = (
            layers.selective_mixer(name, sizes)
            if isinstance(sizes, SelectiveSizes)
            else layers.mamba_mixer(name, sizes)
        )

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mixer(normed)
        return mixed


class MambaStack(LayerStack):
    """Layers between which the sum travels, in float32 where the configuration wants it."""

    def __init__(self, config: MambaConfig, layers: LayerToolkit, stage: StageRange) -> None:
        made: list[MambaLayer] = []

        def make(index: int) -> MambaLayer:
            made.append(MambaLayer(index, config, layers))
            return made[-1]

        super().__init__(config, layers, stage, make, lambda: layers.rms_norm(config.hidden_size, config.norm_eps))
        self._in_order = tuple(made)
        self._dtype = layers.dtype
        self._is_wider = config.keeps_residual_exact and layers.dtype != torch.float32

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]; ``hidden`` is overwritten."""
        del positions
        residual: torch.Tensor | None = None
        for layer in self._in_order:
            normed, residual = self._normed(layer.norm, hidden, residual)
            hidden = layer(normed)
        if self.norm is not None:
            return self._normed(self.norm, hidden, residual)[0]
        # Stages hand on what all dtypes of the model have in common.
        return self.finish(hidden, residual).to(self._dtype)

    def _normed(
        self, norm: RMSNorm | LayerNorm, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_wider:
            return norm.add(hidden, residual)
        residual = hidden.float() if residual is None else residual.add_(hidden)
        return norm(residual.to(self._dtype)), residual


class MambaModel(CausalModel):
    """Model of one pipeline stage."""

    def __init__(self, info: ModelInfo, config: MambaConfig, layers: LayerToolkit, stage: StageRange | None) -> None:
        super().__init__(info, config, layers, stage, lambda held: MambaStack(config, layers, held))
        self.config = config

    def weight_rules(self) -> Sequence[WeightRule]:
        head = WeightRule("lm_head.weight", None if self.config.is_tied else "lm_head.projection.weight")
        return [head, *self.config.rules]


def _build(ctx: ModelContext, read: Callable[[Mapping[str, Any], str], MambaConfig]) -> MambaModel:
    """Weights are uninitialized until they are loaded."""
    info, layers = require_toolkit(ctx)
    return MambaModel(info, read(info.config, info.architecture), layers, ctx.stage)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_mamba(ctx: ModelContext, options: NoOptions) -> Model:
    """``MambaForCausalLM``: selective state spaces with a decay for each channel and state."""
    del options
    return _build(ctx, read_mamba)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_mamba2(ctx: ModelContext, options: NoOptions) -> Model:
    """``Mamba2ForCausalLM``: heads with one decay each, groups of them with common B and C."""
    del options
    return _build(ctx, read_mamba2)
