"""What models of recurrent layers alone read from a configuration, as one frozen record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import WeightRule
from hardpoint_models.causal import LAYER
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.hybrid_config import read_step_limits
from hardpoint_torch_runtime.layers import MambaSizes, SelectiveSizes

__all__ = ["MambaConfig", "read_mamba", "read_mamba2", "read_step_rank"]


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes are those of the whole model.

    Attributes:
        keeps_residual_exact: what layers add is summed in float32, whatever they compute in.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    norm_eps: float
    is_tied: bool
    keeps_residual_exact: bool
    mixer: SelectiveSizes | MambaSizes

    @property
    def rules(self) -> tuple[WeightRule, ...]:
        """Where checkpoints keep what."""
        return (*_COMMON_RULES, *(_SELECTIVE_RULES if isinstance(self.mixer, SelectiveSizes) else _MAMBA2_RULES))


def _stored(names: tuple[str, ...]) -> tuple[WeightRule, ...]:
    """Of what a mixer has, under the same names."""
    return tuple(WeightRule(f"backbone.layers.*.mixer.{name}", f"{LAYER}.mixer.{name}") for name in names)


_COMMON_RULES = (
    # The first checkpoints, and those that transformers saves.
    WeightRule("backbone.embedding.weight", "model.embed_tokens.weight"),
    WeightRule("backbone.embeddings.weight", "model.embed_tokens.weight"),
    WeightRule("backbone.layers.*.norm.weight", f"{LAYER}.norm.weight"),
    WeightRule("backbone.norm_f.weight", "model.norm.weight"),
    *_stored(("A_log", "D", "in_proj.*", "conv1d.*", "out_proj.*")),
)
_SELECTIVE_RULES = (
    WeightRule("backbone.layers.*.mixer.dt_proj.bias", f"{LAYER}.mixer.dt_bias"),
    *_stored(("x_proj.*", "dt_proj.*")),
)
_MAMBA2_RULES = _stored(("dt_bias", "norm.weight"))


def read_mamba(config: Mapping[str, Any], architecture: str) -> MambaConfig:
    """Mamba-1: steps, B and C selected from the convolved channels.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    hidden_size = fields.integer("hidden_size")
    try:
        mixer = SelectiveSizes(
            hidden_size=hidden_size,
            inner_size=fields.integer("intermediate_size", fields.integer("expand", 2) * hidden_size),
            state_size=fields.integer("state_size", 16),
            step_rank=read_step_rank(fields, "time_step_rank", hidden_size),
            conv_width=fields.integer("conv_kernel", 4),
            has_bias=fields.flag("use_bias", False),
            has_conv_bias=fields.flag("use_conv_bias", True),
        )
    except ValueError as error:
        raise ModelFormatError(f"{architecture}: conv_kernel cannot be: {error}") from error
    return _read(fields, mixer, is_tied=True)


def read_mamba2(config: Mapping[str, Any], architecture: str) -> MambaConfig:
    """Mamba-2: heads with one decay each, and a norm behind the gate. Raises as :func:`read_mamba`."""
    fields = ConfigFields(config, architecture)
    hidden_size = fields.integer("hidden_size")
    num_heads, head_size = fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    inner_size = fields.integer("expand", 2) * hidden_size
    if num_heads * head_size != inner_size:
        raise ModelFormatError(
            f"{architecture}: num_heads={num_heads} heads of head_dim={head_size} do not make up the {inner_size} of "
            "expand times hidden_size"
        )
    try:
        mixer = MambaSizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_size=head_size,
            num_groups=fields.integer("n_groups", 8),
            state_size=fields.integer("state_size", 128),
            conv_width=fields.integer("conv_kernel", 4),
            norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
            has_bias=fields.flag("use_bias", False),
            has_conv_bias=fields.flag("use_conv_bias", True),
            step_limits=read_step_limits(fields),
        )
    except ValueError as error:
        raise ModelFormatError(f"{architecture}: num_heads, n_groups or conv_kernel cannot be: {error}") from error
    return _read(fields, mixer, is_tied=False)


def read_step_rank(fields: ConfigFields, name: str, hidden_size: int) -> int:
    """How many numbers steps are projected from: as many as the field says, by default one in 16 of the hidden size."""
    given = fields.raw.get(name)
    return math.ceil(hidden_size / 16) if given in (None, "auto") else fields.integer(name)


def _read(fields: ConfigFields, mixer: SelectiveSizes | MambaSizes, *, is_tied: bool) -> MambaConfig:
    """``is_tied``: where the configuration does not say."""
    fields.require("hidden_act", ("silu", "swish"), "silu")
    return MambaConfig(
        hidden_size=mixer.hidden_size,
        num_layers=fields.num_layers(),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        is_tied=fields.flag("tie_word_embeddings", is_tied),
        keeps_residual_exact=fields.flag("residual_in_fp32", True),
        mixer=mixer,
    )
