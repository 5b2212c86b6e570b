"""Vision transformers: images cut into patches, each with a learned position, to hidden states of all patches.

Legend: N images, H and W pixels, h and w patches of a column and of a row, P = h * w patches, C hidden size.
Positions of images of any shape after Dehghani et al. 2023 (Patch n' Pack), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from hardpoint.interfaces.model import WeightRule
from hardpoint_models.encdec_layers import SelfProjections
from hardpoint_models.siglip_config import VisionConfig
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["VisionTower", "fractional_positions", "vision_rules"]

JUST_INSIDE = 1.0 - 1e-6


def fractional_positions(patches: torch.Tensor, grid: int) -> torch.Tensor:
    """int64 [N, P] places in a table of ``grid`` rows and columns, for the real ``patches``, bool [N, h, w].

    An image's height and width are those of its first column and row; padding gets the first place. Rounding decides
    at the edges of places, where patches of whole images lie, so the products and bounds are those of the models'
    training code in float32, and the bounds are made on the host: devices round a range in ways of their own.
    """
    device = patches.device
    bounds = torch.arange(1 / grid, 1.0, 1 / grid).to(device)
    places = []
    for counts, longest in ((patches[:, :, 0].sum(1), patches.shape[1]), (patches[:, 0, :].sum(1), patches.shape[2])):
        shares = torch.arange(longest, dtype=torch.float32, device=device)[None, :] * (1.0 / counts)[:, None]
        places.append(torch.bucketize(shares.clamp(max=JUST_INSIDE), bounds, right=True))
    rows, columns = places
    return (rows[:, :, None] * grid + columns[:, None, :]).masked_fill(~patches, 0).flatten(1)


class PatchProjection(torch.nn.Module):
    """[N, channels, H, W] to [N, P, C], patches row by row; pixels beyond the last whole patch are not looked at.

    Every rank holds all of it.
    """

    def __init__(self, config: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__()
        shape = (config.hidden_size, config.num_channels, config.patch_size, config.patch_size)
        weight = torch.empty(shape, dtype=layers.dtype, device=layers.device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias: torch.nn.Parameter | None = None
        if config.patch_bias:
            self.bias = torch.nn.Parameter(torch.empty_like(weight[:, 0, 0, 0]), requires_grad=False)
        self._stride = config.patch_size

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return F.conv2d(pixels, self.weight, self.bias, stride=self._stride).flatten(2).transpose(1, 2)


class VisionAttention(SelfProjections):
    """[N, P, C] to [N, P, C]; patches see the real ones of their image, bool [N, 1, 1, P], or all of them."""

    def __init__(self, name: str, config: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__(name, config.hidden_size, config.attention, layers)
        self._scale = config.attention.scale
        self._head_size = config.attention.head_size

    def forward(self, hidden: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        parts = self.project(hidden)
        query, key, value = (part.unflatten(-1, (-1, self._head_size)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=real, scale=self._scale)
        return self.output(attended.transpose(1, 2).flatten(2))


class VisionFeedForward(torch.nn.Module):
    """[..., C] to [..., C]."""

    def __init__(self, name: str, config: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.up = layers.column_linear(f"{name}.up", config.hidden_size, config.intermediate_size, bias=True)
        self.activation = layers.activation(config.activation)
        self.down = layers.row_linear(f"{name}.down", config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(hidden)))


class VisionLayer(torch.nn.Module):
    """[N, P, C] to [N, P, C], a norm before each block."""

    def __init__(self, name: str, config: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.attention_norm = layers.layer_norm(config.hidden_size, config.norm_eps)
        self.attention = VisionAttention(f"{name}.attention", config, layers)
        self.feed_forward_norm = layers.layer_norm(config.hidden_size, config.norm_eps)
        self.feed_forward = VisionFeedForward(f"{name}.feed_forward", config, layers)

    def forward(self, hidden: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), real)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class VisionTower(torch.nn.Module):
    """Pixels [N, channels, H, W] to hidden states [N, P, C], a class token's before them where there is one.

    Heads and feed-forward blocks are divided among ranks.
    """

    def __init__(self, name: str, config: VisionConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.config = config
        self.patches = PatchProjection(config, layers)
        self.positions = layers.embedding_table(f"{name}.positions", config.num_positions, config.hidden_size)
        self.class_token: torch.nn.Parameter | None = None
        if config.has_class_token:
            token = torch.empty(config.hidden_size, dtype=layers.dtype, device=layers.device)
            self.class_token = torch.nn.Parameter(token, requires_grad=False)
        size, eps = config.hidden_size, config.norm_eps
        self.input_norm = layers.layer_norm(size, eps) if config.has_input_norm else None
        self.layers = torch.nn.ModuleList(
            VisionLayer(f"{name}.layers.{index}", config, layers) for index in range(config.num_layers)
        )
        self.output_norm = layers.layer_norm(size, eps) if config.has_output_norm else None

    def forward(self, pixels: torch.Tensor, patches: torch.Tensor | None = None) -> torch.Tensor:
        """``patches``: bool [N, h, w], those that are no padding; None: all are real, and no mask is needed."""
        hidden, real = self._enter(pixels, patches), None
        if patches is not None:
            real = patches.flatten(1)[:, None, None, :]
            if self.class_token is not None:
                real = F.pad(real, (1, 0), value=True)
        for layer in self.layers:
            hidden = layer(hidden, real)
        return hidden if self.output_norm is None else self.output_norm(hidden)

    def states(self, pixels: torch.Tensor, depths: Sequence[int]) -> list[torch.Tensor]:
        """Of whole images, hidden states behind so many layers, for each of ``depths``, without the norm at the end."""
        hidden = self._enter(pixels, None)
        found = {0: hidden}
        for depth, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, None)
            if depth in depths:
                found[depth] = hidden
        return [found[depth] for depth in depths]

    def _enter(self, pixels: torch.Tensor, patches: torch.Tensor | None) -> torch.Tensor:
        """What the first layer sees."""
        hidden = self._embed(pixels, patches)
        return hidden if self.input_norm is None else self.input_norm(hidden)

    def _embed(self, pixels: torch.Tensor, patches: torch.Tensor | None) -> torch.Tensor:
        hidden = self.patches(pixels)
        if self.class_token is not None:
            hidden = torch.cat((self.class_token.expand(len(hidden), 1, -1), hidden), dim=1)
        if not self.config.fractional_positions:
            return hidden + self.positions.weight
        if patches is None:
            height, width = (side // self.config.patch_size for side in pixels.shape[2:])
            patches = torch.ones((1, height, width), dtype=torch.bool, device=pixels.device)
        return hidden + self.positions(fractional_positions(patches, self.config.grid))


def vision_rules(stored: str, held: str, config: VisionConfig, num_stored: int | None = None) -> Iterator[WeightRule]:
    """Names that SigLIP and CLIP give to the parts of a tower stored under ``stored``, here ``held``.

    ``num_stored``: layers in the files, where the tower has only the first ones of these.
    """
    for index in range(config.num_layers, num_stored or config.num_layers):
        yield WeightRule(f"{stored}.encoder.layers.{index}.*.*", None)
        yield WeightRule(f"{stored}.encoder.layers.{index}.*.*.*", None)
    for letter in "qkv":
        rest = f"self_attn.{letter}_proj.*"
        yield WeightRule(f"{stored}.encoder.layers.*.{rest}", f"{held}.layers.*.attention.qkv.*", letter)
    for theirs, ours in (
        ("self_attn.out_proj", "attention.output"),
        ("layer_norm1", "attention_norm"),
        ("mlp.fc1", "feed_forward.up"),
        ("mlp.fc2", "feed_forward.down"),
        ("layer_norm2", "feed_forward_norm"),
    ):
        yield WeightRule(f"{stored}.encoder.layers.*.{theirs}.*", f"{held}.layers.*.{ours}.*")
    yield WeightRule(f"{stored}.embeddings.patch_embedding.*", f"{held}.patches.*")
    yield WeightRule(f"{stored}.embeddings.position_embedding.weight", f"{held}.positions.weight")
    # Old checkpoints carry the numbers of positions.
    yield WeightRule(f"{stored}.embeddings.position_ids", None)
    yield WeightRule(f"{stored}.embeddings.class_embedding", f"{held}.class_token")
    # Misspelled in the files.
    yield WeightRule(f"{stored}.pre_layrnorm.*", f"{held}.input_norm.*")
    yield WeightRule(f"{stored}.post_layernorm.*", f"{held}.output_norm.*" if config.has_output_norm else None)
