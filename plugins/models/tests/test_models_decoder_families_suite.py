"""Decoders that differ from Llama's in norms, factors, windows or rotation pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow

NO_IDS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""The usual ones are beyond a tiny vocabulary."""
GRANITE: Mapping[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 5.0,
}


class TestGemma2(ModelSuite):
    plugin: ClassVar[str | None] = "Gemma2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "sliding_window": 7,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 6.0,
    }
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_activation": "of_nobody"}


class TestGranite(ModelSuite):
    plugin: ClassVar[str | None] = "GraniteForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = GRANITE


class TestGraniteMoe(ModelSuite):
    plugin: ClassVar[str | None] = "GraniteMoeForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}
    # Rounding may choose another expert.
    max_bfloat16_error: ClassVar[float] = 0.25


class TestOlmo2(ModelSuite):
    plugin: ClassVar[str | None] = "Olmo2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = NO_IDS


class TestOlmo3(ModelSuite):
    plugin: ClassVar[str | None] = "Olmo3ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        **NO_IDS,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }


class TestPhi3(ModelSuite):
    plugin: ClassVar[str | None] = "Phi3ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {**NO_IDS, "sliding_window": 7}


class TestSmolLM3(ModelSuite):
    plugin: ClassVar[str | None] = "SmolLM3ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {**NO_IDS, "no_rope_layers": [1, 0, 1]}
