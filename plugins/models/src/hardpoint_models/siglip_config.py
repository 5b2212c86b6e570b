"""What vision transformers are described by, and how configurations of SigLIP and its relatives are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields, shown
from hardpoint_models.encdec_config import AttentionShape
from hardpoint_torch_runtime.layers import ACTIVATIONS

__all__ = ["VisionConfig", "read_siglip", "section"]

MAX_PATCHES = 1 << 16
"""Of one image: their positions are a table, which is made before any weight is looked for."""
MAX_CHANNELS = 64


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A vision transformer over all ranks.

    Attributes:
        num_layers: those that are computed; a model that takes earlier hidden states has fewer than its files.
        image_size: pixels of a side of the squares that positions were learned for.
        patch_size: pixels of a patch's side.
        activation: by its name in configurations.
        patch_bias: patches are projected with a bias.
        has_class_token: a learned token comes before the patches, at the first position.
        has_input_norm, has_output_norm: a norm before the layers and one behind them.
        fractional_positions: a patch has the position that lies where it does in its image, however many patches that
            has, instead of the one of its number.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float
    patch_bias: bool = True
    has_class_token: bool = False
    has_input_norm: bool = False
    has_output_norm: bool = True
    fractional_positions: bool = False

    @property
    def grid(self) -> int:
        """Patches of a side of a whole image."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        return self.grid**2 + self.has_class_token

    @property
    def attention(self) -> AttentionShape:
        head_size = self.hidden_size // self.num_heads
        return AttentionShape(self.num_heads, head_size, head_size**-0.5)


def section(config: Mapping[str, Any], name: str, architecture: str) -> Mapping[str, Any]:
    """The part of a configuration that is about one part of the model.

    Raises ``ModelFormatError`` where it is absent or no object.
    """
    part = config.get(name)
    if not isinstance(part, Mapping):
        raise ModelFormatError(f"{architecture}: config field {name!r} is {shown(part)}; an object is needed")
    return part


def read_siglip(
    config: Mapping[str, Any],
    architecture: str,
    *,
    model_types: tuple[str, ...],
    defaults: Mapping[str, Any],
    fractional_positions: bool = False,
) -> VisionConfig:
    """``defaults`` hold where files leave fields out, as those of released models do.

    Raises ``ModelFormatError`` for malformed fields and sizes that do not fit each other, ``UnsupportedModelError`` for
    features that are not computed here.
    """
    fields = ConfigFields({**defaults, **ConfigFields(config, architecture).present()}, f"{architecture} (vision)")
    fields.require("model_type", model_types, model_types[0])
    fields.require("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    for name in ("image_size", "patch_size"):
        if isinstance(fields.raw.get(name), list | tuple):
            raise UnsupportedModelError(
                f"{fields.architecture}: config field {name!r} is {shown(fields.raw[name])}; supported: squares, given "
                "as one number"
            )
    read = VisionConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=fields.integer("num_attention_heads"),
        num_channels=fields.integer("num_channels", most=MAX_CHANNELS),
        image_size=fields.integer("image_size"),
        patch_size=fields.integer("patch_size"),
        activation=fields.raw.get("hidden_act") or "gelu_pytorch_tanh",
        norm_eps=fields.epsilon("layer_norm_eps", 1e-6),
        fractional_positions=fractional_positions,
    )
    if read.hidden_size % read.num_heads:
        raise ModelFormatError(
            f"{fields.architecture}: hidden_size={read.hidden_size} is no multiple of "
            f"num_attention_heads={read.num_heads}"
        )
    if read.patch_size > read.image_size:
        raise ModelFormatError(
            f"{fields.architecture}: patch_size={read.patch_size} is larger than image_size={read.image_size}"
        )
    if read.grid**2 > MAX_PATCHES:
        raise ModelFormatError(
            f"{fields.architecture}: image_size={read.image_size} and patch_size={read.patch_size}; an image may have "
            f"{MAX_PATCHES} patches at most"
        )
    return read
