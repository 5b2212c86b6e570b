"""What models with an encoder and a decoder are described by, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.errors import ModelFormatError
from hardpoint_models.config_fields import ConfigFields

__all__ = ["AttentionShape", "EncoderDecoderConfig", "RelativePositions", "StackConfig", "divided"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads over all ranks. ``scale`` multiplies query-key products; ``bias``: of all projections, but for that of the
    keys where ``key_bias`` is off."""

    num_heads: int
    head_size: int
    scale: float
    bias: bool = True
    key_bias: bool = True

    @property
    def is_uniform(self) -> bool:
        """Whether queries, keys and values are alike in having a bias or none."""
        return self.key_bias or not self.bias


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """Learned biases of scores by distance: ``num_buckets`` of them, the last from ``max_distance`` on."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class StackConfig:
    """One of the two stacks. ``num_positions``: rows of its table of positions, 0 where it has none."""

    num_layers: int
    attention: AttentionShape
    intermediate_size: int
    num_positions: int = 0


@dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """Sizes are those of the whole model.

    Attributes:
        activation: by its name in configurations. is_gated: it gates another projection of the same input.
        norms_first: norms stand before each block, and one behind the last layer; else behind each block, and one
            behind the embedding.
        uses_rms_norm: norms divide by the root mean square and have no bias.
        linear_bias: of the feed-forward projections.
        position_offset: rows of the tables of positions before that of the first one.
        embedding_scale: multiplies embeddings. head_scale: multiplies what the head sees.
        is_tied: the head is the embedding. has_logit_bias: a stored bias is added to logits.
        num_mel_bins: of spectrograms that the encoder takes instead of tokens.
        max_encoder_tokens: the encoder's longest output.
    """

    hidden_size: int
    vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    activation: str
    max_encoder_tokens: int
    is_gated: bool = False
    norms_first: bool = True
    uses_rms_norm: bool = False
    norm_eps: float = 1e-5
    linear_bias: bool = True
    position_offset: int = 0
    embedding_scale: float = 1.0
    head_scale: float = 1.0
    is_tied: bool = True
    has_logit_bias: bool = False
    relative: RelativePositions | None = None
    num_mel_bins: int | None = None


def divided(fields: ConfigFields, hidden_size: int, heads_field: str, *, key_bias: bool = True) -> AttentionShape:
    """Heads that share out the hidden size. Raises ``ModelFormatError`` where they cannot."""
    num_heads = fields.integer(heads_field)
    if hidden_size % num_heads:
        raise ModelFormatError(
            f"{fields.architecture}: d_model={hidden_size} is no multiple of {heads_field}={num_heads}"
        )
    head_size = hidden_size // num_heads
    return AttentionShape(num_heads, head_size, head_size**-0.5, key_bias=key_bias)
