"""Decoder-only transformer: RMS norms, rotary positions, grouped-query attention, gated feed-forward or experts.

Windows, rotations, norms, activation, scales and caps are the configuration's choice, layer by layer where it matters.

Legend: T tokens of the step, C hidden size, V vocabulary, S sampled positions. Parameter names follow Hugging Face
checkpoints but for the fused ``qkv_proj`` and ``gate_up_proj``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.interfaces.model import StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.causal import LAYER, CausalModel, LayerStack, causal_rules, gated_rules
from hardpoint_models.decoder_attention import decoder_norm, make_rotary, query_factors
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.decoder_layers import LAYER_CLASSES, DecoderLayer
from hardpoint_models.ending import Ending
from hardpoint_torch_runtime.layers import LayerToolkit, RMSNorm
from hardpoint_torch_runtime.lowering import NotStandard, StandardBlock, StandardStack

__all__ = ["DecoderModel"]


class DecoderStack(LayerStack):
    """Layers that have the rotation of the model, the local one, or none."""

    def __init__(self, config: DecoderConfig, layers: LayerToolkit, stage: StageRange) -> None:
        layer_class = LAYER_CLASSES[config.norm_placement]
        super().__init__(
            config,
            layers,
            stage,
            lambda index: layer_class(index, config, layers),
            lambda: decoder_norm(config.hidden_size, config, layers),
        )
        rotary = make_rotary(config, layers)
        local = None if config.local_rope is None else layers.rotary(config.head_size, config.local_rope)
        self._rotaries = (rotary,) if local is None else (rotary, local)
        self.rotaries = torch.nn.ModuleList(self._rotaries)
        turned_by = (config.rotation_of(index) for index in range(stage.first, stage.last))
        self._in_order = tuple(zip(self.layers.values(), turned_by, strict=True))
        self._temperature = config.query_temperature
        # Rounded as the embeddings are.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=layers.dtype))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().embed(token_ids)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]; ``hidden`` is overwritten."""
        if self.lowered is not None and (lowered := self.lowered(hidden, positions)) is not None:
            return lowered
        rotations = [rotary.lookup(positions) for rotary in self._rotaries]
        unrotated = None if self._temperature is None else query_factors(self._temperature, positions)
        residual: torch.Tensor | None = None
        for layer, turned_by in self._in_order:
            hidden, residual = layer(hidden, residual, unrotated if turned_by is None else rotations[turned_by])
        return self.finish(hidden, residual)

    def describe(self) -> StandardStack | NotStandard:
        blocks: list[StandardBlock] = []
        for index, (layer, turned_by) in zip(self.layers, self._in_order, strict=True):
            rotary = None if turned_by is None else self._rotaries[turned_by]
            if rotary is not None and rotary.axes is not None:
                return NotStandard(f"tokens have positions along several axes in layer {index}")
            if not isinstance(layer, DecoderLayer):
                return NotStandard(f"layer {index} is a {type(layer).__name__}")
            block = layer.describe(f"model.layers.{index}", rotary)
            if isinstance(block, NotStandard):
                return block
            blocks.append(block)
        if self.norm is not None and not isinstance(self.norm, RMSNorm):
            return NotStandard(f"the final norm is a {type(self.norm).__name__}")
        return StandardStack(tuple(blocks), self.norm)


class DecoderModel(CausalModel):
    """Model of one pipeline stage."""

    def __init__(
        self,
        info: ModelInfo,
        config: DecoderConfig,
        layers: LayerToolkit,
        stage: StageRange | None,
        ending: Ending | None = None,
    ) -> None:
        super().__init__(info, config, layers, stage, lambda held: DecoderStack(config, layers, held), ending)
        self.config = config

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded if self.config.input_scale == 1.0 else embedded.mul_(self.config.input_scale)

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        cap, divisor = self.config.logits_soft_cap, self.config.logits_divisor
        logits = logits if divisor == 1.0 else logits.div_(divisor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def weight_rules(self) -> Sequence[WeightRule]:
        unchanged = [
            "model.embed_tokens.weight",
            "model.norm.weight",
            f"{LAYER}.input_layernorm.weight",
            f"{LAYER}.post_attention_layernorm.weight",
            f"{LAYER}.pre_feedforward_layernorm.weight",
            f"{LAYER}.post_feedforward_layernorm.weight",
            f"{LAYER}.self_attn.o_proj.*",
            f"{LAYER}.self_attn.q_norm.weight",
            f"{LAYER}.self_attn.k_norm.weight",
            f"{LAYER}.mlp.down_proj.*",
        ]
        rules = [
            *self.config.rules,
            *(self.config.latent.rules if self.config.latent is not None else ()),
            *(self.config.experts.rules if self.config.experts is not None else ()),
            *causal_rules(self.config),
            *gated_rules("mlp"),
            *(WeightRule(name, name) for name in unchanged),
        ]
        return self.ending_rules(rules)
