"""DeepSeek V3 as it is installed: a saved folder through the loader, and many requests through the whole engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch import (
    check_parity,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
    write_tiny_tokenizer,
)
from hardpoint_testing_torch.tiny_models import TinyModel

pytestmark = pytest.mark.slow

ARCHITECTURE = "DeepseekV3ForCausalLM"
TINY: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.fixture
def backend() -> AttentionBackend:
    return installed_backend("torch_reference")


def with_a_layer_more(folder: Path) -> TinyModel:
    """As published: the file also holds the layer that predicts a further token."""
    tiny = make_tiny_model(ARCHITECTURE, folder, **TINY)
    tensors = tiny.tensors()
    extra = {re.sub(r"layers\.2\.", "layers.3.", name): tensor for name, tensor in tensors.items() if ".2." in name}
    extra["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    save_file({**tensors, **{name: t.clone() for name, t in extra.items()}}, folder / "model.safetensors")
    return tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_folder_through_the_real_loader(dtype: torch.dtype, backend: AttentionBackend, tmp_path: Path) -> None:
    tiny = make_tiny_model(ARCHITECTURE, tmp_path, dtype=dtype, **TINY)
    check_parity(tiny, installed_factory("model", ARCHITECTURE), backend, loader=installed_loader("safetensors"))


def test_requests_through_the_engine_get_the_tokens_of_the_oracle(tmp_path: Path) -> None:
    """Prompts longer than a step, next to answers, some of which begin with blocks of latents that are cached."""
    tiny = with_a_layer_more(tmp_path)
    write_tiny_tokenizer(tmp_path, tiny.info.vocab_size)
    shared = [(7 * place + 3) % 150 for place in range(41)]
    prompts = [[5, 9, 2], shared, [*shared[:32], 11, 12], [140, 1] * 20, shared, [*shared, 4, 4, 4]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    sizes: dict[str, Any] = {"block_size": 8, "max_model_len": 128, "num_kv_blocks": 40, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), dtype="float32", max_num_seqs=3, **sizes) as llm:
        given = [Prompt(token_ids=prompt) for prompt in prompts]
        outputs = [*llm.generate(given[:2], params), *llm.generate(given[2:], params)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == tiny.greedy(prompt, 24)
    assert [output.num_cached_tokens for output in outputs][2] == 32
    assert all(outputs[late].num_cached_tokens >= 40 for late in (4, 5))
