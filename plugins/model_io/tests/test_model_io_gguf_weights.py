"""GGUF weights: names, layout and values equal the reference's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoaderContext, WeightTensor
from hardpoint.interfaces.plugin import NoOptions
from hardpoint_model_io.formats import gguf_dequant
from hardpoint_model_io.formats.gguf_types import SUPPORTED_TYPES
from hardpoint_model_io.weights.gguf import GgufWeightLoader, create

AsArtifact = Callable[[Path], ModelArtifact]
WriteGguf = Callable[..., Path]


def load(artifact: ModelArtifact, packed: bool = False) -> tuple[ModelInfo, dict[str, WeightTensor]]:
    loader = GgufWeightLoader(packed)
    info = loader.describe(artifact)
    return info, {tensor.name: tensor for tensor in loader.tensors(info)}


def dense(tensor: WeightTensor) -> np.ndarray:
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32) << 16).view(np.float32)
    return tensor.data.astype(np.float32)


def test_the_demo_model_is_described(smollm2: ModelArtifact) -> None:
    info = GgufWeightLoader().describe(smollm2)
    assert info.architecture == "LlamaForCausalLM"
    assert (info.vocab_size, info.max_position, info.dtype) == (49_152, 8_192, "gguf.q4_1")
    assert (info.eos_token_ids, info.bos_token_id) == ((2,), 1)
    assert info.config["rms_norm_eps"] == 1e-5
    assert info.config["tie_word_embeddings"] is True
    for packed in (True, False):
        loader = GgufWeightLoader(packed=packed)
        assert loader.num_bytes(info) == sum(tensor.data.nbytes for tensor in loader.tensors(info))
    assert GgufWeightLoader(packed=True).num_bytes(info) < 98_362_432


def test_every_tensor_of_the_demo_model_equals_the_reference(smollm2: ModelArtifact) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.root, gguf_file=smollm2.files[0], dtype=torch.float32
    )
    state = reference.state_dict()
    info, ours = load(smollm2)
    # The head shares the embedding, so the file does not store it.
    assert set(state) - set(ours) == {"lm_head.weight"}
    assert set(ours) <= set(state)
    different = [name for name, tensor in ours.items() if not np.array_equal(state[name].numpy(), tensor.data)]
    assert different == []
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "head_dim",
                 "num_key_value_heads", "max_position_embeddings", "vocab_size", "tie_word_embeddings",
                 "hidden_act", "attention_bias"):  # fmt: skip
        assert info.config[name] == getattr(reference.config, name), name
    assert np.float32(info.config["rms_norm_eps"]) == np.float32(reference.config.rms_norm_eps)
    assert info.config["rope_theta"] == reference.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", SUPPORTED_TYPES, ids=lambda kind: kind.name)
def test_each_storage_type_gives_the_references_values(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(kind.number)
    shape = (37, 512)
    quant = Quant[kind.name]
    if kind.name in {"F32", "F16", "BF16"}:
        raw = gguf.quants.quantize(generator.standard_normal(shape, dtype=np.float32), quant).view(np.uint8)
    else:
        # Random blocks cover every bit pattern; exponents are kept small so that no scale is infinite.
        raw = generator.integers(0, 256, (37, 512 // kind.block_size * kind.block_bytes), dtype=np.uint8)
        raw[:, 1::2] &= 0x3F
    monkeypatch.setattr(gguf_dequant, "CHUNK_ELEMENTS", 2048)
    found = gguf_dequant.dequantize(raw, kind, shape)
    assert found.dtype == np.float32
    assert found.shape == shape
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, quant).astype(np.float32).reshape(shape))


def test_packed_tensors_stay_as_stored_and_unpack_to_the_same_values(
    gguf_file: WriteGguf, as_artifact: AsArtifact
) -> None:
    types = {"blk.0.attn_q.weight": Quant.Q8_0, "blk.0.ffn_up.weight": Quant.Q4_0, "blk.0.attn_v.weight": Quant.F16,
             "blk.0.attn_output.weight": Quant.BF16}  # fmt: skip
    artifact = as_artifact(gguf_file(types=types))
    _, packed = load(artifact, packed=True)
    _, plain = load(artifact)
    query, up = packed["model.layers.0.self_attn.q_proj.weight"], packed["model.layers.0.mlp.up_proj.weight"]
    assert (query.dtype, query.shape, query.data.shape) == ("gguf.q8_0", (32, 32), (32, 34))
    assert query.data.dtype == np.uint8
    assert (up.dtype, up.shape, up.data.shape) == ("gguf.q4_0", (64, 32), (64, 18))
    for tensor in (query, up):
        assert tensor.dequantize is not None
        np.testing.assert_array_equal(tensor.dequantize(), plain[tensor.name].data)
        assert plain[tensor.name].dtype == "float32"
    assert packed["model.layers.0.self_attn.v_proj.weight"].data.dtype == np.float16
    output = packed["model.layers.0.self_attn.o_proj.weight"]
    assert output.dtype == "bfloat16"
    assert output.data.dtype == np.uint16
    assert output.data.flags.c_contiguous


def test_query_and_key_rows_are_put_back_in_order(
    gguf_file: WriteGguf, as_artifact: AsArtifact, make_llama_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    tensors = make_llama_tensors()
    # Head of eight rows as the converter leaves it: first half and second half alternate.
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    query, key = (np.arange(rows * 32, dtype=np.float32).reshape(rows, 32) for rows in (32, 16))
    tensors["blk.0.attn_q.weight"] = np.concatenate([query[8 * head : 8 * head + 8][order] for head in range(4)])
    tensors["blk.0.attn_k.weight"] = np.concatenate([key[8 * head : 8 * head + 8][order] for head in range(2)])
    _, found = load(as_artifact(gguf_file(tensors=tensors)))
    np.testing.assert_array_equal(found["model.layers.0.self_attn.q_proj.weight"].data, query)
    np.testing.assert_array_equal(found["model.layers.0.self_attn.k_proj.weight"].data, key)


REFERENCE_MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32}),
}


def stored_form(name: str, value: np.ndarray, architecture: str, heads: tuple[int, int]) -> np.ndarray:
    """What a converter writes for a Hugging Face tensor."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return value + 1
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        count = heads[0] if ".q_proj." in name else heads[1]
        rows = value.shape[0] // count // 2
        return value.reshape(count, 2, rows, -1).swapaxes(1, 2).reshape(value.shape)
    return value


@pytest.mark.parametrize("architecture", REFERENCE_MODELS)
def test_each_architecture_maps_back_to_the_model_it_was_converted_from(
    architecture: str, gguf_file: WriteGguf, as_artifact: AsArtifact
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    class_name, extra = REFERENCE_MODELS[architecture]
    model_class = getattr(transformers, class_name)
    fields = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 256,
              "rms_norm_eps": 1e-6, **extra}  # fmt: skip
    torch.manual_seed(5)
    model = model_class(model_class.config_class(**fields, tie_word_embeddings=architecture == "gemma3"))
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    if architecture == "gemma3":
        state.pop("lm_head.weight")
    names = gguf.get_tensor_name_map({value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], 2)
    tensors = {}
    for name, value in state.items():
        stem, _, suffix = name.rpartition(".")
        tensors[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(
            stored_form(name, value, architecture, (4, 2))
        )
    metadata = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "attention.head_count": 4,
                "attention.head_count_kv": 2, "context_length": 256, "attention.layer_norm_rms_epsilon": 1e-6,
                "rope.freq_base": 5e5, "attention.key_length": 16}  # fmt: skip
    path = gguf_file(architecture=architecture, metadata=metadata, tensors=tensors)
    info, found = load(as_artifact(path))
    assert info.architecture == class_name
    assert set(found) == set(state)
    for name, tensor in found.items():
        if architecture == "gemma3" and name.endswith("norm.weight"):
            np.testing.assert_allclose(dense(tensor), state[name], atol=1e-6)
        else:
            np.testing.assert_array_equal(dense(tensor), state[name], err_msg=name)
    assert info.config["attention_bias"] is (architecture == "qwen2")
    assert info.config["tie_word_embeddings"] is (architecture == "gemma3")
    assert (info.config["rope_theta"], info.config["head_dim"]) == (5e5, 16)


def test_rotary_factors_of_llama_3_are_recognized(
    gguf_file: WriteGguf, as_artifact: AsArtifact, make_llama_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    torch = pytest.importorskip("torch")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 5e5}  # fmt: skip
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, rope_parameters=dict(scaling))
    scaled, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** (-np.arange(0, 8, 2) / 8)
    tensors = make_llama_tensors()
    tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    metadata = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4,
                "attention.head_count_kv": 2, "context_length": 131072, "rope.freq_base": 5e5,
                "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    info, found = load(as_artifact(gguf_file(tensors=tensors, metadata=metadata)))
    del scaling["rope_theta"]
    assert info.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in found
    tensors["rope_freqs.weight"] = np.array([1, 2, 3, 4], np.float32)
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        load(as_artifact(gguf_file(name="odd.gguf", tensors=tensors, metadata=metadata)))


def test_stated_rotary_scaling_becomes_configuration(gguf_file: WriteGguf, as_artifact: AsArtifact) -> None:
    base = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4,
            "attention.head_count_kv": 2, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
    linear = {**base, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    info, _ = load(as_artifact(gguf_file(metadata=linear)))
    assert info.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    for name, stated in {"old.gguf": {"rope.scale_linear": 4.0}, "typeless.gguf": {"rope.scaling.factor": 4.0}}.items():
        info, _ = load(as_artifact(gguf_file(name=name, metadata={**base, **stated})))
        assert info.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}, name
    info, _ = load(as_artifact(gguf_file(name="one.gguf", metadata={**base, "rope.scale_linear": 1.0})))
    assert "rope_scaling" not in info.config
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        load(as_artifact(gguf_file(name="long.gguf", metadata={**base, "rope.scaling.type": "longrope"})))
    with pytest.raises(ModelFormatError, match="scaling.factor"):
        load(as_artifact(gguf_file(name="no.gguf", metadata={**base, "rope.scaling.type": "yarn"})))
    with pytest.raises(UnsupportedModelError, match="attn_factor"):
        load(as_artifact(gguf_file(name="attn.gguf", metadata={**linear, "rope.scaling.attn_factor": 1.0})))
    partial = {**base, "attention.key_length": 8, "rope.dimension_count": 4}
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count' is 4, but only whole heads of 8"):
        load(as_artifact(gguf_file(name="partial.gguf", metadata=partial)))


def test_a_stated_yarn_attention_factor_multiplies_the_usual_one(gguf_file: WriteGguf, as_artifact: AsArtifact) -> None:
    metadata = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "attention.head_count": 4,
                "attention.head_count_kv": 2, "context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5,
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.0,
                "rope.scaling.original_context_length": 32}  # fmt: skip
    info, _ = load(as_artifact(gguf_file(metadata=metadata)))
    assert info.config["rope_scaling"]["attention_factor"] == pytest.approx(1 + 0.1 * np.log(4.0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"architecture": "rwkv7"},
            UnsupportedModelError,
            "'rwkv7' is not supported; supported are bert, bloom, deepseek2,",
        ),
        ({"metadata": {"embedding_length": 32}}, ModelFormatError, "llama.block_count' is missing"),
        ({"tensors": {"x": np.ones(32, np.float32)}}, ModelFormatError, "token_embd.weight"),
    ],
)
def test_unusable_files_say_why(
    gguf_file: WriteGguf, as_artifact: AsArtifact, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = gguf_file(**change)
    with pytest.raises(error, match=message) as caught:
        load(as_artifact(path))
    assert str(path) in str(caught.value)


def test_an_unknown_tensor_is_refused_when_described(
    gguf_file: WriteGguf, as_artifact: AsArtifact, make_llama_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    tensors = {**make_llama_tensors(), "blk.0.attn_sinks.weight": np.ones(32, np.float32)}
    with pytest.raises(UnsupportedModelError, match="blk.0.attn_sinks.weight"):
        GgufWeightLoader().describe(as_artifact(gguf_file(tensors=tensors)))


def test_turn_ends_of_the_chat_template_end_generation(gguf_file: WriteGguf, as_artifact: AsArtifact) -> None:
    vocabulary = {"ggml.model": "gpt2", "ggml.eos_token_id": 0,
                  "ggml.tokens": ["<eos>", "<end_of_turn>", "<|eot_id|>", "a", "b", "c", "d", "e"],
                  "ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1],
                  "chat_template": "{{ messages }}<end_of_turn>"}  # fmt: skip
    info = GgufWeightLoader().describe(as_artifact(gguf_file(vocabulary=vocabulary)))
    assert info.eos_token_ids == (0, 1)


def test_the_context_decides_about_packing(gguf_file: WriteGguf, as_artifact: AsArtifact) -> None:
    artifact = as_artifact(gguf_file(types={"blk.0.ffn_up.weight": Quant.Q8_0}))
    for packed in (False, True):
        context = WeightLoaderContext(name="gguf", api_version=1, roles=frozenset(), packed=packed)
        loader = create(context, NoOptions())
        tensors = {tensor.name: tensor for tensor in loader.tensors(loader.describe(artifact))}
        assert (tensors["model.layers.0.mlp.up_proj.weight"].dtype == "gguf.q8_0") is packed
