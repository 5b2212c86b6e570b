"""What comes behind a decoder's last layer in models that generate nothing, and how texts become embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.interfaces.model import WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.label_head import LabelShape
from hardpoint_models.text_pooling import TextPooling

__all__ = ["Ending", "generating_pooling"]


@dataclass(frozen=True, slots=True)
class Ending:
    """In the place of a head that predicts tokens: none, or one of ``labels``."""

    pooling: TextPooling
    labels: LabelShape | None = None

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """Where checkpoints keep the head of labels."""
        if self.labels is None:
            return ()
        if self.labels.dense is None:
            return (WeightRule("score.*", "labels.scores.*"),)
        return (WeightRule("score.0.*", "labels.dense.*"), WeightRule("score.2.*", "labels.scores.*"))


def generating_pooling(info: ModelInfo) -> TextPooling:
    """How a model that generates embeds: as the files beside it say, else by the last token, of length one.

    Raises like :meth:`TextPooling.read`, unless the model is not going to embed anyway.
    """
    if "embed" not in info.tasks:
        return TextPooling("last", normalizes=True)
    return TextPooling.read(ConfigFields(info.config, info.architecture), method="last", normalizes=True)
