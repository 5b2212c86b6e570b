"""Decoders with other norms, factors, windows or rotations, against Hugging Face on tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.interfaces.model import StageOutput, StageRange
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.decoder import DecoderModel
from hardpoint_models.gemma2 import create_gemma2
from hardpoint_models.granite import create_granite, create_granite_moe
from hardpoint_models.llama import create_llama
from hardpoint_models.olmo import create_olmo2, create_olmo3
from hardpoint_models.phi3 import create_phi3
from hardpoint_models.smollm3 import create_smollm3
from hardpoint_testing_torch import (
    StateDictLoader,
    build_model,
    check_parity,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_testing_torch.local_driver import LocalDriver, ModelFactory
from hardpoint_torch_runtime.lowering import NotStandard, StandardStack

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA2: dict[str, Any] = {"sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 24}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 5.0,
}
ODD: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}
SMOLLM3: dict[str, Any] = {**NO_IDS, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7}
FAMILIES: dict[str, tuple[str, ModelFactory, dict[str, Any]]] = {
    "gemma2": ("Gemma2ForCausalLM", create_gemma2, {**GEMMA2, "attn_logit_softcapping": 3.0}),
    "granite": ("GraniteForCausalLM", create_granite, GRANITE),
    "granite-moe": ("GraniteMoeForCausalLM", create_granite_moe, {**GRANITE, "num_local_experts": 4}),
    "olmo2": ("Olmo2ForCausalLM", create_olmo2, NO_IDS),
    "olmo3": ("Olmo3ForCausalLM", create_olmo3, {**NO_IDS, "sliding_window": 7, "num_hidden_layers": 4}),
    "phi3": ("Phi3ForCausalLM", create_phi3, {**NO_IDS, "sliding_window": 7}),
    "smollm3": ("SmolLM3ForCausalLM", create_smollm3, SMOLLM3),
}
QUICK = ("gemma2", "granite", "olmo2", "smollm3")
PROMPT = list(range(2, 40))


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_prefill_chunks_decode_and_mixed_batches(family: str, tmp_path: Path) -> None:
    architecture, factory, config = FAMILIES[family]
    check_parity(make_tiny_model(architecture, tmp_path, **{**ODD, **config}), factory, ReferenceBackend())


def built(folder: Path, family: str, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Any:
    """(tiny model, our model, its toolkit)."""
    architecture, factory, config = FAMILIES[family]
    tiny = make_tiny_model(architecture, folder, **{**config, **changes})
    loader = StateDictLoader(tiny.tensors() if tensors is None else tensors)
    return tiny, *build_model(factory, loader, worker_config(tiny.info), ReferenceBackend())


def split(tensors: dict[str, torch.Tensor], heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """The same checkpoint with every projection apart."""
    apart = {name: tensor for name, tensor in tensors.items() if "qkv_proj" not in name and "gate_up" not in name}
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            size = len(tensor) // (heads + 2 * kv_heads)
            parts = tensor.split([heads * size, kv_heads * size, kv_heads * size])
            apart |= {name.replace("qkv", part): rows for part, rows in zip("qkv", parts, strict=True)}
        elif "gate_up" in name:
            gate, up = tensor.chunk(2)
            apart |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return apart


def test_fused_and_split_checkpoints_are_one_model(tmp_path: Path) -> None:
    """Phi-3 is stored fused and Llama split; either is read both ways."""
    tiny, fused, _ = built(tmp_path / "a", "phi3")
    apart = split(tiny.tensors(), 4, 2)
    assert "model.layers.0.self_attn.v_proj.weight" in apart
    _, parted, _ = built(tmp_path / "b", "phi3", apart)
    llama = make_tiny_model("LlamaForCausalLM", tmp_path / "c")
    taken, _ = build_model(create_llama, StateDictLoader(tiny.tensors()), worker_config(llama.info), ReferenceBackend())
    assert isinstance(taken, torch.nn.Module)
    for (name, one), (_, two), (_, three) in zip(
        fused.named_parameters(), parted.named_parameters(), taken.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
        assert torch.equal(one, three), name


NEWER_NAMES = {
    "router.layer.weight": "router.weight",
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
}


def test_older_and_newer_names_of_experts_are_one_model(tmp_path: Path) -> None:
    def renamed(tensors: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
        parts = [(name, *name.partition("block_sparse_moe.")) for name in tensors]
        return {head + dot + names.get(rest, rest): tensors[name] for name, head, dot, rest in parts}

    tiny = make_tiny_model("GraniteMoeForCausalLM", tmp_path / "a", **FAMILIES["granite-moe"][2])
    newer = renamed(tiny.tensors(), NEWER_NAMES)
    older = renamed(newer, {new: old for old, new in NEWER_NAMES.items()})
    assert "model.layers.0.block_sparse_moe.experts.gate_up_proj" in newer
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in older
    models = [built(tmp_path / name, "granite-moe", tensors)[1] for name, tensors in (("b", newer), ("c", older))]
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("family", ["granite", "olmo2", "smollm3"])
def test_two_stages_are_the_whole(family: str, tmp_path: Path) -> None:
    """Factors on embeddings apply once, and layers keep their kind wherever the model is cut."""
    architecture, factory, config = FAMILIES[family]
    tiny = make_tiny_model(architecture, tmp_path, **config)
    stages = [StageRange(0, 1, has_head=False), StageRange(1, 3, has_embedding=False)]
    halves = [
        build_model(factory, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend(), stage=stage)
        for stage in stages
    ]
    first, last = (LocalDriver(model, toolkit) for model, toolkit in halves)
    handed_on = first.run({"a": PROMPT})
    assert isinstance(handed_on, StageOutput)
    hidden = last.run({"a": PROMPT}, intermediates=handed_on.intermediates)
    assert isinstance(hidden, torch.Tensor)
    assert relative_error(halves[1][0].logits(hidden), tiny.logits(PROMPT)) < 1e-4


def test_given_embeddings_are_scaled_as_looked_up_ones_and_stay_untouched(tmp_path: Path) -> None:
    tiny, model, toolkit = built(tmp_path, "granite")
    embeddings = model.embed(torch.tensor(PROMPT))
    before = embeddings.clone()
    hidden = LocalDriver(model, toolkit).run({"a": PROMPT}, embeddings=embeddings)
    assert torch.equal(embeddings, before)
    assert isinstance(hidden, torch.Tensor)
    assert relative_error(model.logits(hidden), tiny.logits(PROMPT)) < 1e-4


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("granite", "model.layers.0 scales what it adds to the residual by 0.4"),
        ("granite-moe", "the feed-forward block of model.layers.0 is a MixtureOfExperts"),
        ("olmo2", "works on hidden states that are not normalized"),
        ("smollm3", "heads of model.layers.1 do not rotate"),
        ("phi3", None),
        ("gemma2", None),
    ],
)
def test_what_compilers_are_told(family: str, reason: str | None, tmp_path: Path) -> None:
    """A block that cannot say what a layer does must not be described as if it could."""
    _, model, _ = built(tmp_path, family)
    assert isinstance(model, DecoderModel)
    told = model.model.describe()
    if reason is None:
        assert isinstance(told, StandardStack)
    else:
        assert isinstance(told, NotStandard)
        assert reason in told.reason
