"""What encoders of images have in common: one kind of media, and squares of one size through a vision transformer.

Legend: N images, H channels, S side of an image in pixels, P embeddings of one, C hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hardpoint.interfaces.model import WeightRule
from hardpoint.interfaces.request import Feature
from hardpoint_models.siglip import VisionTower, vision_rules
from hardpoint_models.siglip_config import VisionConfig
from hardpoint_models.vision_language import PIXEL_VALUES, MediaEncoder, make_feature, refuse_array
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["IMAGE_INPUTS", "ImageEncoder", "SquareImageEncoder"]

IMAGE_INPUTS = {"image": {PIXEL_VALUES: "float32 [channels, side, side]"}}
"""What models of a :class:`SquareImageEncoder` declare to take: by modality, arrays and their forms."""
IMAGES_AT_ONCE = 4
"""So many go through the tower together: an image may have many times as many patches as embeddings."""


class ImageEncoder(MediaEncoder):
    """Of media of the kind ``image`` alone. ``tower`` makes states of their patches."""

    def __init__(self, image_token: int, tower: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self._image_token = image_token
        self._dtype, self._device = layers.dtype, layers.device
        self.tower = VisionTower("vision.tower", tower, layers)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset((self._image_token,))

    def placeholder_id(self, feature: Feature) -> int | None:
        return self._image_token if feature.modality == "image" else None


class SquareImageEncoder(ImageEncoder):
    """Takes float32 [H, S, S] under ``pixel_values``, one image per feature; ``num_tokens``: P."""

    def __init__(self, image_token: int, tower: VisionConfig, num_tokens: int, layers: LayerToolkit) -> None:
        super().__init__(image_token, tower, layers)
        self._shape = (tower.num_channels, tower.image_size, tower.image_size)
        self._num_tokens = num_tokens
        self._tower_config = tower

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, H, S, S] to [N, P, C]."""
        raise NotImplementedError

    def refuse(self, feature: Feature) -> str | None:
        if set(feature.data) - {PIXEL_VALUES}:
            return f"it brings {', '.join(sorted(feature.data))[:100]}; this model takes {PIXEL_VALUES!r} alone"
        if feature.length != self._num_tokens:
            return f"it has {feature.length} positions; an image takes {self._num_tokens} of this model"
        return refuse_array(feature, PIXEL_VALUES, "float32", self._shape)

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        embeddings: list[torch.Tensor] = []
        for start in range(0, len(features), IMAGES_AT_ONCE):
            arrays = np.stack([one.data[PIXEL_VALUES] for one in features[start : start + IMAGES_AT_ONCE]])
            embeddings.extend(self.embed(torch.from_numpy(arrays).to(self._device, self._dtype)))
        return embeddings

    def example(self, num_tokens: int) -> Feature:
        del num_tokens
        return make_feature({PIXEL_VALUES: np.zeros(self._shape, dtype=np.float32)}, self._num_tokens)

    def tower_rules(self, num_stored: int | None = None) -> Sequence[WeightRule]:
        """``num_stored``: layers in the files, where the tower needs fewer."""
        towers = [f"{outer}vision_tower{inner}" for outer in ("", "model.") for inner in (".vision_model", "")]
        return [
            *(
                rule
                for stored in towers
                for rule in vision_rules(stored, "vision.tower", self._tower_config, num_stored)
            ),
            # What SigLIP pools states with; here they are used one by one.
            *(WeightRule(f"{stored}.head.{rest}", None) for stored in towers for rest in ("*", "*.*", "*.*.*")),
        ]
