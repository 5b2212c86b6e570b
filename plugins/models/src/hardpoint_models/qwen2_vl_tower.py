"""The vision towers of Qwen2-VL and Qwen2.5-VL: images of any size in patches, rotated along two axes.

Patches come in the order in which they are merged: blocks of ``merge_size`` by ``merge_size`` are next to each other.
Every frame is a sequence of its own; in some layers of Qwen2.5-VL every window of a frame is.

Legend: E patches of all items, D width, G blocks of them (E = G * merge_size ** 2), H heads of this rank, C hidden size
of the language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hardpoint.interfaces.model import WeightRule
from hardpoint_torch_runtime.layers import LayerToolkit, dense_attention

__all__ = ["Grid", "QwenTower", "QwenTowerConfig", "qwen_tower_rules"]

NORM_EPS = 1e-6


class Grid(NamedTuple):
    """Patches of an item: frames, rows and columns; rows and columns are multiples of the size of blocks."""

    frames: int
    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.frames * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class QwenTowerConfig:
    """Attributes:
    output_size: of the embeddings, the hidden size of the language model.
    is_gated: feed-forward blocks gate one projection by another, and norms divide by the root mean square (2.5).
    window: sides of a window in blocks, 0 where all layers see whole frames.
    whole_layers: numbers of those that do though there are windows.
    """

    width: int
    depth: int
    num_heads: int
    intermediate_size: int
    output_size: int
    activation: str
    num_channels: int
    patch_size: int
    frames_per_patch: int
    merge_size: int
    is_gated: bool = False
    window: int = 0
    whole_layers: frozenset[int] = frozenset()

    @property
    def head_size(self) -> int:
        return self.width // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values of one patch."""
        return self.num_channels * self.frames_per_patch * self.patch_size**2

    @property
    def block(self) -> int:
        """Patches that make one embedding."""
        return self.merge_size**2


class _PatchProjection(torch.nn.Module):
    """[E, values of a patch] to [E, D]. Every rank holds all of it."""

    def __init__(self, config: QwenTowerConfig, layers: LayerToolkit) -> None:
        super().__init__()
        kernel = (config.frames_per_patch, config.patch_size, config.patch_size)
        weight = torch.empty(config.width, config.num_channels, *kernel, dtype=layers.dtype, device=layers.device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches, self.weight.flatten(1))


def _norm(config: QwenTowerConfig, layers: LayerToolkit) -> torch.nn.Module:
    if config.is_gated:
        return layers.rms_norm(config.width, NORM_EPS)
    return layers.layer_norm(config.width, NORM_EPS)


class _FeedForward(torch.nn.Module):
    """[E, D] to [E, D]."""

    def __init__(self, name: str, config: QwenTowerConfig, layers: LayerToolkit) -> None:
        super().__init__()
        size = config.intermediate_size
        self.activation: torch.nn.Module
        if config.is_gated:
            parts = {"gate": size, "up": size}
            self.up: torch.nn.Module = layers.merged_column_linear(f"{name}.up", config.width, parts, bias=True)
            self.activation = layers.silu_and_mul()
        else:
            self.up = layers.column_linear(f"{name}.up", config.width, size, bias=True)
            self.activation = layers.activation(config.activation)
        self.down = layers.row_linear(f"{name}.down", size, config.width, bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(hidden)))


class _Layer(torch.nn.Module):
    """[E, D] to [E, D]; patches see those of their own sequence, whose ``lengths`` sum to E."""

    def __init__(self, name: str, config: QwenTowerConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self._head_size = config.head_size
        self.attention_norm = _norm(config, layers)
        self.qkv = layers.qkv_linear(
            f"{name}.qkv",
            config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_size=config.head_size,
            bias=True,
        )
        self.output = layers.row_linear(f"{name}.output", config.width, config.width, bias=True)
        self.feed_forward_norm = _norm(config, layers)
        self.feed_forward = _FeedForward(f"{name}.feed_forward", config, layers)

    def forward(
        self, hidden: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], lengths: list[int]
    ) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self._head_size)) for part in parts)
        attended = dense_attention(_turn(query, turns), _turn(key, turns), value, lengths, self._head_size**-0.5)
        hidden = hidden + self.output(attended)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


def _turn(heads: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[E, H, head size] by the angles whose cosines and sines [E, 1, head size / 2] are given, in float32."""
    cos, sin = turns
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class QwenTower(torch.nn.Module):
    """Patches [E, values] of items with ``grids`` to embeddings [G, C]."""

    def __init__(self, name: str, config: QwenTowerConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.config = config
        self.patches = _PatchProjection(config, layers)
        self.layers = torch.nn.ModuleList(
            _Layer(f"{name}.layers.{index}", config, layers) for index in range(config.depth)
        )
        merged = config.width * config.block
        self.merger_norm = _norm(config, layers)
        self.merger_in = layers.column_linear(f"{name}.merger_in", merged, merged, bias=True)
        self.merger_activation = layers.activation("gelu")
        self.merger_out = layers.row_linear(f"{name}.merger_out", merged, config.output_size, bias=True)
        pairs = config.head_size // 4
        exponents = torch.arange(pairs, dtype=torch.float32, device=layers.device) / pairs
        self._frequencies = 1.0 / 10000.0**exponents

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        config = self.config
        hidden, turns = self.patches(patches), self._turns(grids)
        frames = [grid.rows * grid.columns for grid in grids for _ in range(grid.frames)]
        windows, order = frames, None
        if config.window:
            order, windows = _windows(grids, config)
            order = order.to(hidden.device)
            hidden = self._reordered(hidden, order)
            turns = (self._reordered(turns[0], order), self._reordered(turns[1], order))
        for index, layer in enumerate(self.layers):
            is_whole = not config.window or index in config.whole_layers
            hidden = layer(hidden, turns, frames if is_whole else windows)
        merged = self.merger_norm(hidden).view(-1, config.width * config.block)
        merged = self.merger_out(self.merger_activation(self.merger_in(merged)))
        return merged if order is None else merged[order.argsort()]

    def _reordered(self, states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """[E, ...] with its blocks in ``order`` int64 [G]."""
        return states.unflatten(0, (-1, self.config.block))[order].flatten(0, 1)

    def _turns(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [E, 1, head size / 2]: rows turn one half of the pairs, columns the other."""
        places = torch.cat([_places(grid, self.config.merge_size) for grid in grids]).to(self._frequencies.device)
        angles = (places[:, :, None].float() * self._frequencies).flatten(1).unsqueeze(1)
        return angles.cos(), angles.sin()


def _places(grid: Grid, merge_size: int) -> torch.Tensor:
    """Row and column of each patch, int64 [patches, 2], block by block."""
    blocks = (grid.rows // merge_size, merge_size, grid.columns // merge_size, merge_size)
    both = torch.meshgrid(torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
    in_order = [one.reshape(blocks).transpose(1, 2).flatten() for one in both]
    return torch.stack(in_order, dim=-1).repeat(grid.frames, 1)


def _windows(grids: Sequence[Grid], config: QwenTowerConfig) -> tuple[torch.Tensor, list[int]]:
    """Blocks window by window, int64 [G], and how many patches each window has; those at the rims are smaller."""
    order: list[torch.Tensor] = []
    lengths: list[int] = []
    start, side = 0, config.window
    for grid in grids:
        rows, columns = grid.rows // config.merge_size, grid.columns // config.merge_size
        for _ in range(grid.frames):
            numbers = torch.arange(start, start + rows * columns).view(rows, columns)
            for row in range(0, rows, side):
                for column in range(0, columns, side):
                    order.append(numbers[row : row + side, column : column + side].flatten())
                    lengths.append(len(order[-1]) * config.block)
            start += rows * columns
    return torch.cat(order), lengths


def qwen_tower_rules(prefixes: Sequence[str], target: str, *, is_gated: bool) -> list[WeightRule]:
    """Where checkpoints keep a tower: under one of ``prefixes``. ``target``: the tower's own name and a dot."""
    rules = []
    up = {"gate_proj": "gate", "up_proj": "up"} if is_gated else {"fc1": None}
    down = "down_proj" if is_gated else "fc2"
    for prefix in prefixes:
        layer, own = f"{prefix}blocks.*", f"{target}layers.*"
        rules += [
            WeightRule(f"{prefix}patch_embed.proj.weight", f"{target}patches.weight"),
            WeightRule(f"{layer}.norm1.*", f"{own}.attention_norm.*"),
            WeightRule(f"{layer}.norm2.*", f"{own}.feed_forward_norm.*"),
            WeightRule(f"{layer}.attn.qkv.*", f"{own}.qkv.*"),
            WeightRule(f"{layer}.attn.proj.*", f"{own}.output.*"),
            *(WeightRule(f"{layer}.mlp.{stored}.*", f"{own}.feed_forward.up.*", part) for stored, part in up.items()),
            WeightRule(f"{layer}.mlp.{down}.*", f"{own}.feed_forward.down.*"),
            WeightRule(f"{prefix}merger.ln_q.*", f"{target}merger_norm.*"),
            WeightRule(f"{prefix}merger.mlp.0.*", f"{target}merger_in.*"),
            WeightRule(f"{prefix}merger.mlp.2.*", f"{target}merger_out.*"),
        ]
    return rules
