"""Gemma 3 against Hugging Face on tiny random weights, on sequences several windows long."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec, SlidingWindowSpec
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.gemma3 import create_gemma3
from hardpoint_testing_torch import (
    ParityHarness,
    StateDictLoader,
    build_model,
    check_parity,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_testing_torch.local_driver import LocalDriver
from hardpoint_testing_torch.tiny_models import TinyModel

HYBRID: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
}
SCALED: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}


def tiny_gemma(folder: Path, **changes: Any) -> TinyModel:
    return make_tiny_model("Gemma3ForCausalLM", folder, **{**HYBRID, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"final_logit_softcapping": 6.0}, id="capped-logits"),
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"rope_parameters": SCALED}, id="two-rotations", marks=pytest.mark.slow),
        pytest.param({"tie_word_embeddings": False, "attention_bias": True}, id="untied", marks=pytest.mark.slow),
        pytest.param(
            {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 20}, id="mqa", marks=pytest.mark.slow
        ),
        pytest.param({"layer_types": None, "num_hidden_layers": 7}, id="one-in-six", marks=pytest.mark.slow),
        pytest.param({"layer_types": ["sliding_attention"] * 3}, id="windows-only", marks=pytest.mark.slow),
        pytest.param({"layer_types": ["full_attention"] * 3}, id="full-only", marks=pytest.mark.slow),
        pytest.param({"sliding_window": 1}, id="own-token-only", marks=pytest.mark.slow),
    ],
)
def test_prefill_chunks_decode_and_mixed_batches(changes: dict[str, Any], tmp_path: Path) -> None:
    check_parity(tiny_gemma(tmp_path, **changes), create_gemma3, ReferenceBackend())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_other_block_sizes(block_size: int, tmp_path: Path) -> None:
    check_parity(tiny_gemma(tmp_path), create_gemma3, ReferenceBackend(), block_size=block_size)


def test_scores_are_capped_where_the_configuration_says_so(tmp_path: Path) -> None:
    """Hugging Face's layers of this family never hand the cap on, though its plain attention knows it."""
    cap = 2.0
    AttentionInterface.register("eager_capped", partial(eager_attention_forward, softcap=cap))
    AttentionMaskInterface.register("eager_capped", eager_mask)
    tiny = tiny_gemma(tmp_path, attn_logit_softcapping=cap)
    harness = ParityHarness(tiny, create_gemma3, ReferenceBackend())
    assert harness.prefill() > 1e-3, "without the cap the oracle computes something else"
    tiny.oracle.set_attn_implementation("eager_capped")
    assert max(harness.prefill(), harness.chunked(), harness.batched()) < 1e-4


def test_layers_ask_for_the_cache_that_they_need(tmp_path: Path) -> None:
    tiny = tiny_gemma(tmp_path)
    model, _ = build_model(create_gemma3, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend())
    specs = list(model.kv_cache_specs().values())
    assert [type(spec) for spec in specs] == [SlidingWindowSpec, FullAttentionSpec, SlidingWindowSpec]
    assert {spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)} == {7}


def test_computing_in_bfloat16_stays_near(tmp_path: Path) -> None:
    tiny = tiny_gemma(tmp_path, dtype=torch.bfloat16)
    config = worker_config(tiny.info, dtype="bfloat16")
    model, toolkit = build_model(create_gemma3, StateDictLoader(tiny.tensors()), config, ReferenceBackend())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    prompt = list(range(3, 40))
    logits = LocalDriver(model, toolkit).step({"a": prompt})["a"]
    assert relative_error(logits.float(), tiny.logits(prompt)) < 0.05
