"""Models with an encoder and a decoder that attends to its output: stacks, inputs, and how the runner drives them.

Legend: E tokens of the encoder, S of one input of it, T of the decoder's step, C hidden size, V vocabulary, P sampled
positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import ClassVar

import numpy as np
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model import ModelContext, StageOutput
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.request import Feature
from hardpoint_models.building import require_toolkit
from hardpoint_models.encdec_config import EncoderDecoderConfig, StackConfig
from hardpoint_models.encdec_layers import DecoderLayer, EncoderLayer, make_norm
from hardpoint_torch_runtime import get_forward_context
from hardpoint_torch_runtime.layers import EmbeddingTable, LayerToolkit, RelativeBias, VocabEmbedding

__all__ = ["TEXT_INPUTS", "EncoderDecoderModel", "EncoderStack", "TextEncoderDecoder", "require_whole_model"]

TOKEN_IDS = "token_ids"
TEXT_INPUTS = {"text": {TOKEN_IDS: "int32 [tokens]"}}
"""What a :class:`TextEncoderDecoder` declares to take: by modality, arrays and their forms."""


def _relative(stack: StackConfig, config: EncoderDecoderConfig, layers: LayerToolkit) -> RelativeBias | None:
    if config.relative is None:
        return None
    heads, facts = stack.attention.num_heads, config.relative
    return RelativeBias(facts.num_buckets, heads, facts.max_distance, layers.parallel, layers.dtype, layers.device)


def _positions(
    name: str, stack: StackConfig, config: EncoderDecoderConfig, layers: LayerToolkit
) -> EmbeddingTable | None:
    if not stack.num_positions:
        return None
    return layers.embedding_table(name, stack.num_positions + config.position_offset, config.hidden_size)


class _Stack(torch.nn.Module):
    """What both stacks have around their layers."""

    def __init__(self, name: str, config: EncoderDecoderConfig, stack: StackConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self._offset = config.position_offset
        self.positions = _positions(f"{name}.positions", stack, config, layers)
        self.embedding_norm = None if config.norms_first else make_norm(config, layers)
        self.final_norm = make_norm(config, layers) if config.norms_first else None
        self.relative_bias = _relative(stack, config, layers)

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.positions is not None:
            hidden = hidden + self.positions(positions + self._offset if self._offset else positions)
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.final_norm is None else self.final_norm(hidden)


class EncoderStack(_Stack):
    """Embedded inputs [E, C] one after another, with their ``lengths``, to [E, C]."""

    def __init__(self, config: EncoderDecoderConfig, layers: LayerToolkit) -> None:
        super().__init__("encoder", config, config.encoder, layers)
        self.layers = torch.nn.ModuleList(
            EncoderLayer(f"encoder.layers.{index}", config, config.encoder, layers)
            for index in range(config.encoder.num_layers)
        )

    def forward(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        places = [torch.arange(length, device=hidden.device) for length in lengths]
        hidden = self.enter(hidden, torch.cat(places))
        bias = None if self.relative_bias is None else self.relative_bias.both_sides
        for layer in self.layers:
            hidden = layer(hidden, lengths, bias)
        return self.leave(hidden)


class DecoderStack(_Stack):
    """Embedded tokens [T, C] and new outputs of the encoder to [T, C]."""

    def __init__(self, config: EncoderDecoderConfig, layers: LayerToolkit) -> None:
        super().__init__("decoder", config, config.decoder, layers)
        by_distance = None
        if self.relative_bias is not None and config.relative is not None:
            shape = (self.relative_bias.num_heads, config.relative.max_distance + 1)
            by_distance = torch.zeros(shape, dtype=torch.float32, device=layers.device)
        self._by_distance = by_distance
        self.layers = torch.nn.ModuleList(
            DecoderLayer(f"decoder.layers.{index}", config, config.decoder, layers, by_distance)
            for index in range(config.decoder.num_layers)
        )

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, encoded: torch.Tensor | None) -> torch.Tensor:
        if self._by_distance is not None and self.relative_bias is not None:
            # Every layer's attention reads this table, which is made of what the stack was loaded with.
            self._by_distance.copy_(self.relative_bias.by_distance())
        hidden = self.enter(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, encoded)
        return self.leave(hidden)


class EncoderDecoderModel(torch.nn.Module):
    """The whole model; pipelines of stages are refused. Families say what their encoder takes, and name weights."""

    input_kind: ClassVar[str]
    """What the encoder takes, for people."""

    def __init__(self, info: ModelInfo, config: EncoderDecoderConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self._info = info
        self.config = config
        self._device = layers.device
        self.shared: VocabEmbedding = layers.embedding("shared", config.vocab_size, config.hidden_size)
        self.encoder = EncoderStack(config, layers)
        self.decoder = DecoderStack(config, layers)
        tied_to = self.shared if config.is_tied else None
        self.lm_head = layers.lm_head("lm_head", config.vocab_size, config.hidden_size, tied_to=tied_to)
        self.logit_bias: torch.nn.Parameter | None = None
        if config.has_logit_bias:
            zeros = torch.zeros(1, config.vocab_size, dtype=layers.dtype, device=layers.device)
            self.logit_bias = torch.nn.Parameter(zeros, requires_grad=False)
        self._kv_specs = layers.kv_cache_specs()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = self.shared(token_ids)
        return embedded if self.config.embedding_scale == 1 else embedded * self.config.embedding_scale

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        """The decoder on a step. New outputs of the encoder are in the forward context."""
        if intermediates is not None:
            raise RuntimeError("a model with an encoder is one stage; it takes no intermediates")
        if embeddings is None:
            if token_ids is None:
                raise ValueError("one of token_ids and embeddings must be given")
            embeddings = self.embed(token_ids)
        return self.decoder(embeddings, positions, get_forward_context().encoder_hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden if self.config.head_scale == 1 else hidden * self.config.head_scale)
        return logits if self.logit_bias is None else logits + self.logit_bias

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._kv_specs

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for index, layer in enumerate(self.decoder.layers):
            yield f"decoder.layers.{index}", layer

    def refuse_input(self, feature: Feature) -> str | None:
        raise NotImplementedError

    def _wrong_part(self, feature: Feature, name: str) -> str | None:
        """Why ``feature`` is not one array called ``name``."""
        if set(feature.data) == {name}:
            return None
        given = ", ".join(sorted(feature.data)[:4]) or "nothing"
        return f"this model's encoder takes {self.input_kind} under {name!r}; the request brings {given[:100]}"


class TextEncoderDecoder(EncoderDecoderModel):
    """The encoder takes ids of the same vocabulary: int32 [S] under ``token_ids``."""

    input_kind = "token ids"

    def refuse_input(self, feature: Feature) -> str | None:
        wrong = self._wrong_part(feature, TOKEN_IDS)
        if wrong is not None:
            return wrong
        ids, most = feature.data[TOKEN_IDS], self.config.max_encoder_tokens
        if ids.ndim != 1 or ids.dtype != np.int32 or ids.shape[0] != feature.num_encoder_tokens:
            return (
                f"the encoder's input must be int32 [{feature.num_encoder_tokens}] as num_encoder_tokens says, not "
                f"{ids.dtype} {list(ids.shape)}"
            )
        if not 1 <= ids.shape[0] <= most:
            return f"the encoder's input has {ids.shape[0]} tokens; allowed: 1 to {most}"
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            return f"the encoder's input holds ids outside 0 to {self.config.vocab_size - 1}"
        return None

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        arrays = [feature.data[TOKEN_IDS] for feature in features]
        lengths = [len(array) for array in arrays]
        ids = torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(self._device)
        return self.encoder(self.embed(ids), lengths).split(lengths)

    def example_input(self, num_tokens: int) -> Feature:
        ids = np.arange(min(num_tokens, self.config.max_encoder_tokens), dtype=np.int32) % self.config.vocab_size
        digest = sha256(ids.tobytes()).hexdigest()
        return Feature(
            modality="text", content_hash=digest, offset=0, length=1, num_encoder_tokens=len(ids), data={TOKEN_IDS: ids}
        )


def require_whole_model(ctx: ModelContext) -> tuple[ModelInfo, LayerToolkit]:
    """As :func:`require_toolkit`. Raises ``ConfigError`` for pipelines as well."""
    info, layers = require_toolkit(ctx)
    stages = layers.config.parallel.pipeline_parallel_size
    if stages > 1:
        raise ConfigError(
            f"{info.architecture} is not divided into {stages} stages: encoder and decoder are one; set "
            "--pipeline-parallel-size 1"
        )
    return info, layers
