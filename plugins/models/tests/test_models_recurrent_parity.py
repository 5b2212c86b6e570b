"""Mamba, Mamba-2, Jamba and Qwen3-Next against Hugging Face on tiny random weights: logits, tokens, stored layouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import model_cases_recurrent as cases
from hardpoint.interfaces.kv_cache_specs import MambaSpec
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.jamba import create_jamba
from hardpoint_models.mamba import create_mamba, create_mamba2
from hardpoint_models.qwen3_next import create_qwen3_next
from hardpoint_testing_torch import ParityHarness, check_parity, make_tiny_model
from hardpoint_testing_torch.local_driver import ModelFactory

LIMITED: Mapping[str, Any] = {"max_position_embeddings": 256}
"""The driver serves as many tokens as a configuration says."""
RECURRENT: Mapping[str, Any] = {
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "attn_layer_period": 9,
    "attn_layer_offset": 8,
    "use_cache": False,
}
FAMILIES = [
    pytest.param("JambaForCausalLM", create_jamba, cases.JAMBA, id="jamba"),
    pytest.param("Mamba2ForCausalLM", create_mamba2, cases.MAMBA2, id="mamba2"),
    pytest.param("MambaForCausalLM", create_mamba, cases.MAMBA, id="mamba"),
    pytest.param("Qwen3NextForCausalLM", create_qwen3_next, cases.QWEN3_NEXT, id="qwen3-next"),
]
AWKWARD = [
    pytest.param("JambaForCausalLM", create_jamba, cases.AWKWARD_JAMBA, id="jamba-awkward"),
    pytest.param("Mamba2ForCausalLM", create_mamba2, cases.AWKWARD_MAMBA2, id="mamba2-awkward"),
    pytest.param("MambaForCausalLM", create_mamba, cases.AWKWARD_MAMBA, id="mamba-awkward"),
    pytest.param("Qwen3NextForCausalLM", create_qwen3_next, cases.AWKWARD_QWEN3_NEXT, id="qwen3-next-awkward"),
    # One expert is a dense block; no layer attends, which the cache of the oracle cannot handle.
    pytest.param("JambaForCausalLM", create_jamba, {**cases.JAMBA, **RECURRENT}, id="jamba-dense-and-recurrent"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "factory", "config"), [*FAMILIES, *AWKWARD])
def test_prefill_chunks_decode_mixed_batches_and_greedy_tokens(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    check_parity(make_tiny_model(architecture, tmp_path, **{**config, **LIMITED}), factory, ReferenceBackend())


@pytest.mark.parametrize(("architecture", "factory", "config"), FAMILIES)
def test_mixed_batches_and_lost_blocks(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    tiny = make_tiny_model(architecture, tmp_path, **{**config, **LIMITED})
    harness = ParityHarness(tiny, factory, ReferenceBackend())
    assert harness.batched((12, 3, 7)) < 1e-4
    assert harness.preempted((9, 14)) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "factory", "config"),
    [("JambaForCausalLM", create_jamba, cases.JAMBA), ("Qwen3NextForCausalLM", create_qwen3_next, cases.QWEN3_NEXT)],
)
def test_experts_apart_and_stacked(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    """Both layouts that are found: each expert by itself, and as Hugging Face computes with them."""
    tiny = make_tiny_model(architecture, tmp_path, **config)
    original = set(tiny.tensors())
    tiny.oracle.save_pretrained(tmp_path, save_original_format=False)
    assert set(tiny.tensors()) != original
    assert ParityHarness(tiny, factory, ReferenceBackend()).prefill(9) < 1e-4


def test_layers_that_predict_further_tokens_are_left_in_the_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tiny = make_tiny_model("Qwen3NextForCausalLM", tmp_path, **cases.QWEN3_NEXT)
    tensors = tiny.tensors()
    for name in ("mtp.norm.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight", "mtp.fc.weight"):
        tensors[name] = tensors["model.norm.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert ParityHarness(tiny, create_qwen3_next, ReferenceBackend()).prefill(9) < 1e-4


def test_the_first_name_of_the_embedding(tmp_path: Path) -> None:
    """Early Mamba checkpoints say ``embedding`` where later ones say ``embeddings``."""
    from safetensors.torch import save_file

    tiny = make_tiny_model("MambaForCausalLM", tmp_path, **{**cases.MAMBA, **LIMITED})
    tensors = {name.replace("embeddings", "embedding"): tensor for name, tensor in tiny.tensors().items()}
    assert "backbone.embedding.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    assert ParityHarness(tiny, create_mamba, ReferenceBackend()).prefill(9) < 1e-4


@pytest.mark.parametrize(
    ("architecture", "factory", "config", "size"),
    [
        # Inputs of the convolution, and 8 states of each of 96 channels.
        ("MambaForCausalLM", create_mamba, cases.MAMBA, 3 * 96 + 96 * 8),
        # Two keys of 12, twice, and values of 32; 4 heads of 12 by 8.
        ("Qwen3NextForCausalLM", create_qwen3_next, cases.QWEN3_NEXT, 3 * (2 * 24 + 32) + 4 * 12 * 8),
    ],
)
def test_what_is_kept_of_a_sequence(
    architecture: str, factory: ModelFactory, config: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """float32 states of constant size, and nothing else where no layer attends."""
    tiny = make_tiny_model(architecture, tmp_path, **{**config, **LIMITED})
    specs = ParityHarness(tiny, factory, ReferenceBackend()).model.kv_cache_specs()
    states = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
    assert len(specs) == 3
    assert len(states) == (3 if architecture == "MambaForCausalLM" else 2)
    assert {(spec.unpadded_page_size_bytes, spec.max_blocks(1000, 1000)) for spec in states} == {(4 * size, 1)}
