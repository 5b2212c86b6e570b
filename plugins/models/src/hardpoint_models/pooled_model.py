"""What every model says of itself whose hidden states may be pooled: decoders and encoders alike."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.label_head import LabelHead
from hardpoint_models.text_pooling import TextPooling

__all__ = ["PooledModel"]


class PooledModel(torch.nn.Module):
    """Base of models; ``labels`` is set by those that judge, on the stage that holds the head.

    ``_kv_specs`` are set once all layers are there.
    """

    labels: LabelHead | None

    def __init__(self, info: ModelInfo, pooling: TextPooling) -> None:
        super().__init__()
        self._info = info
        self.pooling = pooling
        self.labels = None
        self._kv_specs: Mapping[str, KVCacheSpec] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pooling_method(self) -> str:
        """How the hidden states of a text become one result, unless a request says otherwise."""
        return self.pooling.method

    @property
    def normalizes(self) -> bool:
        """Whether embeddings have length one, unless a request says otherwise."""
        return self.pooling.normalizes

    @property
    def embedding_dimensions(self) -> tuple[int, ...]:
        """To how many entries embeddings may be cut; empty where any number will do."""
        return self.pooling.dimensions

    @property
    def score_head(self) -> LabelHead | None:
        """What makes scores of pooled states, in models that judge texts."""
        return self.labels

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._kv_specs
