"""Checkpoints as they are found: in shards, fused or split, tied or not, with biases; and what does not fit is named.

Each is written to a folder and read by the installed loader. Whichever way weights are stored, the logits are the same
bits, and close to those of ``transformers``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hardpoint.errors import ModelFormatError
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_testing_torch import (
    LocalDriver,
    TinyModel,
    build_model,
    installed_factory,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_testing_torch.tiny_models import model_info

Tensors = dict[str, torch.Tensor]
HEADS, KV_HEADS = 4, 2
PROMPT = [3, 1, 4, 15, 92, 65, 35, 8]
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "mistral-tied": ("MistralForCausalLM", {"tie_word_embeddings": True}),
}


def made(folder: Path, family: str, **changes: Any) -> TinyModel:
    architecture, config = FAMILIES[family]
    return make_tiny_model(architecture, folder, num_hidden_layers=2, **{**config, **changes})


def write(folder: Path, tensors: Tensors, num_shards: int = 1, **config: Any) -> Path:
    """``tensors`` in place of the weights in ``folder``, in so many files; ``config`` changes fields of its file."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if num_shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = dict(list(tensors.items())[shard::num_shards])
        save_file({key: tensor.contiguous() for key, tensor in mine.items()}, folder / name)
        weight_map |= dict.fromkeys(mine, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def logits(folder: Path, architecture: str) -> torch.Tensor:
    """float32 [tokens, vocabulary] of the prompt. Raises what loading raises."""
    loader = installed_loader("safetensors")
    info = loader.describe(model_info(folder, architecture).artifact)
    factory = installed_factory("model", architecture)
    model, toolkit = build_model(factory, loader, worker_config(info), ReferenceBackend())
    return LocalDriver(model, toolkit).step({"prompt": PROMPT})["prompt"]


def split(tensors: Tensors, head_size: int) -> Tensors:
    """Every projection apart."""
    apart: Tensors = {}
    for name, tensor in tensors.items():
        if ".qkv_proj." in name:
            sizes = [HEADS * head_size, KV_HEADS * head_size, KV_HEADS * head_size]
            apart |= {name.replace("qkv", part): rows for part, rows in zip("qkv", tensor.split(sizes), strict=True)}
        elif ".gate_up_proj." in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            apart |= {name.replace("gate_up", part): rows for part, rows in parts}
        else:
            apart[name] = tensor
    return apart


def fused(tensors: Tensors, *, attention: bool = True, feed_forward: bool = True) -> Tensors:
    """The projections that read the same input in one."""
    groups: list[tuple[str, str, tuple[str, ...]]] = []
    if attention:
        groups.append(("self_attn.{}_proj", "qkv", ("q", "k", "v")))
    if feed_forward:
        groups.append(("mlp.{}_proj", "gate_up", ("gate", "up")))
    joined = dict(tensors)
    for pattern, whole, parts in groups:
        first = f".{pattern.format(parts[0])}."
        for name in [name for name in tensors if first in name]:
            pieces = [joined.pop(name.replace(first, f".{pattern.format(part)}.")) for part in parts]
            joined[name.replace(first, f".{pattern.format(whole)}.")] = torch.cat(pieces)
    return joined


WAYS: Mapping[str, Callable[[Tensors], Tensors]] = {
    "split": lambda apart: apart,
    "fused": fused,
    "attention fused": lambda apart: fused(apart, feed_forward=False),
    "feed-forward fused": lambda apart: fused(apart, attention=False),
    "backwards": lambda apart: dict(reversed(apart.items())),
    "with tables of old files": lambda apart: {**apart, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
}


QUICK = ("llama-biases", "phi3")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_however_weights_are_stored_the_logits_are_the_same(family: str, tmp_path: Path) -> None:
    """Fused and split, with biases and without, in one file and in three."""
    tiny = made(tmp_path, family)
    architecture, expected = FAMILIES[family][0], tiny.logits(PROMPT)
    reference = logits(tmp_path, architecture)
    assert relative_error(reference, expected) < 1e-5
    apart = split(tiny.tensors(), tiny.info.config.get("head_dim") or 48 // HEADS)
    for way, store in WAYS.items():
        for num_shards in (1, 3) if way == "fused" else (1,):
            stored = store(apart)
            assert way == "split" or list(stored) != list(apart)
            assert torch.equal(logits(write(tmp_path, stored, num_shards), architecture), reference), way
            for path in (tmp_path / "model.safetensors.index.json", *tmp_path.glob("model-*")):
                path.unlink(missing_ok=True)


def test_a_head_may_be_stored_though_it_is_tied(tmp_path: Path) -> None:
    """Equal values are one matrix; others are taken at their word, as ``transformers`` does."""
    tiny = made(tmp_path, "mistral-tied")
    stored, architecture = tiny.tensors(), "MistralForCausalLM"
    assert "lm_head.weight" not in stored
    reference = logits(tmp_path, architecture)
    table = stored["model.embed_tokens.weight"]
    for num_shards in (1, 3):
        write(tmp_path, stored | {"lm_head.weight": table.clone()}, num_shards)
        assert torch.equal(logits(tmp_path, architecture), reference)
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
        for path in tmp_path.glob("model-*"):
            path.unlink()


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": None}], ids=["said", "left-out"])
def test_a_head_of_other_values_is_no_tied_one(change: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the configuration says, or what its family says where the field is left out."""
    tiny = make_tiny_model("Gemma2ForCausalLM", tmp_path, head_dim=16, num_hidden_layers=2)
    tied = logits(tmp_path, "Gemma2ForCausalLM")
    own = torch.randn(tiny.tensors()["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(3))
    write(tmp_path, tiny.tensors() | {"lm_head.weight": own})
    path = tmp_path / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name not in change}
    path.write_text(json.dumps(kept))
    found = logits(tmp_path, "Gemma2ForCausalLM")
    oracle = type(tiny.oracle).from_pretrained(tmp_path).eval()
    assert relative_error(found, oracle(torch.tensor([PROMPT])).logits[0].detach()) < 1e-5
    assert relative_error(found, tied) > 1e-2


def refusal(folder: Path, tensors: Tensors, architecture: str = "LlamaForCausalLM", **config: Any) -> str:
    with pytest.raises(ModelFormatError) as caught:
        logits(write(folder, tensors, **config), architecture)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    stored = made(tmp_path, "llama").tensors()
    del stored["lm_head.weight"]
    assert "missing lm_head.weight" in refusal(tmp_path, stored)


def test_a_tied_embedding_that_is_missing_is_named(tmp_path: Path) -> None:
    stored = made(tmp_path, "mistral-tied").tensors()
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    assert "missing model.embed_tokens.weight" in refusal(tmp_path, stored, "MistralForCausalLM")


LAYER = "model.layers.1"
ATTENTION, FEED = f"{LAYER}.self_attn", f"{LAYER}.mlp"


@pytest.mark.parametrize(
    ("family", "lost", "named"),
    [
        ("llama", f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.k_proj.weight"),
        ("llama", f"{FEED}.up_proj.weight", f"{FEED}.up_proj.weight"),
        ("llama-biases", f"{ATTENTION}.v_proj.bias", f"{ATTENTION}.v_proj.bias"),
        ("llama-biases", f"{FEED}.down_proj.bias", f"{FEED}.down_proj.bias"),
        ("qwen2", f"{ATTENTION}.q_proj.bias", f"{ATTENTION}.q_proj.bias"),
        ("qwen3", f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.q_norm.weight"),
        ("phi3", f"{ATTENTION}.qkv_proj.weight", f"{ATTENTION}.q_proj.weight or {ATTENTION}.qkv_proj.weight"),
        ("phi3", f"{FEED}.gate_up_proj.weight", f"{FEED}.gate_proj.weight or {FEED}.gate_up_proj.weight"),
    ],
)
def test_what_is_missing_is_named(family: str, lost: str, named: str, tmp_path: Path) -> None:
    stored = made(tmp_path, family).tensors()
    del stored[lost]
    message = refusal(tmp_path, stored, FAMILIES[family][0])
    assert "missing" in message
    assert named in message


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", f"{ATTENTION}.q_proj.bias"),
        ("llama", f"{FEED}.gate_proj.bias"),
        ("qwen2", f"{ATTENTION}.o_proj.bias"),
        ("llama", f"{ATTENTION}.q_norm.weight"),
        ("llama", "model.layers.2.input_layernorm.weight"),
        ("llama", f"{ATTENTION}.q_proj.weight_scale"),
        ("llama", f"{ATTENTION}.q_proj.qweight"),
        ("llama", "model.extra.weight"),
        ("llama", "vision_tower.patch.weight"),
        ("mistral-tied", "lm_head.bias"),
    ],
)
def test_what_nothing_computes_with_is_named(family: str, name: str, tmp_path: Path) -> None:
    """Biases that the configuration denies, layers behind the last, scales of quantized weights."""
    stored = made(tmp_path, family).tensors()
    message = refusal(tmp_path, stored | {name: torch.ones(48)}, FAMILIES[family][0])
    assert f"1 tensors unexpected {name}" in message


def test_parts_that_are_stored_fused_as_well_are_named(tmp_path: Path) -> None:
    stored = made(tmp_path, "llama").tensors()
    both = stored | {name: tensor for name, tensor in fused(stored).items() if f"{ATTENTION}.qkv_proj" in name}
    assert "(loaded already, by this or another name)" in refusal(tmp_path, both)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "o_proj"])
def test_a_shape_that_is_another_models_is_named(part: str, tmp_path: Path) -> None:
    stored = made(tmp_path, "llama").tensors()
    name = f"{ATTENTION}.{part}.weight"
    stored[name] = stored[name][:-4]
    message = refusal(tmp_path, stored)
    assert f"{name} [{len(stored[name])}, 48] (expected [{len(stored[name]) + 4}, 48])" in message


def test_a_shard_that_is_missing_is_named_before_anything_is_built(tmp_path: Path) -> None:
    stored = made(tmp_path, "llama").tensors()
    write(tmp_path, stored, num_shards=3)
    lost = tmp_path / "model-00002-of-00003.safetensors"
    lost.unlink()
    with pytest.raises(ModelFormatError, match=r"model-00002-of-00003\.safetensors is missing"):
        installed_loader("safetensors").describe(model_info(tmp_path, "LlamaForCausalLM").artifact)
