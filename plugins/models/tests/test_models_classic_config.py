"""What decoders with layer norms read from a configuration, against what Hugging Face makes of the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.bloom import read_bloom, read_mpt
from hardpoint_models.classic_config import ClassicConfig, alibi_slopes
from hardpoint_models.falcon import read_falcon
from hardpoint_models.gpt2 import read_gpt2, read_gpt_bigcode
from hardpoint_models.gpt_neox import read_gpt_neox
from hardpoint_models.opt import read_opt
from hardpoint_models.starcoder2 import read_phi, read_starcoder2

Reader = Callable[[Mapping[str, Any], str], ClassicConfig]
SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
WIDE: dict[str, Any] = {**SIZES, "intermediate_size": 80, "max_position_embeddings": 64}
GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 100}
BLOOM: dict[str, Any] = {"hidden_size": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100}
MPT: dict[str, Any] = {"d_model": 48, "n_layers": 3, "n_heads": 4, "vocab_size": 100}
FAMILIES: Mapping[str, tuple[Reader, dict[str, Any], Any]] = {
    "bloom": (read_bloom, BLOOM, transformers.BloomConfig),
    "falcon": (read_falcon, {**SIZES, "max_position_embeddings": 64}, transformers.FalconConfig),
    "gpt2": (read_gpt2, GPT2, transformers.GPT2Config),
    "gpt_bigcode": (read_gpt_bigcode, GPT2, transformers.GPTBigCodeConfig),
    "gpt_neox": (read_gpt_neox, {**WIDE, "num_attention_heads": 6}, transformers.GPTNeoXConfig),
    "mpt": (read_mpt, MPT, transformers.MptConfig),
    "opt": (read_opt, {**SIZES, "ffn_dim": 80, "max_position_embeddings": 64}, transformers.OPTConfig),
    "phi": (read_phi, WIDE, transformers.PhiConfig),
    "starcoder2": (read_starcoder2, WIDE, transformers.Starcoder2Config),
}


def read(family: str, **changes: Any) -> ClassicConfig:
    reader, base, _ = FAMILIES[family]
    return reader({**base, **changes}, "TestForCausalLM")


def saved(family: str, **changes: Any) -> ClassicConfig:
    """What is read in the file that Hugging Face writes of the same configuration."""
    reader, base, oracle = FAMILIES[family]
    return reader(oracle(**{**base, **changes}).to_dict(), "TestForCausalLM")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {}),
        ("bloom", {"layer_norm_epsilon": 1e-6, "tie_word_embeddings": False}),
        ("falcon", {}),
        ("falcon", {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 84}),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
        ("falcon", {"rope_theta": 5e5, "activation": "relu", "layer_norm_epsilon": 1e-6}),
        ("gpt2", {}),
        ("gpt2", {"n_inner": 88, "scale_attn_weights": False, "activation_function": "relu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
        ("gpt_bigcode", {}),
        ("gpt_bigcode", {"multi_query": False, "tie_word_embeddings": False}),
        ("gpt_neox", {}),
        ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 5e4, "use_parallel_residual": False}),
        ("gpt_neox", {"attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-6}),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("mpt", {}),
        ("mpt", {"attn_config": {"clip_qkv": 6.0, "softmax_scale": 0.2, "alibi_bias_max": 16}}),
        ("opt", {}),
        ("opt", {"word_embed_proj_dim": 28, "do_layer_norm_before": False}),
        ("opt", {"_remove_final_layer_norm": True, "enable_bias": False, "activation_function": "gelu"}),
        ("phi", {}),
        ("phi", {"partial_rotary_factor": 1.0, "num_key_value_heads": 2, "rope_theta": 5e4}),
        ("starcoder2", {}),
        ("starcoder2", {"sliding_window": 7, "use_bias": False, "norm_epsilon": 1e-6, "num_key_value_heads": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "defaults",
)
def test_a_file_means_what_hugging_face_reads_in_it(family: str, changes: dict[str, Any]) -> None:
    """Fields left out and older spellings alike: reading the file is reading what Hugging Face would save again."""
    assert read(family, **changes) == saved(family, **changes)


def test_sizes_have_two_names() -> None:
    usual = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
    assert read_gpt2({"vocab_size": 100, **usual}, "TestForCausalLM") == read("gpt2", **usual)
    older = {"n_embed": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100, "new_decoder_architecture": True}
    assert read_falcon({**older, "n_head_kv": 2}, "T") == read("falcon", new_decoder_architecture=True, num_kv_heads=2)
    with pytest.raises(ModelFormatError, match="n_embd=48 and hidden_size=60 are one size by two names"):
        read("gpt2", hidden_size=60)


def test_where_blocks_stand_and_who_shares_norms() -> None:
    falcon = {name: read("falcon", **changes) for name, changes in _FALCONS.items()}
    assert {name: (config.flow, config.has_second_norm, config.num_kv_heads) for name, config in falcon.items()} == {
        "first": ("parallel", False, 1),
        "second": ("parallel", True, 2),
        "third": ("parallel", False, 2),
        "in a row": ("sequential", True, 4),
        "null": ("sequential", True, 1),
    }
    opt = read("opt", do_layer_norm_before=False)
    assert (opt.flow, opt.has_final_norm) == ("post_norm", False)
    assert read("phi").has_second_norm is False
    assert read("gpt_neox").flow == "parallel"
    assert read("bloom").has_embedding_norm
    assert not read("mpt").norm_bias


_FALCONS: Mapping[str, dict[str, Any]] = {
    "first": {},
    "second": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "third": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "in a row": {"multi_query": False, "parallel_attn": False},
    "null": {"parallel_attn": None},
}


def test_scores_may_shrink_from_layer_to_layer() -> None:
    assert read("gpt2", scale_attn_by_inverse_layer_idx=True).attention_scales == tuple(
        48**-0.5 * 2 / layer for layer in (1, 2, 3)
    )
    assert read("gpt2", scale_attn_weights=False).attention_scales == (1.0,) * 3


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 71, 112])
def test_slopes_equal_those_of_hugging_face(num_heads: int) -> None:
    """The last position of two is the slope, or its negative less the position of the query."""
    found = torch.tensor(alibi_slopes(num_heads))
    torch.testing.assert_close(found, build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1])
    torch.testing.assert_close(found, -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0])
    steeper = torch.tensor(alibi_slopes(num_heads, 16.0))
    torch.testing.assert_close(steeper, -build_mpt_alibi_tensor(num_heads, 2, alibi_bias_max=16)[:, 0, 0])


def test_falcon_rounds_its_slopes_and_divides_them_like_scores() -> None:
    found = read("falcon", alibi=True, hidden_size=192, num_attention_heads=12).alibi_slopes
    expected = torch.tensor(alibi_slopes(12)).bfloat16().float() / 4
    torch.testing.assert_close(torch.tensor(found), expected)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            UnsupportedModelError,
            "_post_layernorm' is True",
        ),
        ("falcon", {"activation": "swishy"}, UnsupportedModelError, "'activation' is 'swishy'; supported: 'gelu'"),
        (
            "falcon",
            {"num_ln_in_parallel_attn": 2},
            UnsupportedModelError,
            "'num_ln_in_parallel_attn' is 2; supported: 1",
        ),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            UnsupportedModelError,
            "'parallel_attn' is False with new_decoder_architecture=True",
        ),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 3},
            ModelFormatError,
            "num_kv_heads=3 does not fit 4 attention heads",
        ),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, ModelFormatError, "num_kv_heads=2 does not fit 4"),
        ("falcon", {"rope_scaling": {"type": "xpos"}}, UnsupportedModelError, "rope_type 'xpos'"),
        ("gpt2", {"add_cross_attention": True}, UnsupportedModelError, "'add_cross_attention' is True"),
        ("gpt2", {"n_head": 5}, ModelFormatError, "the hidden size 48 is no multiple of the 5 attention heads"),
        ("gpt2", {"n_inner": -1}, ModelFormatError, "'n_inner' is -1; a positive integer"),
        ("gpt2", {"n_positions": "many"}, ModelFormatError, "'n_positions' is 'many'; a positive integer"),
        ("gpt2", {"activation_function": 3}, ModelFormatError, "'activation_function' is 3; the name of an activation"),
        ("gpt2", {"n_layer": 10**9}, ModelFormatError, "'n_layer' is 1000000000; .* at most"),
        ("gpt_bigcode", {"multi_query": "yes"}, ModelFormatError, "'multi_query' is 'yes'; true or false"),
        ("gpt_neox", {"rotary_pct": 0.0}, ModelFormatError, "'rotary_pct' is 0.0; it must be above 0"),
        ("gpt_neox", {"rotary_emb_base": "e"}, ModelFormatError, "'rotary_emb_base' is 'e'; a number"),
        ("gpt_neox", {"layer_norm_eps": -1}, ModelFormatError, "'layer_norm_eps' is -1.0; it must not be below 0"),
        ("mpt", {"attn_config": "flash"}, ModelFormatError, "'attn_config' is 'flash'; an object"),
        ("mpt", {"attn_config": {"qk_ln": True}}, UnsupportedModelError, "attn_config: config field 'qk_ln' is True"),
        ("mpt", {"attn_config": {"alibi": False}}, UnsupportedModelError, "'alibi' is False"),
        (
            "mpt",
            {"attn_config": {"attn_type": "multiquery_attention"}},
            UnsupportedModelError,
            "'multiquery_attention'",
        ),
        ("mpt", {"attn_config": {"clip_qkv": -2}}, ModelFormatError, "'clip_qkv' is -2.0; it must be above 0"),
        ("mpt", {"no_bias": False}, UnsupportedModelError, "'no_bias' is False"),
        ("mpt", {"logit_scale": 0.5}, UnsupportedModelError, "'logit_scale' is 0.5"),
        ("opt", {"layer_norm_elementwise_affine": False}, UnsupportedModelError, "_elementwise_affine' is False"),
        ("opt", {"ffn_dim": None}, ModelFormatError, "'ffn_dim' is None; a positive integer"),
        ("phi", {"qk_layernorm": True}, UnsupportedModelError, "'qk_layernorm' is True"),
        ("phi", {"tie_word_embeddings": True}, UnsupportedModelError, "'tie_word_embeddings' is True"),
        ("starcoder2", {"num_key_value_heads": 3}, ModelFormatError, "num_attention_heads=4 is no multiple"),
        ("starcoder2", {"sliding_window": 0}, ModelFormatError, "'sliding_window' is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    family: str, changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read(family, **changes)
    assert "TestForCausalLM" in str(caught.value) or "rope_type" in str(caught.value)
