"""Idefics 3 and SmolVLM: tiles of images through a vision transformer, neighbors folded into one embedding, Llama.

Legend: N tiles, H channels, S side of a tile in pixels, g patches of it, D width of the tower, C hidden size of the
language model, s the side of the squares of patches that become one embedding, P = (g / s)^2 embeddings of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import Feature
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.encdec import require_whole_model
from hardpoint_models.image_encoders import ImageEncoder
from hardpoint_models.siglip import vision_rules
from hardpoint_models.siglip_config import VisionConfig, read_siglip, section
from hardpoint_models.vision_language import (
    PIXEL_VALUES,
    VisionLanguageModel,
    make_feature,
    read_text_config,
    refuse_array,
    token_id,
)
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["Idefics3Config", "Idefics3Encoder", "create_idefics3", "create_smolvlm", "fold_patches", "read_idefics3"]

PIXEL_MASK = "pixel_attention_mask"
MASK_TYPES = ("bool", "int64", "int32", "uint8")
INPUTS = {
    "image": {
        PIXEL_VALUES: "float32 [channels, side, side] or [tiles, channels, side, side]",
        PIXEL_MASK: "int64 [side, side] or [tiles, side, side], may be left out",
    }
}
TILES_AT_ONCE = 16
"""So many go through the tower together: its patches are many times as many as the embeddings that budgets count."""

_TOWER_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}


@dataclass(frozen=True, slots=True)
class Idefics3Config:
    """``scale``: s."""

    tower: VisionConfig
    image_token: int
    scale: int

    def num_tokens(self, grid: int) -> int:
        """Embeddings of a tile of ``grid`` patches a side."""
        return (grid // self.scale) ** 2


def read_idefics3(config: Mapping[str, Any], architecture: str, vocab_size: int) -> Idefics3Config:
    """Raises ``ModelFormatError`` for malformed fields, ``UnsupportedModelError`` for what is not computed here."""
    fields, vision = ConfigFields(config, architecture), section(config, "vision_config", architecture)
    family = "smolvlm" if architecture.startswith("SmolVLM") else "idefics3"
    tower = read_siglip(
        vision,
        architecture,
        # Files of the first release call the tower like the model; SmolVLM was published as an Idefics 3 too.
        model_types=(f"{family}_vision", family, "idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm"),
        defaults=_TOWER_DEFAULTS,
        fractional_positions=True,
    )
    ConfigFields(vision, architecture).require("use_base_siglip", (False,), False)
    scale = fields.integer("scale_factor", 2)
    if tower.grid % scale:
        raise ModelFormatError(
            f"{architecture}: images of {tower.grid} patches a side (image_size={tower.image_size}, "
            f"patch_size={tower.patch_size}) cannot be folded by scale_factor={scale}"
        )
    return Idefics3Config(tower, token_id(config, ("image_token_id",), vocab_size, architecture, 128257), scale)


def fold_patches(states: torch.Tensor, scale: int) -> torch.Tensor:
    """[N, g * g, D] to [N, P, s * s * D]: each square of ``scale`` patches a side, its rows one after another."""
    grid = round(states.shape[1] ** 0.5)
    squares = states.unflatten(1, (grid // scale, scale, grid // scale, scale)).transpose(2, 3)
    return squares.flatten(3).flatten(1, 2).flatten(2)


class Idefics3Encoder(ImageEncoder):
    """Takes float32 [H, S, S] under ``pixel_values``, one tile, and which of its pixels are no padding, [S, S] of 0 and
    1 under ``pixel_attention_mask`` (without it, all of them). A tile is at most as large as the configuration says.

    Several tiles, [N, H, S, S] with [N, S, S], may share one feature where nothing stands between them; those that are
    0 throughout fill a batch up and have no embeddings, unless all are.
    """

    def __init__(self, config: Idefics3Config, hidden_size: int, layers: LayerToolkit) -> None:
        super().__init__(config.image_token, config.tower, layers)
        self.config = config
        width = config.tower.hidden_size * config.scale**2
        self.projection = layers.column_linear("vision.projection", width, hidden_size, gather_output=True)

    def refuse(self, feature: Feature) -> str | None:
        pixels, mask = feature.data.get(PIXEL_VALUES), feature.data.get(PIXEL_MASK)
        if set(feature.data) - {PIXEL_VALUES, PIXEL_MASK}:
            brought = ", ".join(sorted(feature.data))[:100]
            return f"it brings {brought}; this model takes {PIXEL_VALUES!r} and {PIXEL_MASK!r}"
        side = 0 if pixels is None or pixels.ndim < 3 else pixels.shape[-1]
        tower = self.config.tower
        grid = side // tower.patch_size
        tiles = [None] if pixels is not None and pixels.ndim == 4 else []
        if pixels is not None and pixels.ndim == 4 and pixels.shape[0] > max(feature.length, 1) * 2:
            return f"it brings {pixels.shape[0]} tiles for {feature.length} positions; leave out those that are padding"
        shape = [*tiles, tower.num_channels, side or tower.image_size, side or tower.image_size]
        if pixels is not None and (side > tower.image_size or not grid or grid % self.config.scale):
            return (
                f"{PIXEL_VALUES} is {list(pixels.shape)}; tiles must be squares of at most {tower.image_size} pixels a "
                f"side, and their patches of {tower.patch_size} pixels a multiple of {self.config.scale} a side"
            )
        reason = refuse_array(feature, PIXEL_VALUES, "float32", shape)
        if reason is not None or pixels is None:
            return reason
        return self._refuse_length(feature, pixels, grid) or self._refuse_mask(pixels, mask, grid)

    def _refuse_length(self, feature: Feature, pixels: np.ndarray, grid: int) -> str | None:
        num_tiles = len(_real_tiles(pixels.reshape(-1, *pixels.shape[-3:])))
        each = self.config.num_tokens(grid)
        if feature.length == num_tiles * each:
            return None
        return f"it has {feature.length} positions; {num_tiles} tiles of this size take {each} each of this model"

    def _refuse_mask(self, pixels: np.ndarray, mask: np.ndarray | None, grid: int) -> str | None:
        if mask is None:
            return None
        wanted = (*pixels.shape[:-3], *pixels.shape[-2:])
        if mask.shape != wanted or str(mask.dtype) not in MASK_TYPES:
            return (
                f"{PIXEL_MASK} is {mask.dtype} {list(mask.shape)}; {list(wanted)} of type {', '.join(MASK_TYPES)} is "
                "needed, as the model's processor makes it"
            )
        if mask.size and not 0 <= int(mask.min()) <= int(mask.max()) <= 1:
            return f"{PIXEL_MASK} holds values other than 0 and 1"
        tiles = _real_tiles(pixels.reshape(-1, *pixels.shape[-3:]))
        patches = self._patches(mask.reshape(-1, *mask.shape[-2:])[tiles], grid)
        if not (patches[:, :, 0].any(1) & patches[:, 0, :].any(1)).all():
            return f"{PIXEL_MASK} leaves nothing of a tile's first row or column; images start in the upper left corner"
        return None

    def _patches(self, mask: np.ndarray, grid: int) -> np.ndarray:
        """[N, S, S] to bool [N, g, g]: those with any pixel that is no padding."""
        size = self.config.tower.patch_size
        whole = mask[:, : grid * size, : grid * size].reshape(len(mask), grid, size, grid, size)
        return np.asarray(whole.any(axis=(2, 4)))

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        tiles: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        places: list[tuple[int, int, int]] = []
        for feature in features:
            pixels = feature.data[PIXEL_VALUES]
            pixels = pixels.reshape(-1, *pixels.shape[-3:])
            side, real = pixels.shape[-1], _real_tiles(pixels)
            grid = side // self.config.tower.patch_size
            given = feature.data.get(PIXEL_MASK)
            mask = np.ones((len(pixels), side, side), dtype=bool) if given is None else given.reshape(-1, side, side)
            patches = self._patches(mask[real], grid)
            waiting = tiles.setdefault(side, [])
            places.append((side, len(waiting), len(waiting) + len(real)))
            waiting.extend(zip(pixels[real], patches, strict=True))
        made = {side: self._embed(waiting) for side, waiting in tiles.items()}
        return [made[side][first:last].flatten(0, 1) for side, first, last in places]

    def _embed(self, tiles: Sequence[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
        """[N, P, C] of tiles of one size, each with its patches that are no padding."""
        found = []
        for start in range(0, len(tiles), TILES_AT_ONCE):
            pixels, patches = (np.stack(part) for part in zip(*tiles[start : start + TILES_AT_ONCE], strict=True))
            states = self.tower(
                torch.from_numpy(pixels).to(self._device, self._dtype),
                None if patches.all() else torch.from_numpy(patches).to(self._device),
            )
            found.append(self.projection(fold_patches(states, self.config.scale)))
        return torch.cat(found)

    def example(self, num_tokens: int) -> Feature:
        del num_tokens
        tower = self.config.tower
        pixels = np.zeros((tower.num_channels, tower.image_size, tower.image_size), dtype=np.float32)
        return make_feature({PIXEL_VALUES: pixels}, self.config.num_tokens(tower.grid))

    def weight_rules(self) -> Sequence[WeightRule]:
        return [
            *vision_rules("model.vision_model", "vision.tower", self.config.tower),
            WeightRule("model.connector.modality_projection.proj.*", "vision.projection.*"),
        ]


def _real_tiles(pixels: np.ndarray) -> np.ndarray:
    """Of [N, H, S, S] the numbers of the tiles that are not 0 throughout, or the first one's where all are."""
    real = np.flatnonzero(pixels.reshape(len(pixels), -1).any(axis=1))
    return real if len(real) else np.zeros(1, dtype=real.dtype)


class Idefics3Model(VisionLanguageModel):
    """The language model is stored as a Llama without head, the head beside it."""

    text_prefixes = ("model.text_model.",)
    head_prefixes = ("",)


def _create(ctx: ModelContext) -> Model:
    info, layers = require_whole_model(ctx)
    text = read_text_config(info.config, info.architecture)
    config = read_idefics3(info.config, info.architecture, text.vocab_size)
    return Idefics3Model(info, text, layers, Idefics3Encoder(config, text.hidden_size, layers))


@plugin("model", capabilities={"tasks": ["generate"], "inputs": INPUTS})
def create_idefics3(ctx: ModelContext, options: NoOptions) -> Model:
    """``Idefics3ForConditionalGeneration``: Idefics 3 and the first SmolVLM."""
    del options
    return _create(ctx)


@plugin("model", capabilities={"tasks": ["generate"], "inputs": INPUTS})
def create_smolvlm(ctx: ModelContext, options: NoOptions) -> Model:
    """``SmolVLMForConditionalGeneration``: SmolVLM 2, frames of videos as images."""
    del options
    return _create(ctx)
