"""What a configuration of a model with encoder and decoder says in words of its own: sizes, and how answers begin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hardpoint.errors import ModelFormatError

__all__ = ["DECODER_PROMPT", "complete_sizes", "decoder_prompt", "is_encoder_decoder"]

DECODER_PROMPT = "decoder_prompt_token_ids"
"""Generation default: ids that the decoder is given where a prompt is the encoder's."""
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model",),
    "num_attention_heads": ("decoder_attention_heads", "num_heads"),
    "head_dim": ("d_kv",),
}
_TRAINED_LENGTH = 512
"""Of T5, whose newer configurations leave it out: its positions are relative, and have no table."""


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    return config.get("is_encoder_decoder") is True


def complete_sizes(config: dict[str, Any]) -> None:
    """Say under the usual names what decoders alone have in common; names that are there stay."""
    for name, others in _SPELLINGS.items():
        found = next((config[other] for other in others if config.get(other) is not None), None)
        if config.get(name) is None and found is not None:
            config[name] = found
    lengths = (config.get("max_position_embeddings"), config.get("n_positions"))
    if config.get("model_type") == "t5" and lengths == (None, None):
        config["max_position_embeddings"] = _TRAINED_LENGTH


def decoder_prompt(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int, path: str) -> list[int]:
    """The start token and what is forced to follow it, from the generation config first.

    Without a start token it is that of all texts, or padding. Raises ``ModelFormatError`` for what is no token.
    """

    def given(*names: str) -> Any:
        return next((s[name] for name in names for s in (generation, config) if s.get(name) is not None), None)

    start = given("decoder_start_token_id", "bos_token_id", "pad_token_id")
    ids = [start]
    forced = given("forced_decoder_ids") or []
    if not isinstance(forced, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in forced):
        raise ModelFormatError(
            f"{path}: 'forced_decoder_ids' is {json.dumps(forced)[:80]}, but must be a list of pairs of place and token"
        )
    for place, token in forced:
        if place != len(ids) or token is None:
            # From here on the model chooses: the language of a recording, say.
            break
        ids.append(token)
    first = given("forced_bos_token_id")
    if len(ids) == 1 and first is not None:
        ids.append(first)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ModelFormatError(
                f"{path}: the decoder's first tokens are {ids}, but each must be an id below {vocab_size}; set "
                "'decoder_start_token_id'"
            )
    return ids
