"""The decoders with layer norms, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow
GPT2_NAMES: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


class TestBloom(ModelSuite):
    plugin: ClassVar[str | None] = "BloomForCausalLM"
    size_names: ClassVar[Mapping[str, str]] = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    unknown_config: ClassVar[Mapping[str, Any]] = {"apply_residual_connection_post_layernorm": True}


class TestFalcon(ModelSuite):
    plugin: ClassVar[str | None] = "FalconForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"new_decoder_architecture": True, "num_kv_heads": 2}
    unknown_config: ClassVar[Mapping[str, Any]] = {"activation": "of_nobody", "num_ln_in_parallel_attn": 3}


class TestGPT2(ModelSuite):
    plugin: ClassVar[str | None] = "GPT2LMHeadModel"
    size_names: ClassVar[Mapping[str, str]] = GPT2_NAMES
    unknown_config: ClassVar[Mapping[str, Any]] = {"activation_function": "of_nobody", "add_cross_attention": True}


class TestGPTBigCode(ModelSuite):
    plugin: ClassVar[str | None] = "GPTBigCodeForCausalLM"
    size_names: ClassVar[Mapping[str, str]] = GPT2_NAMES
    unknown_config: ClassVar[Mapping[str, Any]] = {"activation_function": "of_nobody", "add_cross_attention": True}


class TestGPTNeoX(ModelSuite):
    plugin: ClassVar[str | None] = "GPTNeoXForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"num_attention_heads": 6}


class TestMpt(ModelSuite):
    plugin: ClassVar[str | None] = "MptForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"max_seq_len": 256}
    size_names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    unknown_config: ClassVar[Mapping[str, Any]] = {"no_bias": False, "expansion_ratio": 3}


class TestOPT(ModelSuite):
    plugin: ClassVar[str | None] = "OPTForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"ffn_dim": 80, "word_embed_proj_dim": 28}
    unknown_config: ClassVar[Mapping[str, Any]] = {"activation_function": "of_nobody"}


class TestPhi(ModelSuite):
    plugin: ClassVar[str | None] = "PhiForCausalLM"
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", "qk_layernorm": True}


class TestStarcoder2(ModelSuite):
    plugin: ClassVar[str | None] = "Starcoder2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"sliding_window": 7}
