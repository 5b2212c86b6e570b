"""DeepSeek V3 over two and four tensor-parallel ranks, one after another in one process, against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hardpoint_models.deepseek import create_deepseek_v3
from hardpoint_testing_torch import make_tiny_model, relative_error
from rank_models import ask_ranks

TINY: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "attention_bias": True,
}
PROMPT, CHUNKS = [3, 1, 4, 1, 5, 9, 2, 6, 5], (6, 2, 1)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        pytest.param(2, {}, id="two"),
        pytest.param(4, {"q_lora_rank": None}, id="four-plain-queries", marks=pytest.mark.slow),
    ],
)
def test_ranks_together_are_the_whole(size: int, config: dict[str, Any], tmp_path: Path) -> None:
    """Heads, experts and vocabulary are split, latents are not; every rank ends up with all logits."""
    tiny = make_tiny_model("DeepseekV3ForCausalLM", tmp_path, **{**TINY, "q_lora_rank": 14, **config})
    found, expected = ask_ranks(create_deepseek_v3, tiny, size, {"a": PROMPT}, chunks=CHUNKS), tiny.logits(PROMPT)
    for answer in found.logits:
        assert relative_error(answer["a"], expected) < 1e-4
    per_forward = 1 + 2 * TINY["num_hidden_layers"] + 1
    assert found.num_exchanges == per_forward * len(CHUNKS), "embedding, two sums per layer, and the logits"
