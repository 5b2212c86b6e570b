"""Every architecture, as it is installed, passes the conformance suite of its kind; odd members of the family too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite


@pytest.mark.slow
class TestBert(ModelSuite):
    plugin: ClassVar[str | None] = "BertModel"


@pytest.mark.slow
class TestBertOfAnotherTask(ModelSuite):
    plugin: ClassVar[str | None] = "BertForMaskedLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 36,
        "num_attention_heads": 12,
        "intermediate_size": 41,
        "vocab_size": 97,
        "type_vocab_size": 3,
        "hidden_act": "relu",
    }
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", "is_decoder": True}


@pytest.mark.slow
class TestGemma3(ModelSuite):
    plugin: ClassVar[str | None] = "Gemma3ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 8.0,
    }
    unknown_config: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "of_nobody",
        "use_bidirectional_attention": True,
    }


class TestLlama(ModelSuite):
    plugin: ClassVar[str | None] = "LlamaForCausalLM"


class TestTiedLlamaWithOddHeads(ModelSuite):
    plugin: ClassVar[str | None] = "LlamaForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    }


class TestMistral(ModelSuite):
    plugin: ClassVar[str | None] = "MistralForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"sliding_window": 7}


class TestQwen2(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    }


class TestQwen3(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"head_dim": 16}
