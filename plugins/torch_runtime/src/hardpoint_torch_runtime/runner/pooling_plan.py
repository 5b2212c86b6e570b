"""How a worker makes one result of a text: what the model says, what the operator set, and whether they fit.

Legend: N pooled states, C hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hardpoint.errors import ConfigError
from hardpoint.interfaces.model import Model
from hardpoint.interfaces.model_source import ModelInfo

__all__ = [
    "EACH_TOKEN",
    "Activation",
    "CutModel",
    "PoolingModel",
    "PoolingOptions",
    "PoolingPlan",
    "ScoreHead",
    "ScoringModel",
    "activate",
    "check_options",
]

Activation = Literal["softmax", "sigmoid", "none"]
"""Of scores: shares that add up to 1, each label for itself, or scores as they are."""
Method = Literal["last", "cls", "mean", "token_embed", "step"]
SENTENCE_FIELD = "sentence_embedding"
"""Where loaders put what the files beside a checkpoint say about whole texts."""
EACH_TOKEN = frozenset({"token_embed", "step"})
"""Methods with a row for each of several tokens."""


@runtime_checkable
class PoolingModel(Protocol):
    """A model that says how its hidden states become an embedding, unless a request says otherwise.

    Others take the last token's, scaled to length 1: in a decoder it alone has seen the whole prompt.
    """

    @property
    def pooling_method(self) -> str:
        """One of ``POOLING_METHODS``, or ``step``."""

    @property
    def normalizes(self) -> bool: ...


@runtime_checkable
class CutModel(Protocol):
    """A model that says to how many entries its embeddings may be cut."""

    @property
    def embedding_dimensions(self) -> tuple[int, ...]:
        """Empty where any number will do."""


class ScoreHead(Protocol):
    """Weights behind the pooling."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [N, C] to float32 [N, L], before the activation."""


@runtime_checkable
class ScoringModel(Protocol):
    """A model that may judge texts: what it makes of one is no embedding but a score per label."""

    @property
    def score_head(self) -> ScoreHead | None:
        """None where hidden states are the result."""


class PoolingOptions(BaseModel):
    """The worker's options about pooling: what an operator may set against the model's own word."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pooling_method: Method | None = Field(
        default=None,
        description="how the hidden states of a text become one result, by default as the model has it; `step` keeps "
        "those of one token id, which ends each step of reasoning",
    )
    normalize_embeddings: bool | None = Field(
        default=None, description="scale embeddings to length 1; by default as the model has it"
    )
    step_token_id: int | None = Field(default=None, ge=0, description="the token that the pooling `step` looks for")
    label_token_ids: tuple[int, ...] | None = Field(
        default=None,
        description="judge texts by the logits of these tokens behind their last one, in the order of labels "
        "(no, yes); for models that generate",
    )
    score_activation: Activation | None = Field(
        default=None, description="what scores go through; by default as the model has it"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.pooling_method == "step") != (self.step_token_id is not None):
            raise ValueError("pooling_method 'step' and step_token_id need each other; set both or neither")
        ids = self.label_token_ids
        if ids is not None and (len(ids) < 2 or len(set(ids)) < len(ids) or min(ids) < 0):
            raise ValueError("label_token_ids must be two or more different token ids")
        if ids is not None and self.pooling_method not in (None, "last"):
            raise ValueError("label_token_ids judge by the last token; leave pooling_method unset")
        return self


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """What holds unless a request says otherwise.

    Attributes:
        method: one of ``POOLING_METHODS``, or ``step``.
        normalizes: embeddings are scaled to length 1; scores go through ``activation``.
        head: float32 [N, C] to [N, L], or None where states are the result.
        step_token_id: the token whose states ``step`` keeps.
        dimensions: to how many entries embeddings may be cut; empty where any number will do.
    """

    method: str = "last"
    normalizes: bool = True
    head: Callable[[torch.Tensor], torch.Tensor] | None = None
    activation: Activation = "none"
    step_token_id: int | None = None
    dimensions: tuple[int, ...] = ()

    @classmethod
    def settle(
        cls, model: Model, options: PoolingOptions | None = None, dtype: torch.dtype = torch.float32
    ) -> PoolingPlan:
        """``dtype`` is the one the model computes in. Raises ``ConfigError`` for options that do not fit the model."""
        options = options or PoolingOptions()
        check_options(options, model.info)
        plan = cls()
        if isinstance(model, PoolingModel):
            plan = cls(model.pooling_method, model.normalizes)
        head = model.score_head if isinstance(model, ScoringModel) else None
        if head is not None:
            plan = cls(plan.method, True, head, head.activation)
        token_ids = _label_tokens(options, model.info)
        if token_ids and head is not None:
            raise _refusal("label_token_ids", model.info, "has a head of labels already; leave them unset")
        if token_ids:
            plan = cls("last", True, _by_tokens(model, token_ids, dtype), "softmax")
        if isinstance(model, CutModel):
            plan = replace(plan, dimensions=model.embedding_dimensions)
        return _overridden(plan, options, model.info)

    @property
    def judges(self) -> bool:
        """Whether results are scores."""
        return self.head is not None


def check_options(options: PoolingOptions, info: ModelInfo) -> None:
    """What can be said before weights are loaded. Raises ``ConfigError`` naming option, value and what is allowed."""
    ids = (*_label_tokens(options, info), *(() if options.step_token_id is None else (options.step_token_id,)))
    beyond = [one for one in ids if one >= info.vocab_size]
    if beyond:
        raise ConfigError(
            f"texts are to be judged or divided by the token {beyond[0]}, but {info.architecture} has ids from 0 to "
            f"{info.vocab_size - 1}; look it up with the model's tokenizer, and set "
            "label_token_ids or step_token_id under plugins.worker.torch"
        )
    if options.label_token_ids is not None and "generate" not in info.tasks:
        raise _refusal("label_token_ids", info, "predicts no tokens; leave them unset")


def _label_tokens(options: PoolingOptions, info: ModelInfo) -> tuple[int, ...]:
    """As set, or as the files beside a reranker say; empty where texts are not judged by tokens."""
    if options.label_token_ids is not None:
        return options.label_token_ids
    beside: object = info.config.get(SENTENCE_FIELD)
    stated = beside.get("label_token_ids") if isinstance(beside, dict) and "generate" in info.tasks else None
    return tuple(stated) if stated else ()


def _overridden(plan: PoolingPlan, options: PoolingOptions, info: ModelInfo) -> PoolingPlan:
    method = options.pooling_method or plan.method
    if plan.judges and method != plan.method and not {plan.method, method} <= EACH_TOKEN:
        raise _refusal(
            "pooling_method",
            info,
            f"has a head that was trained on the pooling {plan.method!r}; leave it unset",
            method,
        )
    if options.normalize_embeddings is not None and plan.judges:
        raise _refusal("normalize_embeddings", info, "gives scores, which have no length; set score_activation instead")
    if options.score_activation is not None and not plan.judges:
        raise _refusal("score_activation", info, "gives embeddings and no scores; leave it unset")
    return replace(
        plan,
        method=method,
        normalizes=plan.normalizes if options.normalize_embeddings is None else options.normalize_embeddings,
        activation=options.score_activation or plan.activation,
        step_token_id=options.step_token_id,
    )


def _refusal(option: str, info: ModelInfo, reason: str, value: str | None = None) -> ConfigError:
    stated = "" if value is None else f"={value}"
    return ConfigError(f"plugins.worker.torch.{option}{stated} does not fit: {info.architecture} {reason}")


def _by_tokens(model: Model, token_ids: tuple[int, ...], dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every rank asks at the same time, which the head's collectives need."""

    def judge(states: torch.Tensor) -> torch.Tensor:
        return model.logits(states.to(dtype))[:, list(token_ids)].float()

    return judge


def activate(scores: torch.Tensor, activation: Activation) -> torch.Tensor:
    """float32 [..., L] to the same shape."""
    if activation == "softmax":
        return scores.softmax(dim=-1)
    return scores.sigmoid() if activation == "sigmoid" else scores
