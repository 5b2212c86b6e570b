"""From pooled hidden states to one score per label: the heads of classifiers, rerankers and reward models.

Legend: N pooled states, C hidden size, L labels. All arithmetic is float32, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_torch_runtime.layers import ACTIVATIONS, LayerToolkit

__all__ = ["LabelHead", "LabelShape", "ScoreActivation", "num_labels", "score_activation"]

ScoreActivation = Literal["softmax", "sigmoid", "none"]
"""What scores go through unless a request wants them raw."""
MAX_LABELS = 100_000
_FUNCTIONS = {**ACTIVATIONS, "tanh": torch.tanh}
_BY_CLASS: Mapping[str, ScoreActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_BY_PROBLEM: Mapping[str, ScoreActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class LabelShape:
    """A linear layer from states to scores, and perhaps a dense one before it.

    Attributes:
        activation: of the scores.
        bias: whether the last layer has one.
        dense: the activation of the layer before, by its name in configurations, or None without such a layer.
        dense_bias: whether that layer has one.
        norm_eps: of the layer norm between the two, or None without one; ``norm_bias`` is whether it has one.
    """

    num_labels: int
    activation: ScoreActivation
    bias: bool = True
    dense: str | None = None
    dense_bias: bool = True
    norm_eps: float | None = None
    norm_bias: bool = True


class HeadLinear(torch.nn.Module):
    """[N, I] to [N, O], float32. Every rank holds all of it: it is small, and seldom used."""

    def __init__(self, input_size: int, output_size: int, layers: LayerToolkit, *, bias: bool) -> None:
        super().__init__()
        made: dict[str, Any] = {"dtype": layers.dtype, "device": layers.device}
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, **made), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(output_size, **made), requires_grad=False) if bias else None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.weight.float(), None if self.bias is None else self.bias.float())


class LabelHead(torch.nn.Module):
    """float32 [N, C] to float32 [N, L], without the activation of scores."""

    def __init__(self, shape: LabelShape, hidden_size: int, layers: LayerToolkit) -> None:
        super().__init__()
        self.shape = shape
        self.dense = None
        if shape.dense is not None:
            self.dense = HeadLinear(hidden_size, hidden_size, layers, bias=shape.dense_bias)
        self.norm = None
        if shape.norm_eps is not None:
            self.norm = layers.layer_norm(hidden_size, shape.norm_eps, bias=shape.norm_bias)
        self.scores = HeadLinear(hidden_size, shape.num_labels, layers, bias=shape.bias)

    @property
    def activation(self) -> ScoreActivation:
        return self.shape.activation

    @property
    def num_labels(self) -> int:
        return self.shape.num_labels

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.dense is not None and self.shape.dense is not None:
            states = _FUNCTIONS[self.shape.dense](self.dense(states))
        if self.norm is not None:
            bias = None if self.norm.bias is None else self.norm.bias.float()
            states = F.layer_norm(states, (self.norm.size,), self.norm.weight.float(), bias, self.norm.eps)
        return self.scores(states)


def num_labels(fields: ConfigFields) -> int:
    """As many as ``id2label`` names, or ``num_labels``, or 2. ``ModelFormatError`` for what is no number of labels."""
    names: Any = fields.raw.get("id2label")
    if names is None:
        return fields.integer("num_labels", 2, most=MAX_LABELS)
    if not isinstance(names, Mapping) or not 1 <= len(names) <= MAX_LABELS:
        raise ModelFormatError(
            f"{fields.architecture}: config field 'id2label' is {shown(names)}; an object with a name for each label "
            "is needed"
        )
    return len(names)


def score_activation(fields: ConfigFields, labels: int) -> ScoreActivation:
    """What sentence-transformers wrote down, or what the problem asks for; else a sigmoid for a single label, as there,
    and shares of all for several.

    Raises ``UnsupportedModelError`` for other functions and problems.
    """
    stated: Any = fields.raw.get("sentence_transformers")
    stated = stated.get("activation_fn") if isinstance(stated, Mapping) else None
    stated = stated or fields.raw.get("sbert_ce_default_activation_function")
    if stated is not None:
        found = _BY_CLASS.get(str(stated).rpartition(".")[2])
        if found is None:
            raise UnsupportedModelError(
                f"{fields.architecture}: the activation of scores is {shown(stated)}; supported: {', '.join(_BY_CLASS)}"
            )
        return found
    fields.require("problem_type", (None, *_BY_PROBLEM), None)
    problem: Any = fields.raw.get("problem_type")
    return _BY_PROBLEM[problem] if problem is not None else "sigmoid" if labels == 1 else "softmax"
