"""Decoders with layer norms against Hugging Face on tiny random weights, as checkpoints spell them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.bloom import create_bloom
from hardpoint_models.falcon import create_falcon
from hardpoint_models.gpt2 import create_gpt2
from hardpoint_models.gpt_neox import create_gpt_neox
from hardpoint_models.opt import create_opt
from hardpoint_models.starcoder2 import create_phi, create_starcoder2
from hardpoint_testing_torch import (
    ParityHarness,
    StateDictLoader,
    build_model,
    check_parity,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_testing_torch.local_driver import LocalDriver, ModelFactory, create_model
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import load_weights
from rank_models import ask_ranks

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
PROMPTS = {"a": PROMPT, "b": [7], "c": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
FACTORIES: Mapping[str, ModelFactory] = {
    "BloomForCausalLM": create_bloom,
    "FalconForCausalLM": create_falcon,
    "GPT2LMHeadModel": create_gpt2,
    "GPTNeoXForCausalLM": create_gpt_neox,
    "OPTForCausalLM": create_opt,
    "PhiForCausalLM": create_phi,
    "Starcoder2ForCausalLM": create_starcoder2,
}


def tiny(architecture: str, folder: Path, **config: Any) -> TinyModel:
    sizes: dict[str, Any] = {"ffn_dim": 80} if architecture == "OPTForCausalLM" else {}
    if architecture == "GPTNeoXForCausalLM":
        sizes = {"num_attention_heads": 6}
    return make_tiny_model(architecture, folder, **{**sizes, **config})


def logits(model: TinyModel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of ``PROMPT``, with the weights stored as ``tensors``."""
    factory = FACTORIES[model.info.architecture]
    built, toolkit = build_model(factory, StateDictLoader(dict(tensors)), worker_config(model.info), ReferenceBackend())
    return LocalDriver(built, toolkit).step({"a": PROMPT})["a"]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        pytest.param("GPT2LMHeadModel", {}, id="learned-positions"),
        pytest.param("BloomForCausalLM", {}, id="slopes"),
        pytest.param("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 28}, id="norms-behind"),
        pytest.param("FalconForCausalLM", {"alibi": True, "bias": True}, id="parallel-slopes", marks=pytest.mark.slow),
        pytest.param("FalconForCausalLM", {"parallel_attn": False}, id="one-kv-head-in-a-row", marks=pytest.mark.slow),
        pytest.param(
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
            id="groups-with-one-norm",
            marks=pytest.mark.slow,
        ),
        pytest.param("PhiForCausalLM", {}, id="head-bias", marks=pytest.mark.slow),
        pytest.param("Starcoder2ForCausalLM", {"sliding_window": 1}, id="own-token-only", marks=pytest.mark.slow),
    ],
)
def test_prefill_chunks_decode_and_mixed_batches(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    check_parity(tiny(architecture, tmp_path, **config), FACTORIES[architecture], ReferenceBackend())


SPELLINGS: tuple[tuple[str, str, str], ...] = (
    ("GPT2LMHeadModel", "transformer.", ""),
    ("BloomForCausalLM", "transformer.", ""),
    ("FalconForCausalLM", "transformer.", ""),
    ("GPTNeoXForCausalLM", "gpt_neox.", ""),
    ("OPTForCausalLM", "model.decoder.", "decoder."),
    ("OPTForCausalLM", "model.decoder.", ""),
    ("PhiForCausalLM", "model.", ""),
    ("Starcoder2ForCausalLM", "model.", ""),
)


@pytest.mark.parametrize(("architecture", "prefix", "other"), SPELLINGS)
def test_checkpoints_with_other_prefixes(architecture: str, prefix: str, other: str, tmp_path: Path) -> None:
    """Models saved without their head have none, or an older one."""
    model = tiny(architecture, tmp_path)
    stored = {
        (other + name.removeprefix(prefix) if name.startswith(prefix) else name): tensor
        for name, tensor in model.tensors().items()
    }
    assert stored.keys() != model.tensors().keys()
    assert relative_error(logits(model, stored), model.logits(PROMPT)) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "ballast"),
    [
        ("GPT2LMHeadModel", {"transformer.h.0.attn.bias": (1, 1, 4, 4), "h.1.attn.masked_bias": ()}),
        ("GPT2LMHeadModel", {"lm_head.weight": (160, 48)}),
        ("GPTNeoXForCausalLM", {"gpt_neox.layers.1.attention.rotary_emb.inv_freq": (1,)}),
        ("GPTNeoXForCausalLM", {"gpt_neox.layers.2.attention.bias": (1, 1, 4, 4)}),
        ("FalconForCausalLM", {"lm_head.weight": (160, 48)}),
    ],
)
def test_what_older_checkpoints_hold_besides(
    architecture: str, ballast: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    model = tiny(architecture, tmp_path)
    stored = model.tensors() | {name: torch.full(shape, torch.nan) for name, shape in ballast.items()}
    assert relative_error(logits(model, stored), model.logits(PROMPT)) < 1e-5


def test_the_older_name_of_a_head(tmp_path: Path) -> None:
    model = tiny("GPTNeoXForCausalLM", tmp_path)
    stored = model.tensors()
    (name,) = stored.keys() & {"lm_head.weight", "embed_out.weight"}
    head = stored.pop(name)
    for spelled in ("lm_head.weight", "embed_out.weight"):
        assert relative_error(logits(model, {**stored, spelled: head}), model.logits(PROMPT)) < 1e-5


def test_sequences_cannot_outgrow_learned_positions(tmp_path: Path) -> None:
    """Refused before a weight is allocated, whoever asks for the length."""
    model = tiny("OPTForCausalLM", tmp_path, max_position_embeddings=32, hidden_size=48)
    longer = msgspec.structs.replace(worker_config(model.info), max_model_len=33)
    with pytest.raises(ConfigError, match=r"max_model_len 33 is more than the 32 positions .*--max-model-len to at"):
        create_model(create_opt, longer, ReferenceBackend())
    harness = ParityHarness(model, create_opt, ReferenceBackend())
    assert harness.prefill(32) < 1e-5, "the last position has a row"


@pytest.mark.parametrize(
    ("architecture", "config", "size", "per_layer"),
    [
        pytest.param("GPT2LMHeadModel", {}, 2, 2, id="fused-and-transposed"),
        pytest.param("BloomForCausalLM", {"num_attention_heads": 6}, 3, 2, id="own-slopes"),
        pytest.param("FalconForCausalLM", {"bias": True}, 2, 1, id="one-kv-head-for-both"),
        pytest.param(
            "FalconForCausalLM",
            {"new_decoder_architecture": True, "num_attention_heads": 12, "num_kv_heads": 2, "bias": True},
            4,
            1,
            id="a-kv-head-for-two-ranks",
        ),
        pytest.param("GPTNeoXForCausalLM", {"intermediate_size": 84}, 3, 1, id="one-sum-per-layer"),
        pytest.param("PhiForCausalLM", {"vocab_size": 97}, 2, 1, id="head-bias-uneven-vocabulary"),
    ],
)
def test_ranks_together_are_the_whole(
    architecture: str, config: dict[str, Any], size: int, per_layer: int, tmp_path: Path
) -> None:
    model = tiny(architecture, tmp_path, **config)
    prompts = {name: [token % 97 for token in prompt] for name, prompt in PROMPTS.items()}
    answers = ask_ranks(FACTORIES[architecture], model, size, prompts)
    for found in answers.logits:
        for name, prompt in prompts.items():
            assert relative_error(found[name], model.logits(prompt)) < 1e-5
    assert answers.num_exchanges == 2 + per_layer * model.oracle.config.num_hidden_layers, "words, sums and logits"


def test_embeddings_that_are_given_are_as_wide_as_hidden_states(tmp_path: Path) -> None:
    """Where words are narrower, what ``embed`` gives is projected already: one width for all that enters."""
    model = tiny("OPTForCausalLM", tmp_path, word_embed_proj_dim=28)
    built, toolkit = build_model(
        create_opt, StateDictLoader(model.tensors()), worker_config(model.info), ReferenceBackend()
    )
    with torch.inference_mode():
        embedded = built.embed(torch.tensor(PROMPT))
    assert embedded.shape == (len(PROMPT), 48)
    hidden = LocalDriver(built, toolkit).run({"a": PROMPT}, embeddings=embedded)
    assert isinstance(hidden, torch.Tensor)
    assert hidden.shape == (len(PROMPT), 28)
    assert relative_error(built.logits(hidden), model.logits(PROMPT)) < 1e-5


def test_computing_in_bfloat16_stays_near(tmp_path: Path) -> None:
    model = tiny("FalconForCausalLM", tmp_path, dtype=torch.bfloat16, alibi=True)
    config = worker_config(model.info, dtype="bfloat16")
    built, toolkit = create_model(create_falcon, config, ReferenceBackend())
    load_weights(built, StateDictLoader(model.tensors()), model.info, show_progress=False)
    found = LocalDriver(built, toolkit).step({"a": PROMPT})["a"]
    assert found.dtype == torch.bfloat16
    assert relative_error(found.float(), model.logits(PROMPT)) < 0.05
