"""Bamba and Granite 4 against Hugging Face on tiny random weights: logits, greedy tokens, every stored layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import model_cases
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.hybrid import create_bamba, create_granite_hybrid
from hardpoint_testing_torch import ParityHarness, check_parity, make_tiny_model
from hardpoint_testing_torch.local_driver import ModelFactory

# The oracle pads sequences to whole chunks.
SMALL_CHUNKS: Mapping[str, Any] = {"mamba_chunk_size": 16}
BAMBA: Mapping[str, Any] = {**model_cases.BAMBA, **SMALL_CHUNKS}
GRANITE: Mapping[str, Any] = {**model_cases.GRANITE, **SMALL_CHUNKS}
RECURRENT: Mapping[str, Any] = {"attn_layer_indices": None, "use_cache": False}
"""Recurrent layers alone, whose cache the oracle cannot handle."""

TWO_LAYERS: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {**BAMBA, "num_hidden_layers": 2},
    "GraniteMoeHybridForCausalLM": {
        **GRANITE,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
FAMILIES = [
    pytest.param("BambaForCausalLM", create_bamba, BAMBA, id="bamba"),
    pytest.param("GraniteMoeHybridForCausalLM", create_granite_hybrid, GRANITE, id="granite"),
]
AWKWARD_BAMBA: Mapping[str, Any] = {
    **BAMBA,
    "attn_layer_indices": [0, 2],
    "mamba_n_heads": 12,
    "mamba_n_groups": 3,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": (0.01, 0.9),
}
AWKWARD_GRANITE: Mapping[str, Any] = {
    **GRANITE,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "mamba_n_groups": 2,
    "mamba_expand": 1,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
VARIANTS = [
    pytest.param("BambaForCausalLM", create_bamba, AWKWARD_BAMBA, id="bamba-awkward"),
    pytest.param("BambaForCausalLM", create_bamba, {**BAMBA, **RECURRENT}, id="no-attention-at-all"),
    pytest.param("GraniteMoeHybridForCausalLM", create_granite_hybrid, AWKWARD_GRANITE, id="granite-awkward"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "factory", "config"), [*FAMILIES, *VARIANTS])
def test_prefill_chunks_decode_mixed_batches_and_greedy_tokens(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    check_parity(make_tiny_model(architecture, tmp_path, **config), factory, ReferenceBackend())


@pytest.mark.parametrize(
    ("architecture", "factory"),
    [("BambaForCausalLM", create_bamba), ("GraniteMoeHybridForCausalLM", create_granite_hybrid)],
)
def test_mixed_batches_and_lost_blocks(architecture: str, factory: ModelFactory, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path, **TWO_LAYERS[architecture])
    harness = ParityHarness(tiny, factory, ReferenceBackend())
    assert harness.batched((12, 3, 7)) < 1e-4
    assert harness.preempted((9, 14)) < 1e-4


def test_experts_as_hugging_face_computes_with_them(tmp_path: Path) -> None:
    """Stacks under other names, which it saves when told not to restore the original layout."""
    architecture = "GraniteMoeHybridForCausalLM"
    tiny = make_tiny_model(architecture, tmp_path, **TWO_LAYERS[architecture])
    original = set(tiny.tensors())
    tiny.oracle.save_pretrained(tmp_path, save_original_format=False)
    assert set(tiny.tensors()) != original
    assert ParityHarness(tiny, create_granite_hybrid, ReferenceBackend()).prefill(9) < 1e-4


def test_what_a_hybrid_keeps_in_the_cache(tmp_path: Path) -> None:
    """In model order: float32 states of constant size beside keys and values."""
    tiny = make_tiny_model("BambaForCausalLM", tmp_path, **BAMBA)
    specs = ParityHarness(tiny, create_bamba, ReferenceBackend()).model.kv_cache_specs()
    assert list(specs) == ["model.layers.0.mixer", "model.layers.1.self_attn.attn", "model.layers.2.mixer"]
    state = specs["model.layers.0.mixer"]
    assert state.kind == "mamba"
    # Inputs of the convolution: 96 channels and twice 8. States: 6 heads of 16 by 8.
    assert state.unpadded_page_size_bytes == 4 * (3 * (96 + 2 * 8) + 6 * 16 * 8)
    assert state.max_blocks(1000, 1000) == 1
