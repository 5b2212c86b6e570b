"""The hybrids, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow


class TestBamba(ModelSuite):
    plugin: ClassVar[str | None] = "BambaForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "mamba_n_heads": 6,
        "mamba_chunk_size": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
    }


class TestGraniteHybrid(ModelSuite):
    plugin: ClassVar[str | None] = "GraniteMoeHybridForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "mamba_n_heads": 6,
        "mamba_chunk_size": 16,
        "mamba_d_state": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 3,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 5.0,
    }
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", "position_embedding_type": "of_nobody"}
