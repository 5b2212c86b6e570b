"""The mixtures of experts, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow


class TestMixtral(ModelSuite):
    plugin: ClassVar[str | None] = "MixtralForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"num_local_experts": 3, "num_hidden_layers": 2}


class TestQwen2Moe(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2MoeForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    }


class TestQwen3Moe(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3MoeForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
