"""The configurations in which the model plugin ``transformers`` is compared: of architectures without a plugin of their
own, and of one that has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import LLAMA3, ODD_HEADS, ROUTED
from hardpoint_testing_torch import ParityCase

__all__ = ["FALLBACK_CASES"]

_TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""The usual ones are beyond a tiny vocabulary."""
_WINDOWS: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
}
_NAMED: Mapping[str, Mapping[str, Any]] = {"": {"worker": {"torch": {"model": "transformers"}}}}

FALLBACK_CASES: tuple[ParityCase, ...] = (
    ParityCase("CohereForCausalLM", _TOKENS, "plain"),
    ParityCase(
        "CohereForCausalLM",
        {**_TOKENS, "use_qk_norm": True, "hidden_size": 60, "num_attention_heads": 6},
        "odd heads, norms",
        skipped={"tp2": "the plan of transformers divides heads, but not the norms that they have each"},
    ),
    ParityCase("Cohere2ForCausalLM", {**_TOKENS, **_WINDOWS}, "windows of 7"),
    ParityCase("Glm4ForCausalLM", {**_TOKENS, "head_dim": 16}, "plain"),
    ParityCase("NemotronForCausalLM", _TOKENS, "plain"),
    ParityCase("OlmoeForCausalLM", {**_TOKENS, "num_experts": 6, "num_experts_per_tok": 2}, "plain", limits=ROUTED),
    ParityCase("Ernie4_5ForCausalLM", {**_TOKENS, **ODD_HEADS, "use_bias": True}, "odd heads, biases"),
    ParityCase(
        "SeedOssForCausalLM", {**_TOKENS, **ODD_HEADS, "rope_parameters": LLAMA3}, "odd heads, Llama 3 rotation"
    ),
    ParityCase("Exaone4ForCausalLM", {**_TOKENS, **_WINDOWS}, "windows of 7, some without rotation"),
    ParityCase("ApertusForCausalLM", {**_TOKENS, "tie_word_embeddings": True}, "tied"),
    ParityCase(
        "LlamaForCausalLM", {**ODD_HEADS, "rope_parameters": LLAMA3}, "odd heads, Llama 3 rotation", plugins=_NAMED
    ),
)
