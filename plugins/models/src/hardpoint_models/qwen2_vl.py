"""Qwen2-VL and Qwen2.5-VL: images and videos of any size, and three positions per token.

Legend: E patches of an item, C hidden size, N tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import Feature
from hardpoint.interfaces.step import NewRow
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.encdec import require_whole_model
from hardpoint_models.llama import QWEN2
from hardpoint_models.qwen2_vl_config import read_qwen2_5_tower, read_qwen2_tower
from hardpoint_models.qwen2_vl_tower import Grid, QwenTower, QwenTowerConfig, qwen_tower_rules
from hardpoint_models.vision_language import MediaEncoder, VisionLanguageModel, make_feature, refuse_array, token_id
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = [
    "QwenMedia",
    "QwenMediaEncoder",
    "QwenVisionLanguageModel",
    "create_qwen2_5_vl",
    "create_qwen2_vl",
    "token_positions",
]

NUM_AXES = 3
DEFAULT_SECTIONS = (16, 24, 24)
MAX_PATCHES = 1 << 22
SECONDS = "second_per_grid_ts"
_ARRAYS: Mapping[str, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
"""By modality: patches and their grid, as the processor of the checkpoint calls them."""
INPUTS = {
    modality: {patches: "float32 [patches, values]", grid: "int64 [3]"} for modality, (patches, grid) in _ARRAYS.items()
}
TIMED_INPUTS = {**INPUTS, "video": {**INPUTS["video"], SECONDS: "float32 [1], may be left out"}}


@dataclass(frozen=True, slots=True)
class QwenMedia:
    """``positions_per_second`` of a video, where they go by seconds: those of a frame are then ``second_per_grid_ts``
    apart."""

    tower: QwenTowerConfig
    tokens: Mapping[str, int]
    positions_per_second: int | None = None

    def grid(self, feature: Feature) -> Grid:
        frames, rows, columns = feature.data[_ARRAYS[feature.modality][1]].tolist()
        return Grid(frames, rows, columns)

    def frame_distance(self, feature: Feature) -> float:
        """Positions from one frame to the next; whatever a single frame is said to last, none follows it."""
        if feature.modality != "video" or self.positions_per_second is None or self.grid(feature).frames == 1:
            return 1.0
        given = feature.data.get(SECONDS)
        return self.positions_per_second * (1.0 if given is None else float(given[0]))


class QwenMediaEncoder(MediaEncoder):
    """Takes one image or video per feature: its patches float32 [E, values] under ``pixel_values``
    (``pixel_values_videos``), and their grid int64 [3] (frames, rows, columns) under ``image_grid_thw``
    (``video_grid_thw``); of a video also float32 [1] ``second_per_grid_ts``, by default 1."""

    def __init__(self, media: QwenMedia, layers: LayerToolkit) -> None:
        super().__init__()
        self.media = media
        self._dtype, self._device = layers.dtype, layers.device
        self.tower = QwenTower("vision.tower", media.tower, layers)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset(self.media.tokens.values())

    def placeholder_id(self, feature: Feature) -> int | None:
        return self.media.tokens.get(feature.modality)

    def refuse(self, feature: Feature) -> str | None:
        patches, grid = _ARRAYS[feature.modality]
        timed = feature.modality == "video" and self.media.positions_per_second is not None
        taken = {patches, grid, *((SECONDS,) if timed else ())}
        if set(feature.data) - taken:
            return f"it brings {', '.join(sorted(feature.data))[:100]}; this model takes {', '.join(sorted(taken))}"
        reason = refuse_array(feature, grid, "int64", (NUM_AXES,)) or self._refuse_grid(feature, grid)
        if reason is None and SECONDS in feature.data:
            reason = refuse_array(feature, SECONDS, "float32", (1,))
        if reason is None:
            shape = (self.media.grid(feature).num_patches, self.media.tower.patch_values)
            reason = refuse_array(feature, patches, "float32", shape)
        return reason or self._refuse_time(feature)

    def _refuse_grid(self, feature: Feature, name: str) -> str | None:
        grid, side = self.media.grid(feature), self.media.tower.merge_size
        if min(grid) < 1 or max(grid) > MAX_PATCHES or grid.num_patches > MAX_PATCHES:
            return f"{name} is {list(grid)}; 1 to {MAX_PATCHES} patches are possible"
        if grid.rows % side or grid.columns % side:
            return f"{name} is {list(grid)}; rows and columns must be multiples of {side}"
        length = grid.num_patches // self.media.tower.block
        if feature.length != length:
            return f"it has {feature.length} positions, but {name} {list(grid)} makes {length} embeddings"
        return None

    def _refuse_time(self, feature: Feature) -> str | None:
        """Positions never run ahead of tokens, or they would leave the context before these do."""
        frames, distance = self.media.grid(feature).frames, self.media.frame_distance(feature)
        if 0 <= distance * (frames - 1) < feature.length:
            return None
        return (
            f"its {frames} frames are {distance:g} positions apart, which is more time than its {feature.length} "
            f"tokens have places for; sample it with more frames per second, or give a smaller {SECONDS}"
        )

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        arrays = np.concatenate([feature.data[_ARRAYS[feature.modality][0]] for feature in features])
        patches = torch.from_numpy(arrays).to(self._device, self._dtype)
        embedded = self.tower(patches, [self.media.grid(feature) for feature in features])
        return embedded.split([feature.length for feature in features])

    def example(self, num_tokens: int) -> Feature:
        """The squarest image."""
        tower = self.media.tower
        side = max(1, int(min(num_tokens, MAX_PATCHES // tower.block) ** 0.5)) * tower.merge_size
        grid = np.array([1, side, side], dtype=np.int64)
        patches = np.zeros((side * side, tower.patch_values), dtype=np.float32)
        names = _ARRAYS["image"]
        return make_feature({names[0]: patches, names[1]: grid}, side * side // tower.block)

    def weight_rules(self) -> Sequence[WeightRule]:
        prefixes = ("visual.", "model.visual.")
        return qwen_tower_rules(prefixes, "vision.tower.", is_gated=self.media.tower.is_gated)


class QwenVisionLanguageModel(VisionLanguageModel):
    """Tokens have a position in time, one for rows and one for columns: text three equal ones, which go on behind the
    longest side of an item; an item's embeddings their places in its grid."""

    text_prefixes = ("model.", "model.language_model.")
    head_prefixes = ("",)

    def __init__(self, config: DecoderConfig, media: QwenMedia, ctx: ModelContext) -> None:
        info, layers = require_whole_model(ctx)
        super().__init__(info, config, layers, QwenMediaEncoder(media, layers))
        self.media = media

    @property
    def num_position_axes(self) -> int:
        return NUM_AXES

    def position_rows(self, row: NewRow) -> np.ndarray:
        """int64 [3, N]."""
        return token_positions(self.media, row.features, row.num_prompt_tokens)


def token_positions(media: QwenMedia, features: Sequence[Feature], num_tokens: int) -> np.ndarray:
    """int64 [3, N] of a prompt that shows ``features``, which fit."""
    parts: list[np.ndarray] = []
    place = position = 0
    for feature in features:
        parts.append(_text_positions(position, feature.offset - place))
        position += feature.offset - place
        place = feature.offset + feature.length
        grid, side = media.grid(feature), media.tower.merge_size
        parts.append(_item_positions(grid, side, media.frame_distance(feature)) + position)
        position += max(grid.rows, grid.columns) // side
    parts.append(_text_positions(position, num_tokens - place))
    return np.concatenate(parts, axis=1)


def _text_positions(first: int, count: int) -> np.ndarray:
    return np.tile(np.arange(first, first + count, dtype=np.int64), (NUM_AXES, 1))


def _item_positions(grid: Grid, side: int, frame_distance: float) -> np.ndarray:
    """int64 [3, embeddings]."""
    # Rounded in float32, as the checkpoints' own code does.
    times = np.arange(grid.frames, dtype=np.float32) * np.float32(frame_distance)
    axes = (times.astype(np.int64), np.arange(grid.rows // side), np.arange(grid.columns // side))
    return np.stack([axis.reshape(-1) for axis in np.meshgrid(*axes, indexing="ij")])


def _read_text(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """That of the language model, whose fields older files keep beside those of the rest."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelFormatError(f"{architecture}: config field 'text_config' must be an object")
    is_tied = text.get("tie_word_embeddings") or config.get("tie_word_embeddings") or False
    defaults = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_window_layers": 80, "use_sliding_window": False}
    present = {name: value for name, value in text.items() if value is not None or name == "sliding_window"}
    read = DecoderConfig.read({**defaults, **present, "tie_word_embeddings": is_tied}, architecture, QWEN2)
    return read if read.rope.sections else replace(read, rope=replace(read.rope, sections=DEFAULT_SECTIONS))


def _tokens(config: Mapping[str, Any], vocab_size: int, architecture: str) -> Mapping[str, int]:
    defaults = {"image": 151655, "video": 151656}
    return {
        kind: token_id(config, (f"{kind}_token_id",), vocab_size, architecture, default)
        for kind, default in defaults.items()
    }


@plugin("model", capabilities={"tasks": ["generate"], "inputs": INPUTS})
def create_qwen2_vl(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2VLForConditionalGeneration``: all sizes; images and videos."""
    del options
    info, _ = require_whole_model(ctx)
    text = _read_text(info.config, info.architecture)
    tower = read_qwen2_tower(info.config, info.architecture, text.hidden_size)
    media = QwenMedia(tower, _tokens(info.config, text.vocab_size, info.architecture))
    return QwenVisionLanguageModel(text, media, ctx)


@plugin("model", capabilities={"tasks": ["generate"], "inputs": TIMED_INPUTS})
def create_qwen2_5_vl(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2_5_VLForConditionalGeneration``: windows in the tower, and videos whose positions go by seconds."""
    del options
    info, _ = require_whole_model(ctx)
    text = _read_text(info.config, info.architecture)
    tower, per_second = read_qwen2_5_tower(info.config, info.architecture, text.hidden_size)
    media = QwenMedia(tower, _tokens(info.config, text.vocab_size, info.architecture), per_second)
    return QwenVisionLanguageModel(text, media, ctx)
