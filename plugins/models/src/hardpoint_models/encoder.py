"""What encoders have in common: stages, whole prompts, hidden states of both sides, and perhaps a head of labels.

Legend: T tokens of the step, C hidden size, N texts or tokens, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from hardpoint.interfaces.model import StageOutput, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.label_head import LabelHead, LabelShape
from hardpoint_models.pooled_model import PooledModel
from hardpoint_models.text_pooling import TextPooling
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["EncoderConfig", "EncoderEmbeddings", "EncoderModel", "EncoderStack"]


class EncoderConfig(Protocol):
    """What every family's record says; sizes are those of the whole model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def pooling(self) -> TextPooling: ...


class EncoderEmbeddings(torch.nn.Module):
    """``words`` looks tokens up; calling it makes the first hidden states [T, C] of what was looked up."""

    words: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, words: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        """Looked-up words [T, C], positions int64 [T]; ``token_ids`` int64 [T] where the text is not given as
        embeddings."""
        raise NotImplementedError


class EncoderStack(torch.nn.Module):
    """The layers of one pipeline stage, keyed by their number in the whole model.

    Subclasses run them: ``forward(hidden, positions)``, [T, C] to [T, C], which may overwrite ``hidden``.
    """

    def __init__(self, stage: StageRange, make_layer: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleDict({str(index): make_layer(index) for index in range(stage.first, stage.last)})


class EncoderModel(PooledModel):
    """Model of one pipeline stage. Between stages travels ``hidden``, [T, C].

    A text must be computed in one step, since its tokens see those behind them. ``labels`` is the head behind the last
    layer, for models that judge texts; other heads of a checkpoint are left out.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: EncoderConfig,
        layers: LayerToolkit,
        stage: StageRange | None,
        make_embeddings: Callable[[], EncoderEmbeddings],
        make_stack: Callable[[StageRange], EncoderStack],
        labels: LabelShape | None = None,
    ) -> None:
        super().__init__(info, config.pooling)
        self._num_layers = config.num_layers
        self.stage = stage if stage is not None else StageRange(0, config.num_layers)
        self.embeddings = make_embeddings() if self.stage.has_embedding else None
        self.encoder = make_stack(self.stage)
        if labels is not None and self.stage.has_head:
            self.labels = LabelHead(labels, config.hidden_size, layers)
        self._kv_specs = layers.kv_cache_specs()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embeddings().words(token_ids)

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        if intermediates is not None:
            # The layers write into their input, and this one belongs to the caller.
            hidden = intermediates["hidden"].clone()
        elif embeddings is not None:
            hidden = self._embeddings()(embeddings, positions, token_ids)
        elif token_ids is not None:
            hidden = self._embeddings()(self.embed(token_ids), positions, token_ids)
        else:
            raise ValueError("one of token_ids, embeddings and intermediates must be given")
        hidden = self.encoder(hidden, positions)
        return hidden if self.stage.has_head else StageOutput(intermediates={"hidden": hidden})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises ``RuntimeError``: there is nothing to sample from."""
        raise RuntimeError(
            f"{self._info.architecture} computes embeddings and no logits, so it cannot generate; ask for the task "
            "'embed'"
        )

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for index, layer in self.encoder.layer.items():
            yield f"encoder.layer.{index}", layer

    def weight_rules(self) -> Sequence[WeightRule]:
        raise NotImplementedError

    def holds(self, parameter: str) -> bool:
        """False for parameters of the whole model that other stages hold."""
        part, _, rest = parameter.partition(".")
        if part == "embeddings":
            return self.embeddings is not None
        if not rest.startswith("layer."):
            return self.stage.has_head
        index = rest.split(".")[1]
        is_layer = index.isdecimal() and int(index) < self._num_layers
        return index in self.encoder.layer or not is_layer

    def _embeddings(self) -> EncoderEmbeddings:
        if self.embeddings is None:
            raise RuntimeError(f"{self.stage} holds no embedding; hand it intermediates")
        return self.embeddings
