"""Ranks that share out the tensors of one GGUF file compute together what one rank computes, packed or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch

from gguf_encoders import ENCODER_DECODERS, ENCODERS
from gguf_families import FAMILIES, GgufFamily, make_gguf
from hardpoint.errors import ConfigError
from hardpoint.interfaces.plugin import ProcessRole, declaration_of
from hardpoint.interfaces.quantization import QuantizationMethod
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint_testing_torch import TinyModel, installed_factory, installed_loader, relative_error
from rank_models import ask_ranks

PROMPTS = {"a": [9, 3, 5, 14, 15, 5, 8], "b": [35], "c": [8, 5, 7, 9, 3, 2, 3, 8, *range(40, 60)]}
EVERY = (*FAMILIES, *ENCODERS, *ENCODER_DECODERS)
QUICK = ("phi3", "gptneox")
WIDE = {"hidden_size": 128, "intermediate_size": 192}
"""So that half of each row is whole blocks of 32; and of 256:"""
WIDEST = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}
PACKED: Mapping[str, Mapping[str, Any]] = {
    "phi3": WIDE,
    "gptneox": WIDE,
    "falcon-two-norms": WIDE,
    "gpt2": {},
    "qwen2moe": {**WIDE, "moe_intermediate_size": 64},
    "granitemoe": WIDE,
    "gpt-oss": WIDE,
    "jamba": WIDE,
    "bert-roberta": WIDE,
    "modern-bert": WIDE,
    "t5": WIDE,
}
"""Families whose rows are moved, joined or stacked, with sizes."""
Kind = gguf.GGMLQuantizationType


def keeps_blocks(config: WorkerConfig) -> QuantizationMethod:
    """The method ``gguf`` over whole activations, which changes nothing but the order of sums."""
    roles = frozenset({ProcessRole.WORKER})
    config = msgspec.structs.replace(config, quantization="gguf")
    context = WorkerContext(
        name="gguf", api_version=1, roles=roles, rank=config.parallel.rank, config=config, device=torch.device("cpu")
    )
    factory: Any = installed_factory("quantization", "gguf")
    declared = declaration_of(factory)
    assert declared is not None
    method: QuantizationMethod = factory(context, declared.options(activations="float"))
    return method


def answers(tiny: TinyModel, size: int, *, packed: bool) -> list[Mapping[str, torch.Tensor]]:
    loader = installed_loader("gguf", packed=packed)
    info = loader.describe(tiny.info.artifact)
    factory = installed_factory("model", info.architecture)
    method = keeps_blocks if packed else None
    return list(ask_ranks(factory, tiny, size, PROMPTS, loader=loader, method=method).logits)


def check_ranks(tiny: TinyModel, size: int, *, packed: bool) -> None:
    (whole,) = answers(tiny, 1, packed=packed)
    for share in answers(tiny, size, packed=packed):
        for name, logits in whole.items():
            assert relative_error(share[name], logits) < 1e-4


def families() -> list[Any]:
    return [
        pytest.param(family, id=str(family), marks=() if str(family) in QUICK else pytest.mark.slow) for family in EVERY
    ]


@pytest.mark.parametrize("family", families())
def test_ranks_share_out_what_converters_changed(family: GgufFamily, tmp_path: Path) -> None:
    """Rows in another order, joined and split matrices, stacks of experts: each rank undoes it and takes its part."""
    check_ranks(make_gguf(family, tmp_path), 2, packed=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_ranks_share_out_blocks(name: str, tmp_path: Path) -> None:
    """Of fused matrices each rank takes its share of every part, of experts its share of each."""
    check_ranks(make_gguf(sized(name, PACKED[name]), tmp_path, kind=Kind.Q8_0), 2, packed=True)


@pytest.mark.parametrize(
    ("kind", "size", "sizes"),
    [
        pytest.param(Kind.Q4_1, 2, WIDE, id="Q4_1"),
        pytest.param(Kind.Q8_0, 2, {**WIDE, "num_key_value_heads": 1}, id="Q8_0-one-key", marks=pytest.mark.slow),
        pytest.param(Kind.Q8_0, 4, {**WIDE, "intermediate_size": 128}, id="Q8_0-four-shared-keys",
                     marks=pytest.mark.slow),
        pytest.param(Kind.Q5_0, 3, {"hidden_size": 192, "intermediate_size": 96, "num_attention_heads": 6,
                                    "num_key_value_heads": 3}, id="Q5_0-three", marks=pytest.mark.slow),
        pytest.param(Kind.Q4_K, 2, WIDEST, id="Q4_K", marks=pytest.mark.slow),
        pytest.param(Kind.Q6_K, 2, {**WIDEST, "num_key_value_heads": 1}, id="Q6_K-one-key", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_share_out_blocks_of_every_size(
    kind: gguf.GGMLQuantizationType, size: int, sizes: Mapping[str, Any], tmp_path: Path
) -> None:
    """Heads are whole rows, which lie in pairs in the file. What they put together goes through columns, where blocks
    may not be cut. Packed or not, the result is one."""
    tiny = make_gguf(sized("llama", sizes), tmp_path, kind=kind)
    check_ranks(tiny, size, packed=True)
    check_ranks(tiny, size, packed=False)
    ((found,), (expected,)) = (answers(tiny, 1, packed=packed) for packed in (True, False))
    assert all(relative_error(found[name], logits) < 1e-4 for name, logits in expected.items())


@pytest.mark.parametrize(
    ("name", "kind", "sizes", "message"),
    [
        ("llama", Kind.Q4_0, {**WIDE, "intermediate_size": 96},
         r"'model.layers.0.mlp.down_proj.weight' has rows of 96 .* blocks of 32 \(Q4_0\).* shares of 48"),
        ("llama", Kind.Q4_K, {**WIDEST, "intermediate_size": 768},
         r"'model.layers.0.mlp.down_proj.weight' has rows of 768 .* blocks of 256 \(Q4_K\).* shares of 384"),
        ("llama", Kind.Q4_K, {**WIDEST, "head_dim": 64},
         r"'model.layers.0.self_attn.o_proj.weight' has rows of 256 .* shares of 128"),
        ("qwen2moe", Kind.Q8_0, WIDE, r"experts.0.down_proj.weight' has rows of 32 .* shares of 16"),
        ("modern-bert", Kind.Q8_0, {**WIDE, "intermediate_size": 96}, r"mlp.Wo.weight' has rows of 96 .* shares of 48"),
    ],
)  # fmt: skip
def test_blocks_that_ranks_would_cut_are_refused_and_are_none_when_unpacked(
    name: str, kind: gguf.GGMLQuantizationType, sizes: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    tiny = make_gguf(sized(name, sizes), tmp_path, kind=kind)
    advice = r"choose a smaller --tensor-parallel-size, or leave --quantization unset"
    with pytest.raises(ConfigError, match=f"{message}; {advice}"):
        answers(tiny, 2, packed=True)
    check_ranks(tiny, 2, packed=False)


def sized(name: str, sizes: Mapping[str, Any]) -> GgufFamily:
    (family,) = [one for one in EVERY if str(one) == name]
    return replace(family, config={**family.config, **sizes})
