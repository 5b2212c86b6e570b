"""What cannot be run by ``transformers`` here is refused by name, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_testing_torch import PlainAttentionBackend, create_model, worker_config
from hardpoint_testing_torch.tiny_models import TINY_SIZES
from hardpoint_transformers_models.division import Division, Share
from hardpoint_transformers_models.interception import Mask
from hardpoint_transformers_models.model import create_transformers

TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def info_of(architecture: str, **config: Any) -> ModelInfo:
    """As a loader describes a folder, without one."""
    known = getattr(transformers, architecture, None)
    fields = {**TINY_SIZES, **config}
    if known is not None:
        fields = known.config_class(**fields).to_dict()
    return ModelInfo(
        artifact=ModelArtifact(name="tiny", root="/tiny", files=("config.json",), source="test"),
        architecture=architecture,
        config=fields,
        max_position=256,
        vocab_size=160,
        dtype="float32",
        loader="safetensors",
    )


def build(info: ModelInfo, **parallel: Any) -> Any:
    config = worker_config(info)
    if parallel:
        config = msgspec.structs.replace(config, parallel=ParallelSlice(**parallel))
    return create_model(create_transformers, config, PlainAttentionBackend())[0]


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("RecurrentGemmaForCausalLM", {}, "a state that is no keys and values"),
        ("BloomForCausalLM", {}, "its layers take no position_ids"),
        ("FalconForCausalLM", {}, "its attention is its own code"),
        ("XGLMForCausalLM", {}, "its attention is its own code"),
        ("OPTForCausalLM", {}, "calls parts of its layers by themselves"),
        ("DiffLlamaForCausalLM", {}, "attends more than once in a forward"),
        ("MiniMaxForCausalLM", TOKENS, "layers of the kinds linear_attention"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of the kinds conv"),
        ("BertLMHeadModel", {}, "a mask that is not causal"),
        ("BertLMHeadModel", {"is_decoder": True}, "decoder.bias are one parameter"),
        ("Gemma4ForCausalLM", {}, "hidden_size_per_layer_input"),
        ("Gemma3ForConditionalGeneration", {}, "composed of several models"),
        ("LlamaForSequenceClassification", {}, "no causal model of transformers"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary positions are of the kind dynamic",
        ),
        ("LlamaForCausalLM", {"hidden_act": "of_nobody"}, "'hidden_act' is 'of_nobody'"),
        ("CohereForCausalLM", {**TOKENS, "num_key_value_heads": 3}, "trial run without weights failed|be tried"),
    ],
)
def test_the_reason_is_named(architecture: str, config: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        build(info_of(architecture, **config))
    assert architecture in str(caught.value)


@pytest.mark.parametrize("architecture", ["JetMoeForCausalLM", "XLMWithLMHeadModel"])
def test_what_torch_says_without_memory_comes_with_what_it_means(architecture: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build(info_of(architecture, kv_channels=12, num_local_experts=4))
    said = str(caught.value)
    assert said.startswith(f"{architecture} cannot be run by transformers here: its code looks at values")
    assert said.endswith(f"install a distribution that provides the entry point hardpoint.model.v1:{architecture}")


def test_code_of_checkpoints_is_never_run() -> None:
    """Neither for architectures that the library does not have, nor for those that it has."""
    code = {"AutoModelForCausalLM": "modeling_ghost.GhostForCausalLM", "AutoConfig": "configuration_ghost.GhostConfig"}
    with pytest.raises(UnsupportedModelError, match=r"GhostForCausalLM.*\(auto_map\) is never run"):
        build(info_of("GhostForCausalLM", auto_map=code))
    known = info_of("CohereForCausalLM", **TOKENS)
    model = build(msgspec.structs.replace(known, config={**known.config, "auto_map": code}))
    assert type(model.get_submodule("model")).__module__ == "transformers.models.cohere.modeling_cohere"


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_absent_sizes_are_not_made_up(field: str) -> None:
    info = info_of("CohereForCausalLM", **TOKENS)
    config = {name: value for name, value in info.config.items() if name != field}
    with pytest.raises(ModelFormatError, match=field):
        build(msgspec.structs.replace(info, config=config))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "many"),
        ("rope_parameters", {"rope_type": "ghost"}),
        ("rope_parameters", True),
        ("hidden_act", []),
        ("hidden_act", {"gelu": 1}),
        ("layer_norm_eps", ["long"] * 1000),
    ],
)
def test_malformed_fields_end_in_an_error_of_ours(field: str, value: Any) -> None:
    """In one line that can be read, whatever the library says."""
    info = info_of("CohereForCausalLM", **TOKENS)
    with pytest.raises(HardpointError, match="CohereForCausalLM") as caught:
        build(msgspec.structs.replace(info, config={**info.config, field: value}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("DiffLlamaForCausalLM", "no plan for tensor parallelism"), ("Llama4ForCausalLM", "packed_rowwise")],
)
def test_what_has_no_plan_is_not_divided(architecture: str, reason: str) -> None:
    plan = getattr(transformers, architecture).config_class.base_model_tp_plan
    with pytest.raises(UnsupportedModelError, match=reason):
        Division.of(architecture, plan, 2)
    assert Division.of(architecture, plan, 1).shares == {}


def test_a_plan_names_the_shares_of_all_layers() -> None:
    plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise", "layers.*.q_norm": "replicate"}
    division = Division.of("SomeForCausalLM", plan, 2)
    assert division.share("layers.17.mlp.up_proj") is Share.COLUMNS
    assert division.share("layers.3.mlp.down_proj") is Share.ROWS
    assert division.share("layers.3.self_attn.o_proj") is Share.WHOLE


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="--pipeline-parallel-size 1"):
        build(info_of("CohereForCausalLM", **TOKENS), pipeline_parallel_size=2, world_size=2)


@pytest.mark.parametrize(
    ("sees", "size", "window", "fault"),
    [
        (lambda query, key: key <= query, None, None, ""),
        (lambda query, key: query - 5 < key <= query, 5, 5, ""),
        (lambda query, key: query - 1 < key <= query, 1, 1, ""),
        (lambda query, key: key == key, None, None, "not causal"),
        (lambda query, key: key <= query and key // 6 == query // 6, 6, None, "chunks or another pattern"),
        (lambda query, key: query - 5 < key <= query, None, None, "a mask of its own"),
        (lambda query, key: (key <= query) / torch.zeros(0), None, None, "more than positions"),
    ],
)
def test_masks_are_judged_by_whom_they_let_see(sees: Any, size: int | None, window: int | None, fault: str) -> None:
    found = Mask.of(lambda query, key: bool(sees(query, key)), size)
    assert (found.window, bool(found.fault)) == (window, bool(fault))
    assert fault in found.fault
