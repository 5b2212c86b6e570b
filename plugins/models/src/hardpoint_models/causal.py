"""What models that predict the next token have in common: stages, embedding, head, and the names of weights.

Legend: T tokens of the step, C hidden size, V vocabulary, S sampled positions. Parameter names follow Hugging Face
checkpoints of the Llama lineage but for the fused ``qkv_proj`` and ``gate_up_proj``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hardpoint.interfaces.model import StageOutput, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.ending import Ending, generating_pooling
from hardpoint_models.label_head import LabelHead
from hardpoint_models.pooled_model import PooledModel
from hardpoint_models.text_pooling import SENTENCE_FIELD
from hardpoint_torch_runtime.layers import LayerNorm, LayerToolkit, RMSNorm
from hardpoint_torch_runtime.lowering import LoweredForward, NotStandard, StandardStack

__all__ = [
    "LAYER",
    "CausalConfig",
    "CausalModel",
    "GatedMLP",
    "LayerStack",
    "StackConfig",
    "causal_rules",
    "gated_rules",
]

LAYER = "model.layers.*"


class StackConfig(Protocol):
    """What every family's record says; sizes are those of the whole model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def is_tied(self) -> bool: ...


class CausalConfig(StackConfig, Protocol):
    """That of families with feed-forward blocks."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def mlp_bias(self) -> bool: ...


class GatedMLP(torch.nn.Module):
    """[T, C] to [T, C]."""

    def __init__(self, name: str, config: CausalConfig, layers: LayerToolkit, activation: torch.nn.Module) -> None:
        super().__init__()
        parts = {"gate": config.intermediate_size, "up": config.intermediate_size}
        self.gate_up_proj = layers.merged_column_linear(
            f"{name}.gate_up_proj", config.hidden_size, parts, bias=config.mlp_bias
        )
        self.down_proj = layers.row_linear(
            f"{name}.down_proj", config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )
        self.activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))


class LayerStack(torch.nn.Module):
    """The layers of one pipeline stage, with embedding and final norm where the stage has them.

    Subclasses run the layers: ``forward(hidden, positions)``, [T, C] to [T, C], which may overwrite ``hidden``. They
    call ``lowered`` first where they describe themselves to compilers. ``embedding_size``: of token embeddings, where
    that is not C.
    """

    def __init__(
        self,
        config: StackConfig,
        layers: LayerToolkit,
        stage: StageRange,
        make_layer: Callable[[int], torch.nn.Module],
        make_norm: Callable[[], RMSNorm | LayerNorm | None],
        *,
        embedding_size: int | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        needs_embedding = stage.has_embedding or (stage.has_head and config.is_tied)
        self.embed_tokens = (
            layers.embedding("model.embed_tokens", config.vocab_size, embedding_size or config.hidden_size)
            if needs_embedding
            else None
        )
        # Keyed by the number in the whole model, so that names agree over stages.
        self.layers = torch.nn.ModuleDict({str(index): make_layer(index) for index in range(stage.first, stage.last)})
        self.norm = make_norm() if stage.has_head else None
        self.lowered: LoweredForward | None = None

    def describe(self) -> StandardStack | NotStandard:
        """What a compiler may put in the place of the layers."""
        return NotStandard(f"the layers of a {type(self).__name__} are no standard decoder blocks")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to [T, C]. Raises ``RuntimeError`` on stages without an embedding."""
        if self.embed_tokens is None:
            raise RuntimeError(f"{self.stage} holds no embedding; hand it intermediates")
        return self.embed_tokens(token_ids)

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """What the stage hands on: the sum of the last output and its residual, normalized where the model ends."""
        if self.norm is not None:
            return self.norm.add(hidden, residual)[0]
        return hidden if residual is None else residual.add_(hidden)


class CausalModel(PooledModel):
    """Model of one pipeline stage. Between stages travels ``hidden``, the sum of output and residual, [T, C].

    Families build their ``stack`` and say in :meth:`enter` and :meth:`finish_logits` what they do before and after.
    With an ``ending`` nothing is generated: hidden states, or their scores, are the result.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: StackConfig,
        layers: LayerToolkit,
        stage: StageRange | None,
        make_stack: Callable[[StageRange], LayerStack],
        ending: Ending | None = None,
        *,
        embedding_size: int | None = None,
        head_bias: bool = False,
    ) -> None:
        super().__init__(info, generating_pooling(info) if ending is None else ending.pooling)
        self._num_layers = config.num_layers
        self.stage = stage if stage is not None else StageRange(0, config.num_layers)
        self.model = make_stack(self.stage)
        self._predicts = ending is None
        self._label_rules = () if ending is None else ending.rules
        self.lm_head = None
        if self.stage.has_head and ending is None:
            tied_to = self.model.embed_tokens if config.is_tied else None
            self.lm_head = layers.lm_head(
                "lm_head", config.vocab_size, embedding_size or config.hidden_size, tied_to=tied_to, bias=head_bias
            )
        elif self.stage.has_head and ending is not None and ending.labels is not None:
            self.labels = LabelHead(ending.labels, config.hidden_size, layers)
        self._kv_specs = layers.kv_cache_specs()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed(token_ids)

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        """What the first layer sees of embeddings [T, C], be they looked up or given."""
        return embedded

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What is made of the head's output [S, V]; may work in place."""
        return logits

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        # The stack writes into its input, and what was given belongs to the caller.
        if intermediates is not None:
            hidden = intermediates["hidden"].clone()
        elif embeddings is not None:
            hidden = self.enter(embeddings.clone())
        elif token_ids is not None:
            hidden = self.enter(self.embed(token_ids))
        else:
            raise ValueError("one of token_ids, embeddings and intermediates must be given")
        hidden = self.model(hidden, positions)
        return hidden if self.stage.has_head else StageOutput(intermediates={"hidden": hidden})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.lm_head is None:
            raise RuntimeError(
                f"{self._info.architecture} holds no head that predicts tokens on {self.stage}; logits come from the "
                "last stage of models that generate"
            )
        return self.finish_logits(self.lm_head(hidden))

    def ending_rules(self, rules: Sequence[WeightRule]) -> list[WeightRule]:
        """``rules`` of a model that generates, made to fit what is there behind the layers.

        Files of decoders saved to embed or to judge may lack the first part of every name, and hold a head of another
        kind or one that is not needed.
        """
        embeds_by_files = SENTENCE_FIELD in self._info.config
        if not self._predicts:
            rules = [rule for rule in rules if not rule.pattern.startswith("lm_head.")]
            rules += [*self._label_rules, WeightRule("lm_head.weight", None)]
        if self._predicts and not embeds_by_files:
            return list(rules)
        bare = [rule for rule in rules if rule.pattern.startswith("model.")]
        return [*rules, *(replace(rule, pattern=rule.pattern.removeprefix("model.")) for rule in bare)]

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for index, layer in self.model.layers.items():
            yield f"model.layers.{index}", layer

    def holds(self, parameter: str) -> bool:
        """False for parameters of the whole model that other stages hold."""
        parts = parameter.split(".")
        if parts[:2] == ["model", "layers"]:
            is_layer = parts[2].isdecimal() and int(parts[2]) < self._num_layers
            return parts[2] in self.model.layers or not is_layer
        if parts[:2] == ["model", "embed_tokens"]:
            return self.model.embed_tokens is not None
        return self.stage.has_head


def causal_rules(config: StackConfig) -> list[WeightRule]:
    """Rules for the head and for attention with projections of its own, stored one by one or fused."""
    fused = f"{LAYER}.self_attn.qkv_proj.*"
    return [
        # Old checkpoints carry frequency tables; they are computed here.
        WeightRule(f"{LAYER}.self_attn.rotary_emb.inv_freq", None),
        WeightRule("lm_head.weight", None if config.is_tied else "lm_head.projection.weight"),
        *(WeightRule(f"{LAYER}.self_attn.{part}_proj.*", fused, part) for part in ("q", "k", "v")),
        WeightRule(fused, fused),
    ]


def gated_rules(block: str) -> list[WeightRule]:
    """Rules for the halves of a feed-forward block that checkpoints keep under ``block``, one by one or fused."""
    fused = f"{LAYER}.mlp.gate_up_proj.*"
    return [
        *(WeightRule(f"{LAYER}.{block}.{part}_proj.*", fused, part) for part in ("gate", "up")),
        WeightRule(f"{LAYER}.{block}.gate_up_proj.*", fused),
    ]
