"""Blocks of encoders and of decoders that attend to them.

Legend: E tokens of the encoder, T of the decoder's step, C hidden size; H heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint_models.encdec_config import AttentionShape, EncoderDecoderConfig, StackConfig
from hardpoint_torch_runtime.layers import LayerToolkit, ScoreBias, dense_attention

__all__ = ["DecoderLayer", "EncoderLayer", "SelfProjections", "make_norm"]


def make_norm(config: EncoderDecoderConfig, layers: LayerToolkit) -> torch.nn.Module:
    """[..., C] to [..., C]."""
    if config.uses_rms_norm:
        return layers.rms_norm(config.hidden_size, config.norm_eps)
    return layers.layer_norm(config.hidden_size, config.norm_eps)


class SelfProjections(torch.nn.Module):
    """Queries, keys and values of one input, and the projection behind attention.

    One product makes all three, or two where keys alone have no bias.
    """

    def __init__(self, name: str, size: int, shape: AttentionShape, layers: LayerToolkit) -> None:
        super().__init__()
        heads, inner = shape.num_heads, shape.num_heads * shape.head_size
        self.num_heads = layers.parallel.divide(heads, f"{name}: number of heads")
        if shape.is_uniform:
            self.qkv = layers.qkv_linear(
                f"{name}.qkv", size, num_heads=heads, num_kv_heads=heads, head_size=shape.head_size, bias=shape.bias
            )
        else:
            self.query_value = layers.merged_column_linear(
                f"{name}.query_value", size, {"q": inner, "v": inner}, bias=True
            )
            self.key = layers.column_linear(f"{name}.key", size, inner)
        self.output = layers.row_linear(f"{name}.output", inner, size, bias=shape.bias)
        self._is_uniform = shape.is_uniform

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [T, H * D]."""
        if self._is_uniform:
            query, key, value = self.qkv(hidden).chunk(3, dim=-1)
            return query, key, value
        query, value = self.query_value(hidden).chunk(2, dim=-1)
        return query, self.key(hidden), value


class EncoderAttention(SelfProjections):
    """[E, C] to [E, C]; tokens see all of their own sequence."""

    def __init__(self, name: str, size: int, shape: AttentionShape, layers: LayerToolkit) -> None:
        super().__init__(name, size, shape, layers)
        self._shape = shape

    def forward(self, hidden: torch.Tensor, lengths: Sequence[int], bias: ScoreBias | None) -> torch.Tensor:
        heads = (part.unflatten(-1, (-1, self._shape.head_size)) for part in self.project(hidden))
        query, key, value = heads
        return self.output(dense_attention(query, key, value, lengths, self._shape.scale, bias))


class DecoderAttention(SelfProjections):
    """[T, C] to [T, C]. ``relative_bias``: float32 [H, N] by distance, see ``AttentionLayerParams``."""

    def __init__(
        self, name: str, size: int, shape: AttentionShape, layers: LayerToolkit, relative_bias: torch.Tensor | None
    ) -> None:
        super().__init__(name, size, shape, layers)
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_size=shape.head_size,
            scale=shape.scale,
            relative_bias=relative_bias,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output(self.attn(*self.project(hidden)))


class CrossAttention(torch.nn.Module):
    """[T, C] and new outputs of the encoder [E, C] to [T, C]; None stands for no new ones."""

    def __init__(
        self, name: str, size: int, shape: AttentionShape, layers: LayerToolkit, max_encoder_tokens: int
    ) -> None:
        super().__init__()
        inner = shape.num_heads * shape.head_size
        heads = layers.parallel.divide(shape.num_heads, f"{name}: number of heads")
        self.query = layers.column_linear(f"{name}.query", size, inner, bias=shape.bias)
        if shape.is_uniform:
            self.key_value = layers.merged_column_linear(
                f"{name}.key_value", size, {"k": inner, "v": inner}, bias=shape.bias
            )
        else:
            self.key = layers.column_linear(f"{name}.key", size, inner)
            self.value = layers.column_linear(f"{name}.value", size, inner, bias=True)
        self._is_uniform = shape.is_uniform
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=heads,
            num_kv_heads=heads,
            head_size=shape.head_size,
            scale=shape.scale,
            kind=AttentionKind.ENCODER_DECODER,
            max_encoder_tokens=max_encoder_tokens,
        )
        self.output = layers.row_linear(f"{name}.output", inner, size, bias=shape.bias)

    def forward(self, hidden: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        query = self.query(hidden)
        if encoded is None:
            key = value = query[:0]
        elif self._is_uniform:
            key, value = self.key_value(encoded).chunk(2, dim=-1)
        else:
            key, value = self.key(encoded), self.value(encoded)
        return self.output(self.attn(query, key, value))


class FeedForward(torch.nn.Module):
    """[..., C] to [..., C]."""

    def __init__(self, name: str, config: EncoderDecoderConfig, inner: int, layers: LayerToolkit) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.linear_bias
        parts = {"gate": inner, "up": inner} if config.is_gated else {"up": inner}
        self.up = layers.merged_column_linear(f"{name}.up", size, parts, bias=bias)
        self.down = layers.row_linear(f"{name}.down", inner, size, bias=bias)
        self.activation = layers.activation(config.activation)
        self._is_gated = config.is_gated

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.up(hidden)
        if not self._is_gated:
            return self.down(self.activation(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class _ResidualLayer(torch.nn.Module):
    """Blocks that are added to what they read, each with a norm before or behind it."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self._norms_first = config.norms_first

    def add(
        self, hidden: torch.Tensor, norm: torch.nn.Module, block: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if self._norms_first:
            return hidden + block(norm(hidden))
        return norm(hidden + block(hidden))


class EncoderLayer(_ResidualLayer):
    """[E, C] to [E, C], of sequences with ``lengths``; ``bias`` is that of attention's scores."""

    def __init__(self, name: str, config: EncoderDecoderConfig, stack: StackConfig, layers: LayerToolkit) -> None:
        super().__init__(config)
        self.attention = EncoderAttention(f"{name}.attention", config.hidden_size, stack.attention, layers)
        self.attention_norm = make_norm(config, layers)
        self.feed_forward = FeedForward(f"{name}.feed_forward", config, stack.intermediate_size, layers)
        self.feed_forward_norm = make_norm(config, layers)

    def forward(self, hidden: torch.Tensor, lengths: Sequence[int], bias: ScoreBias | None) -> torch.Tensor:
        hidden = self.add(hidden, self.attention_norm, lambda states: self.attention(states, lengths, bias))
        return self.add(hidden, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(_ResidualLayer):
    """[T, C] and new outputs of the encoder to [T, C]."""

    def __init__(
        self,
        name: str,
        config: EncoderDecoderConfig,
        stack: StackConfig,
        layers: LayerToolkit,
        relative_bias: torch.Tensor | None,
    ) -> None:
        super().__init__(config)
        size, shape = config.hidden_size, stack.attention
        self.attention = DecoderAttention(f"{name}.attention", size, shape, layers, relative_bias)
        self.attention_norm = make_norm(config, layers)
        self.cross_attention = CrossAttention(f"{name}.cross_attention", size, shape, layers, config.max_encoder_tokens)
        self.cross_attention_norm = make_norm(config, layers)
        self.feed_forward = FeedForward(f"{name}.feed_forward", config, stack.intermediate_size, layers)
        self.feed_forward_norm = make_norm(config, layers)

    def forward(self, hidden: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        hidden = self.add(hidden, self.attention_norm, self.attention)
        hidden = self.add(hidden, self.cross_attention_norm, lambda states: self.cross_attention(states, encoded))
        return self.add(hidden, self.feed_forward_norm, self.feed_forward)
