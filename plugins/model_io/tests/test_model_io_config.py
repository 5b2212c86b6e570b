"""Descriptions from ``config.json``: what is taken from where, and that code in a model folder never runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.weights.config_json import describe_config
from hardpoint_model_io.weights.dummy import DummyOptions, DummyWeightLoader, tensor_shapes
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

AsArtifact = Callable[[Path], ModelArtifact]
MakeFolder = Callable[..., Path]


def test_a_folder_is_described(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    info = SafetensorsWeightLoader().describe(as_artifact(hf_folder()))
    assert (info.architecture, info.vocab_size, info.max_position) == ("LlamaForCausalLM", 100, 128)
    assert (info.dtype, info.loader, info.tasks) == ("float32", "safetensors", ("generate", "embed"))
    assert (info.eos_token_ids, info.bos_token_id) == ((2,), 1)


def test_end_tokens_of_both_files_are_merged_generation_first(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    root = hf_folder({"eos_token_id": [2, 9]})
    (root / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.6}))
    info = SafetensorsWeightLoader().describe(as_artifact(root))
    assert info.eos_token_ids == (7, 2, 9)
    assert info.generation["temperature"] == 0.6


def test_the_dtype_is_that_of_most_bytes(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    root = hf_folder(tensors={"w": np.ones((8, 8), np.float16), "n": np.ones(8, np.float32)})
    assert SafetensorsWeightLoader().describe(as_artifact(root)).dtype == "float16"


def test_new_rotary_spelling_is_offered_in_the_old_one(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    parameters = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    info = SafetensorsWeightLoader().describe(as_artifact(hf_folder({"rope_parameters": parameters})))
    assert info.config["rope_theta"] == 5e5
    assert info.config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}


def test_older_names_of_sizes_are_offered_as_the_usual_ones(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    """Whoever asks for the hidden size finds it; what is there already is left to the architecture's own code."""
    older = {"hidden_size": None, "n_embd": 16, "num_attention_heads": 4, "n_head": 2, "n_layer": 1}
    config = SafetensorsWeightLoader().describe(as_artifact(hf_folder({**older, "num_hidden_layers": None}))).config
    assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 1)
    assert (config["num_attention_heads"], config["n_head"]) == (4, 2)


@pytest.mark.parametrize("name", ["n_positions", "seq_length", "max_seq_len"])
def test_a_context_length_has_several_names(hf_folder: MakeFolder, as_artifact: AsArtifact, name: str) -> None:
    artifact = as_artifact(hf_folder({"max_position_embeddings": None, name: 55}))
    assert SafetensorsWeightLoader().describe(artifact).max_position == 55


def test_a_nested_text_configuration_counts(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    text = {"vocab_size": 77, "max_position_embeddings": 55}
    info = SafetensorsWeightLoader().describe(as_artifact(hf_folder({"text_config": text, "vocab_size": None})))
    assert (info.vocab_size, info.max_position) == (77, 55)


def test_sizes_that_gemma3_files_leave_out_are_known(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    """The published ones that see images name neither a vocabulary nor a length."""
    text = {"model_type": "gemma3_text", "hidden_size": 8, "max_position_embeddings": None}
    folder = hf_folder({"text_config": text, "vocab_size": None})
    info = describe_config(as_artifact(folder), "safetensors", "float32")
    assert (info.vocab_size, info.max_position) == (262_208, 131_072)
    assert info.config["text_config"]["vocab_size"] == 262_208


@pytest.mark.parametrize(("changes", "expected"), [({}, 1 << 18), ({"max_position_embeddings": 55}, 55)])
def test_recurrent_layers_alone_limit_no_context(
    hf_folder: MakeFolder, as_artifact: AsArtifact, changes: dict[str, Any], expected: int
) -> None:
    """Files of such models name no limit; where one does, it counts."""
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "max_position_embeddings": None, **changes}
    assert SafetensorsWeightLoader().describe(as_artifact(hf_folder(config))).max_position == expected


@pytest.mark.parametrize(
    ("name", "tasks"), [("BertModel", ("embed",)), ("T5ForConditionalGeneration", ("generate", "embed"))]
)
def test_tasks_follow_the_architecture(
    hf_folder: MakeFolder, as_artifact: AsArtifact, name: str, tasks: tuple[str, ...]
) -> None:
    """What generates has hidden states to embed by as well."""
    assert SafetensorsWeightLoader().describe(as_artifact(hf_folder({"architectures": [name]}))).tasks == tasks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, "'hidden_size' is 1000000000, but no dimension of the weights is longer than 32"),
        ({"vocab_size": 10**9}, "'vocab_size' is 1000000000"),
        ({"head_dim": 10**9}, "'head_dim' is 1000000000"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000, but the weights are only 2 tensors"),
        ({"num_hidden_layers": "1"}, "'num_hidden_layers' is \"1\""),
        ({"hidden_size": 32.0}, "'hidden_size' is 32.0"),
        ({"num_local_experts": 10**9}, "'num_local_experts' is 1000000000, but no dimension"),
        ({"n_routed_experts": -1}, "'n_routed_experts' is -1"),
        ({"num_experts": False}, "'num_experts' is false"),
        ({"kv_lora_rank": 10**9}, "'kv_lora_rank' is 1000000000, but no dimension"),
        ({"mamba_d_conv": 10**9}, "'mamba_d_conv' is 1000000000, but no dimension"),
        ({"type_vocab_size": 10**400}, f"'type_vocab_size' is 1{'0' * 79}, but no dimension"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide evenly over 3"),
        ({"text_config": {"vocab_size": 9, "max_position_embeddings": 9, "hidden_size": 10**9}}, "'hidden_size' is"),
    ],
)
def test_sizes_that_no_model_of_these_tensors_has_are_refused_before_memory_is_taken(
    hf_folder: MakeFolder, as_artifact: AsArtifact, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        SafetensorsWeightLoader().describe(as_artifact(hf_folder(change)))
    assert "config.json" in str(caught.value)


def test_sizes_given_per_layer_are_left_to_the_architecture(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    info = SafetensorsWeightLoader().describe(as_artifact(hf_folder({"intermediate_size": [64, 10**9]})))
    assert info.config["intermediate_size"] == [64, 10**9]


@pytest.mark.parametrize("name", ["num_local_experts", "type_vocab_size", "q_lora_rank"])
def test_a_model_may_have_none_of_what_is_optional(hf_folder: MakeFolder, as_artifact: AsArtifact, name: str) -> None:
    info = SafetensorsWeightLoader().describe(as_artifact(hf_folder({name: 0})))
    assert info.config[name] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": -1}, "'vocab_size' is -1"),
        ({"vocab_size": "many"}, "'vocab_size' is \"many\""),
        ({"vocab_size": True}, "'vocab_size' is true"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"max_position_embeddings": 1e9}, "max_position_embeddings"),
        ({"eos_token_id": 100}, "not an id below the vocabulary size 100"),
        ({"eos_token_id": [1, "2"]}, "holds '2'"),
        ({"text_config": 3}, "text_config"),
    ],
)
def test_bad_fields_are_named(
    hf_folder: MakeFolder, as_artifact: AsArtifact, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message) as caught:
        SafetensorsWeightLoader().describe(as_artifact(hf_folder(change)))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3]])
def test_the_architecture_must_be_named(hf_folder: MakeFolder, as_artifact: AsArtifact, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="architectures"):
        SafetensorsWeightLoader().describe(as_artifact(hf_folder({"architectures": value})))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a":' * 5_000, b"null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_corrupt_configuration_is_one_message(
    hf_folder: MakeFolder, as_artifact: AsArtifact, name: str, content: bytes
) -> None:
    root = hf_folder()
    (root / name).write_bytes(content)
    with pytest.raises(ModelFormatError, match=name):
        SafetensorsWeightLoader().describe(as_artifact(root))


def test_code_named_by_auto_map_is_never_run(hf_folder: MakeFolder, as_artifact: AsArtifact, tmp_path: Path) -> None:
    """Class 8: a custom modeling file beside the weights is data."""
    canary = tmp_path / "canary"
    root = hf_folder({"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    (root / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: ...\n")
    loader = SafetensorsWeightLoader()
    info = loader.describe(as_artifact(root))
    assert list(loader.tensors(info))
    assert not canary.exists()


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_have_the_references_names_and_shapes(
    hf_folder: MakeFolder, as_artifact: AsArtifact, architecture: str, tied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    change = {"architectures": [architecture], "num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": tied}
    root = hf_folder(change, tensors={})
    model_class = getattr(transformers, architecture)
    fields = json.loads((root / "config.json").read_text())
    if architecture == "Qwen2ForCausalLM":
        fields["head_dim"] = None
        (root / "config.json").write_text(json.dumps(fields))
        del fields["head_dim"]
    del fields["torch_dtype"], fields["architectures"], fields["model_type"]
    state = model_class(model_class.config_class(**fields)).state_dict()
    expected = {name: tuple(value.shape) for name, value in state.items() if not (tied and name == "lm_head.weight")}
    assert tensor_shapes(DummyWeightLoader(DummyOptions()).describe(as_artifact(root))) == expected


def test_dummy_values_depend_on_seed_and_name_only(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    artifact = as_artifact(hf_folder(tensors={}))
    first, again, other = (DummyWeightLoader(DummyOptions(seed=seed)) for seed in (1, 1, 2))
    info = first.describe(artifact)
    values = [{found.name: found.data for found in loader.tensors(info)} for loader in (first, again, other)]
    for name, array in values[0].items():
        np.testing.assert_array_equal(array, values[1][name])
        assert name.endswith("norm.weight") or not np.array_equal(array, values[2][name])
    assert first.num_bytes(info) == sum(array.nbytes for array in values[0].values())
    assert not first.accepts(artifact)


def test_dummy_weights_of_other_architectures_are_made_up_as_their_model_says(
    hf_folder: MakeFolder, as_artifact: AsArtifact
) -> None:
    root = hf_folder({"architectures": ["MambaForCausalLM"]}, tensors={})
    loader = DummyWeightLoader(DummyOptions(seed=3))
    info = loader.describe(as_artifact(root))
    assert loader.num_bytes(info) == 0
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        next(loader.tensors(info))
    wanted = [("a.weight", (3, 4)), ("a.LayerNorm.weight", (5,)), ("b.weight", (3, 4)), ("scalar", ())]
    found = list(loader.invent(wanted))
    assert [(one.name, one.shape) for one in found] == wanted
    assert all(one.data.shape == one.shape and one.data.dtype == np.float32 for one in found)
    assert np.array_equal(found[1].data, np.ones(5))
    assert not np.array_equal(found[0].data, found[2].data)
    (alone,) = loader.invent([("b.weight", (3, 4))])
    np.testing.assert_array_equal(alone.data, found[2].data)


def test_dummy_weights_of_sizes_that_cannot_be_are_refused_with_the_field(
    hf_folder: MakeFolder, as_artifact: AsArtifact
) -> None:
    root = hf_folder({"architectures": ["MambaForCausalLM"], "hidden_size": -1}, tensors={})
    with pytest.raises(ModelFormatError, match="hidden_size"):
        DummyWeightLoader(DummyOptions()).describe(as_artifact(root))
