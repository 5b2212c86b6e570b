"""Made-up images for prompts of token ids, drawn so that whoever sees the ids can draw the same."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hardpoint.interfaces import Feature

__all__ = ["FixedImages", "MediaDrawer", "PatchGrids", "ShownItem", "media_drawer"]


@dataclass(frozen=True, slots=True)
class ShownItem:
    """One item of a prompt, and what it shows."""

    offset: int
    length: int
    data: Mapping[str, np.ndarray]
    modality: str = "image"

    def feature(self) -> Feature:
        parts = (f"{name} {self.data[name].shape} ".encode() + self.data[name].tobytes() for name in sorted(self.data))
        return Feature(
            modality=self.modality,
            content_hash=hashlib.sha256(b"".join(parts)).hexdigest(),
            offset=self.offset,
            length=self.length,
            data=dict(self.data),
        )


class MediaDrawer(Protocol):
    """Of one model."""

    def place(self, tokens: list[int], draw: random.Random) -> list[int]:
        """``tokens`` with placeholders in the place of some; elsewhere none are left. The ends stay as they are."""

    def shown(self, tokens: Sequence[int]) -> list[ShownItem]:
        """What the placeholders among ``tokens`` stand for. An item depends on the tokens before it alone, so that
        prompts that begin alike show the same."""

    def oracle_inputs(self, items: Sequence[ShownItem], num_tokens: int) -> dict[str, torch.Tensor]:
        """What ``transformers`` takes beside so many ids."""

    @property
    def least_step(self) -> int:
        """Tokens that every step must have room for."""


class FixedImages:
    """Images of one size, float32 [channels, side, side], each of ``length`` placeholders."""

    gaps: tuple[int, ...] = (0, 3)
    """Sometimes the next one follows at once."""

    def __init__(self, placeholder: int, length: int, shape: tuple[int, ...]) -> None:
        self._placeholder = placeholder
        self._length = length
        self._shape = shape

    @property
    def least_step(self) -> int:
        return 1

    def place(self, tokens: list[int], draw: random.Random) -> list[int]:
        placed = without(tokens, self._placeholder)
        start = 1
        while start + self._length < len(placed):
            start += draw.randrange(min(4, len(placed) - start - self._length))
            placed[start : start + self._length] = [self._placeholder] * self._length
            start += self._length + draw.choice(self.gaps)
        return placed

    def shown(self, tokens: Sequence[int]) -> list[ShownItem]:
        found = []
        for start, length in runs(tokens, self._placeholder):
            for offset in range(start, start + length, self._length):
                pixels = drawn_from(tokens[:offset]).standard_normal(self._shape, dtype=np.float32)
                found.append(ShownItem(offset, self._length, {"pixel_values": pixels}))
        return found

    def oracle_inputs(self, items: Sequence[ShownItem], num_tokens: int) -> dict[str, torch.Tensor]:
        del num_tokens
        arrays = [item.data["pixel_values"] for item in items]
        return {"pixel_values": torch.from_numpy(np.stack(arrays))} if arrays else {}


class PaddedTiles(FixedImages):
    """Square tiles, padded below and on the right as often as not."""

    def shown(self, tokens: Sequence[int]) -> list[ShownItem]:
        found = []
        for item in super().shown(tokens):
            side, draw = self._shape[-1], drawn_from([*tokens[: item.offset], 1])
            height, width = draw.integers(1, side, 2, endpoint=True) if draw.integers(2) else (side, side)
            mask = np.zeros((side, side), dtype=np.int64)
            mask[:height, :width] = 1
            pixels = np.where(mask, item.data["pixel_values"], np.float32(0))
            data = {"pixel_values": pixels, "pixel_attention_mask": mask}
            found.append(ShownItem(item.offset, item.length, data))
        return found

    def oracle_inputs(self, items: Sequence[ShownItem], num_tokens: int) -> dict[str, torch.Tensor]:
        del num_tokens
        names = ("pixel_values", "pixel_attention_mask") if items else ()
        return {name: torch.from_numpy(np.stack([item.data[name] for item in items]))[None] for name in names}


class SpacedImages(FixedImages):
    """Images whose tokens see each other in both directions, told apart by what is between them."""

    gaps = (1, 3)

    @property
    def least_step(self) -> int:
        return self._length

    def oracle_inputs(self, items: Sequence[ShownItem], num_tokens: int) -> dict[str, torch.Tensor]:
        given = super().oracle_inputs(items, num_tokens)
        if not items:
            return given
        kinds = torch.zeros((1, num_tokens), dtype=torch.int64)
        for item in items:
            kinds[0, item.offset : item.offset + item.length] = 1
        return {**given, "token_type_ids": kinds}


class PatchGrids:
    """Images and videos of any size in patches, with a grid that says how many: those of Qwen2-VL and its like."""

    def __init__(self, placeholders: Mapping[str, int], side: int, values: int, seconds: float | None = None) -> None:
        self._placeholders = placeholders
        self._side = side
        self._values = values
        self._seconds = seconds

    @property
    def least_step(self) -> int:
        return 1

    def place(self, tokens: list[int], draw: random.Random) -> list[int]:
        placed = without(tokens, *self._placeholders.values())
        start = 1
        while start + 3 < len(placed):
            kind = draw.choice(list(self._placeholders))
            length = min(draw.choice((1, 2, 4, 6, 8, 12)), len(placed) - start - 2)
            if kind == "video" and length > 1:
                # Frames never outrun rows and columns, behind which the oracle goes on in a single forward.
                length -= length % 2
            placed[start : start + length] = [self._placeholders[kind]] * length
            start += length + 1 + draw.randrange(3)
        return placed

    def shown(self, tokens: Sequence[int]) -> list[ShownItem]:
        found = []
        for kind, placeholder in self._placeholders.items():
            for offset, length in runs(tokens, placeholder):
                grid = self._grid(kind, length)
                count = int(grid.prod())
                patches = drawn_from(tokens[:offset]).standard_normal((count, self._values), dtype=np.float32)
                data = {"pixel_values" + ("_videos" if kind == "video" else ""): patches, f"{kind}_grid_thw": grid}
                if kind == "video" and self._seconds is not None:
                    data["second_per_grid_ts"] = np.array([self._seconds], dtype=np.float32)
                found.append(ShownItem(offset, length, data, kind))
        return sorted(found, key=lambda item: item.offset)

    def _grid(self, kind: str, length: int) -> np.ndarray:
        frames = 2 if kind == "video" and length % 2 == 0 and length >= 4 else 1
        blocks = length // frames
        rows = max(rows for rows in range(1, int(blocks**0.5) + 1) if blocks % rows == 0)
        return np.array([frames, rows * self._side, blocks // rows * self._side], dtype=np.int64)

    def oracle_inputs(self, items: Sequence[ShownItem], num_tokens: int) -> dict[str, torch.Tensor]:
        if not items:
            return {}
        kinds = np.zeros((1, num_tokens), dtype=np.int64)
        given: dict[str, list[np.ndarray]] = {}
        for item in items:
            kinds[0, item.offset : item.offset + item.length] = 1 + (item.modality == "video")
            for name, array in item.data.items():
                given.setdefault(name, []).append(array[None] if name.endswith("thw") else array)
        joined = {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in given.items()}
        return {**joined, "mm_token_type_ids": torch.from_numpy(kinds)}


def without(tokens: Sequence[int], *placeholders: int) -> list[int]:
    """``tokens`` with another id in the place of placeholders."""
    other = next(token for token in range(len(placeholders) + 1) if token not in placeholders)
    return [other if token in placeholders else token for token in tokens]


def runs(tokens: Sequence[int], placeholder: int) -> Iterator[tuple[int, int]]:
    """Start and length of each run of placeholders."""
    start = None
    for place, token in enumerate([*tokens, -1]):
        if token == placeholder and start is None:
            start = place
        elif token != placeholder and start is not None:
            yield start, place - start
            start = None


def drawn_from(tokens: Sequence[int]) -> np.random.Generator:
    return np.random.default_rng([len(tokens), *tokens])


def _llava(config: Any) -> MediaDrawer:
    vision = config.vision_config
    length = (vision.image_size // vision.patch_size) ** 2 + (config.vision_feature_select_strategy == "full")
    return FixedImages(config.image_token_index, length, (vision.num_channels, vision.image_size, vision.image_size))


def _qwen(config: Any) -> MediaDrawer:
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    # So that a frame is one position behind the one before it.
    per_second = getattr(vision, "tokens_per_second", None)
    seconds = None if per_second is None else 1.0 / per_second
    placeholders = {"image": config.image_token_id, "video": config.video_token_id}
    return PatchGrids(placeholders, vision.spatial_merge_size, values, seconds)


def _idefics3(config: Any) -> MediaDrawer:
    vision = config.vision_config
    length = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
    return PaddedTiles(config.image_token_id, length, (vision.num_channels, vision.image_size, vision.image_size))


def _gemma3(config: Any) -> MediaDrawer:
    vision = config.vision_config
    shape = (vision.num_channels, vision.image_size, vision.image_size)
    return SpacedImages(config.image_token_index, config.mm_tokens_per_image, shape)


_DRAWERS: Mapping[str, Callable[[Any], MediaDrawer]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "llava": _llava,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "smolvlm": _idefics3,
}
"""By model type."""


def media_drawer(config: Any) -> MediaDrawer | None:
    """That of models which see images, by their ``transformers`` configuration."""
    make = _DRAWERS.get(config.model_type)
    return None if make is None else make(config)
