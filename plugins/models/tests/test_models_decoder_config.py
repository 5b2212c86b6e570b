"""What the decoder family reads from a configuration, what it refuses, and its manifest."""

from __future__ import annotations

import json
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hardpoint.errors import ConfigError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, declaration_of
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant
from hardpoint_models.llama import MISTRAL, QWEN2, QWEN3, create_llama
from hardpoint_testing_torch import StateDictLoader, build_model, make_tiny_model, worker_config

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def read(variant: DecoderVariant | None = None, **changes: Any) -> DecoderConfig:
    return DecoderConfig.read({**BASE, **changes}, "TestForCausalLM", variant or DecoderVariant())


def test_what_may_be_left_out() -> None:
    config = read(head_dim=None, num_key_value_heads=None, rope_scaling=None)
    assert (config.head_size, config.num_kv_heads, config.is_tied, config.norm_eps) == (12, 4, False, 1e-6)
    assert config.windows == (None,) * 4
    assert config.rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, r"'hidden_act' is 'gelu'; supported: 'silu'"),
        ({"pretraining_tp": 2}, UnsupportedModelError, "'pretraining_tp' is 2"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
            ModelFormatError,
            "'longrope' .* needs 'short_factor'",
        ),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, UnsupportedModelError, "'ntk'"),
        ({"hidden_size": None}, ModelFormatError, "'hidden_size' is None; a positive integer"),
        ({"num_hidden_layers": "4"}, ModelFormatError, "'num_hidden_layers' is '4'"),
        ({"vocab_size": True}, ModelFormatError, "'vocab_size' is True"),
        ({"intermediate_size": 0}, ModelFormatError, "'intermediate_size' is 0"),
        ({"rms_norm_eps": "small"}, ModelFormatError, "'rms_norm_eps' is 'small'"),
        ({"tie_word_embeddings": "yes"}, ModelFormatError, "'tie_word_embeddings' is 'yes'"),
        ({"num_key_value_heads": 3}, ModelFormatError, "num_attention_heads=4 is no multiple"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        read(**changes)
    assert "TestForCausalLM" in str(caught.value) or "config.json" in str(caught.value)


def test_biases_follow_variant_or_configuration() -> None:
    biased: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    assert (read(**biased).qkv_bias, read(**biased).output_bias, read(**biased).mlp_bias) == (True, True, True)
    qwen2 = read(QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    assert read(QWEN3, attention_bias=True).output_bias
    assert read(QWEN3).qk_norm


@pytest.mark.parametrize(
    ("variant", "changes", "windows"),
    [
        (MISTRAL, {"sliding_window": 8}, (8, 8, 8, 8)),
        (MISTRAL, {"sliding_window": None}, (None,) * 4),
        (MISTRAL, {}, (4096,) * 4),
        (QWEN2, {"sliding_window": 8}, (None,) * 4),
        (QWEN3, {"sliding_window": 8, "use_sliding_window": None}, (None,) * 4),
        (QWEN2, {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (QWEN2, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8,) * 4),
        (QWEN2, {"sliding_window": 8, "use_sliding_window": False}, (None,) * 4),
        (QWEN2, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        (QWEN3, {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 8, None, 8)),
        (DecoderVariant(), {"sliding_window": 8}, (None,) * 4),
    ],
)
def test_windows_per_layer(variant: DecoderVariant, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(variant, **changes).windows == windows


@pytest.mark.parametrize(
    ("architecture", "variant", "changes"),
    [
        ("MistralForCausalLM", MISTRAL, {}),
        ("MistralForCausalLM", MISTRAL, {"sliding_window": None}),
        ("Qwen2ForCausalLM", QWEN2, {"sliding_window": 8}),
        ("Qwen2ForCausalLM", QWEN2, {"sliding_window": 8, "use_sliding_window": True}),
        ("Qwen3ForCausalLM", QWEN3, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
    ],
)
def test_windows_left_open_are_those_of_hugging_face(
    architecture: str, variant: DecoderVariant, changes: dict[str, Any]
) -> None:
    """A file may leave fields out; what was meant then are the defaults of the class that wrote it."""
    oracle = getattr(transformers, architecture).config_class(**{**BASE, **changes})
    kinds = getattr(oracle, "layer_types", None) or ["sliding_attention"] * 4
    wanted = tuple(oracle.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert read(variant, **changes).windows == wanted


@pytest.mark.parametrize("layer_types", [["full_attention"], ["chunked_attention"] * 4, "full_attention"])
def test_unknown_layer_types_are_refused(layer_types: Any) -> None:
    with pytest.raises((ModelFormatError, UnsupportedModelError), match="layer_types"):
        read(MISTRAL, sliding_window=8, layer_types=layer_types)


def test_a_factory_outside_the_torch_worker_says_what_it_needs() -> None:
    context = ModelContext(name="LlamaForCausalLM", api_version=1, roles=frozenset())
    with pytest.raises(ConfigError, match="layer toolkit"):
        create_llama(context, NoOptions())


def build(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Model:
    tiny = make_tiny_model("LlamaForCausalLM", folder, **config)
    loader = StateDictLoader(tiny.tensors() if tensors is None else tensors)
    return build_model(create_llama, loader, worker_config(tiny.info), ReferenceBackend())[0]


def test_a_model_is_what_the_runner_relies_on(tmp_path: Path) -> None:
    model = build(tmp_path)
    assert isinstance(model, Model)
    assert [name for name, _ in model.named_layers()] == [f"model.layers.{index}" for index in range(3)]
    assert isinstance(model, torch.nn.Module)
    for name, layer in model.named_layers():
        assert model.get_submodule(name) is layer
    assert list(model.kv_cache_specs()) == [f"model.layers.{index}.self_attn.attn" for index in range(3)]


def test_missing_layers_of_a_checkpoint_are_listed(tmp_path: Path) -> None:
    tensors = make_tiny_model("LlamaForCausalLM", tmp_path / "a").tensors()
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(80, 48)
    tensors["model.layers.x.mlp.up_proj.weight"] = torch.zeros(80, 48)
    with pytest.raises(ModelFormatError) as caught:
        build(tmp_path / "b", tensors)
    assert "1 tensors missing model.layers.1.self_attn.k_proj.weight" in str(caught.value)
    assert "2 tensors unexpected model.layers.3.mlp.up_proj.weight, model.layers.x" in str(caught.value)


def test_old_frequency_tables_and_the_head_of_a_tied_model_are_ignored(tmp_path: Path) -> None:
    tensors = make_tiny_model("LlamaForCausalLM", tmp_path / "a", tie_word_embeddings=True).tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    tensors["lm_head.weight"] = torch.zeros(160, 48)
    build(tmp_path / "b", tensors, tie_word_embeddings=True)


def test_the_manifest_lists_the_entry_points() -> None:
    text = resources.files("hardpoint_models").joinpath("hardpoint.json").read_text(encoding="utf-8")
    entries = json.loads(text)["plugins"]["model"]
    points = [point for point in entry_points(group="hardpoint.model.v1") if point.value.startswith("hardpoint_models")]
    assert sorted(entries) == sorted(point.name for point in points)
    for point in points:
        declaration = declaration_of(point.load())
        assert declaration is not None
        assert entries[point.name]["architectures"] == [point.name]
        assert entries[point.name]["options"] == declaration.options.model_json_schema()
        assert entries[point.name]["capabilities"] == declaration.capabilities
