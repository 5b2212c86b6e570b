"""Tiny randomly initialized Hugging Face models, saved to a folder, as oracles of our own."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo

__all__ = [
    "ENCODER_TOKENS",
    "TINY_SIZES",
    "ModelCheckpoint",
    "TinyModel",
    "forget_foreign_tokens",
    "make_tiny_model",
    "model_info",
    "tiny_fields",
]

TINY_SIZES: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
}
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Where configurations say how long sequences may be. Those of models that only recur say nothing."""

PLACEHOLDER_FIELDS = ("image_token_id", "image_token_index", "video_token_id")
"""Where configurations name the tokens that stand for media."""

ENCODER_TOKENS = 11
"""Length of the inputs that encoders are compared with where nobody gives any."""


class ModelCheckpoint(Protocol):
    """Weights with somebody who knows what they compute: Hugging Face, or an author's own few lines."""

    @property
    def info(self) -> ModelInfo: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the checkpoint stores, by name."""

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary] of one sequence; of a model that does not generate its last hidden states
        [tokens, hidden size] instead."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """``oracle`` is the Hugging Face model in float32; ``folder`` holds config.json and model.safetensors."""

    oracle: Any
    folder: Path
    info: ModelInfo

    def tensors(self) -> dict[str, torch.Tensor]:
        """Stored tensors by name, read from the file (tied ones appear once)."""
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    @property
    def judges(self) -> bool:
        """Whether what it makes of a text is scores: a model with labels, of texts or of their tokens."""
        return self.info.architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary] of one sequence; of a model that does not generate its last hidden states
        [tokens, hidden size] instead. Encoders beside a decoder get :func:`example_inputs`."""
        if self.oracle.config.is_encoder_decoder:
            given = {**example_inputs(self.oracle.config), "decoder_input_ids": torch.tensor([token_ids])}
            return self.oracle(**given).logits[0].float()
        if "generate" not in self.info.tasks:
            return self.oracle.base_model(torch.tensor([token_ids])).last_hidden_state[0].float()
        return self.oracle(torch.tensor([token_ids])).logits[0].float()

    @torch.inference_mode()
    def scores(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [labels] of one sequence, or [tokens, labels]; of models that judge.

        Where a separator is known, tokens behind the first one are of the second type, as BERT's tokenizer has it.
        """
        ids = torch.tensor([token_ids])
        separator, types = self.info.config.get("sep_token_id"), {}
        if self.info.config.get("model_type") == "bert" and separator is not None:
            is_separator = (ids == separator).long()
            types["token_type_ids"] = (is_separator.cumsum(-1) > is_separator).long()
        return self.oracle(ids, **types).logits[0].float()

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """The ``count`` most likely continuations, one at a time; end-of-sequence is a token like any other."""
        tokens = list(token_ids)
        cache = None
        pending = tokens
        for _ in range(count):
            result = self.oracle(torch.tensor([pending]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            pending = [int(result.logits[0, -1].argmax())]
            tokens += pending
        return tokens[len(token_ids) :]


def example_inputs(config: Any) -> dict[str, torch.Tensor]:
    """What Hugging Face models with an encoder and a decoder take for the encoder: the same as ``example_input``."""
    if hasattr(config, "num_mel_bins"):
        return {"input_features": torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)}
    return {"input_ids": torch.arange(ENCODER_TOKENS)[None] % config.vocab_size}


def make_tiny_model(
    architecture: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> TinyModel:
    """Create, save and describe a tiny model. ``config`` overrides ``TINY_SIZES``.

    Weights are drawn wide enough that attention is far from uniform; biases and norms are random too, so that a
    forgotten one shows.
    """
    model_class = getattr(transformers, architecture)
    hf_config = model_class.config_class(**tiny_fields(config))
    hf_config.architectures = [architecture]
    forget_foreign_tokens(hf_config)
    torch.manual_seed(seed)
    oracle = model_class(hf_config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in _stored_values(oracle):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(1 + noise * 0.2)
            parameter.copy_(parameter.to(dtype).float())
        _never_say_placeholders(oracle)
    # A copy is narrowed: the oracle's own tables (rotary frequencies) must keep float32.
    copy.deepcopy(oracle).to(dtype).save_pretrained(folder)
    tasks = ("generate",) if model_class.can_generate() else ("embed",)
    return TinyModel(oracle, folder, model_info(folder, architecture, tasks))


def tiny_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a tiny model; where it has a language model among others, the sizes are that one's."""
    text = config.get("text_config")
    return {**TINY_SIZES, **config} if text is None else {**config, "text_config": {**TINY_SIZES, **text}}


def _never_say_placeholders(oracle: Any) -> None:
    """No answer holds the placeholder of an image, which would ask for one more."""
    tokens = {getattr(oracle.config, name, None) for name in PLACEHOLDER_FIELDS}
    for token in tokens - {None}:
        oracle.get_output_embeddings().weight[token] = 0.0


def forget_foreign_tokens(hf_config: Any) -> None:
    """Some families number their special tokens by the vocabulary that they were published with."""
    text = hf_config.get_text_config()
    for config in (hf_config, text):
        for role in ("pad", "bos", "eos", "cls", "sep"):
            token = getattr(config, f"{role}_token_id", None)
            if isinstance(token, int) and token >= text.vocab_size:
                setattr(config, f"{role}_token_id", None)


def _stored_values(oracle: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers that are stored as well (corrections of routers), tied ones once."""
    yield from oracle.named_parameters()
    stored = oracle.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in oracle.named_buffers() if name in stored)


def model_info(folder: Path, architecture: str, tasks: tuple[str, ...] = ("generate",)) -> ModelInfo:
    """What a loader would say about a saved folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    files = tuple(sorted(path.name for path in folder.iterdir()))
    return ModelInfo(
        artifact=ModelArtifact(name=folder.name, root=str(folder), files=files, source="local"),
        architecture=architecture,
        config=config,
        max_position=next(filter(None, map(text.get, POSITION_FIELDS)), TINY_SIZES["max_position_embeddings"]),
        vocab_size=text["vocab_size"],
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        loader="safetensors",
        tasks=tasks,
    )
