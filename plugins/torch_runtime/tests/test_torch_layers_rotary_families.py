"""Rotations that depend on the context's length, on several positions per token, or on the order of pairs: against
Hugging Face on random configurations."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from hardpoint.errors import ModelFormatError
from hardpoint_torch_runtime.layers import RopeParameters, RotaryEmbedding
from hardpoint_torch_runtime.layers.rotary import rotary_frequencies

CPU = torch.device("cpu")
Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
each_seed = pytest.mark.parametrize("seed", range(4))


def random_scaling(rope_type: str, draw: random.Random, num_pairs: int) -> dict[str, Any]:
    """Settings a checkpoint might carry; for contexts trained on 48 tokens."""
    given: dict[str, Any] = {"rope_type": rope_type, "rope_theta": draw.uniform(500, 1e6)}
    if rope_type == "dynamic":
        return given | {"factor": draw.uniform(1, 8)}
    given["short_factor"] = [draw.uniform(1, 3) for _ in range(num_pairs)]
    given["long_factor"] = [draw.uniform(1, 40) for _ in range(num_pairs)]
    given["original_max_position_embeddings"] = 48
    for name in draw.sample(["factor", "attention_factor"], draw.randint(0, 2)):
        given[name] = draw.uniform(1, 8)
    return given


def random_config(rope_type: str, seed: int, **fields: Any) -> LlamaConfig:
    draw = random.Random(f"{rope_type}{seed}")
    head_size = draw.choice([8, 12, 32])
    scaling = random_scaling(rope_type, draw, head_size // 2)
    return LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        max_position_embeddings=48 if rope_type == "dynamic" else 48 * draw.choice([1, 4]),
        rope_parameters=scaling,
        **fields,
    )


def heads_for(positions: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(head_size)
    count = positions.shape[-1]
    return torch.randn(count, 4, head_size, generator=generator), torch.randn(count, 2, head_size, generator=generator)


def check(
    rotary: RotaryEmbedding, positions: torch.Tensor, oracle: torch.nn.Module, rotate: Rotate, grid: bool = False
) -> None:
    """Queries and keys turned by us equal those that Hugging Face turns, and its factors are ours."""
    query, key = heads_for(positions, rotary.head_size)
    given = positions[:, None] if grid else positions[None]
    cos, sin = oracle(query, given)
    expected = rotate(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for actual, wanted in zip(rotary(positions, query.clone(), key.clone()), expected, strict=True):
        torch.testing.assert_close(actual, wanted[0].transpose(0, 1), rtol=2e-5, atol=2e-5)


@each_seed
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("max_length", [47, 48, 49, 160])
def test_the_context_decides_as_a_sequence_of_its_length(rope_type: str, max_length: int, seed: int) -> None:
    """Within the trained context and beyond it."""
    config = random_config(rope_type, seed)
    rope = RopeParameters.from_config(config.to_dict())
    rotary = RotaryEmbedding(config.head_dim, max_length, rope, CPU)
    positions = torch.tensor([0, 1, 17, 46, max_length - 1])
    check(rotary, positions, llama.LlamaRotaryEmbedding(config), llama.apply_rotary_pos_emb)
    frequencies, scale = rotary_frequencies(rope, rotary.rotary_size, max_length)
    known, known_scale = ROPE_INIT_FUNCTIONS[rope_type](config, CPU, seq_len=max_length)
    torch.testing.assert_close(frequencies, known, rtol=1e-6, atol=0)
    assert scale == pytest.approx(known_scale, rel=1e-9)


def test_tokens_at_the_start_turn_as_the_whole_context_says() -> None:
    """A short sequence and a long one share keys: their first tokens turn alike, as Hugging Face's do in the long."""
    config = random_config("longrope", 0)
    rope = RopeParameters.from_config(config.to_dict())
    short, long = (RotaryEmbedding(config.head_dim, length, rope, CPU) for length in (48, 49))
    first = torch.arange(1, 9)
    assert not torch.allclose(short.lookup(first)[0], long.lookup(first)[0])
    cos, _ = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(49)[None])
    torch.testing.assert_close(long.lookup(first)[0][:, 0], cos[0, 1:9], rtol=1e-5, atol=1e-5)


def test_phi_keeps_its_trained_context_beside_the_settings() -> None:
    """``original_max_position_embeddings`` at the top, and a factor that follows from it; half of each head turns."""
    factors = [1.0 + pair for pair in range(4)]
    scaling = {"type": "su", "short_factor": factors, "long_factor": [2 * factor for factor in factors]}
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, original_max_position_embeddings=32,
        rope_theta=1e4, partial_rotary_factor=0.5, rope_scaling={**scaling, "type": "longrope"}, pad_token_id=0,
    )  # fmt: skip
    old = {
        "rope_scaling": scaling,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 32,
    }
    rope = RopeParameters.from_config(old)
    assert rope == RopeParameters.from_config(config.to_dict())
    assert rope.factor == 8.0
    for max_length in (32, 128):
        rotary = RotaryEmbedding(16, max_length, rope, CPU)
        assert rotary.rotary_size == 8
        check(rotary, torch.tensor([3, max_length - 1]), phi3.Phi3RotaryEmbedding(config), phi3.apply_rotary_pos_emb)


def random_positions(seed: int) -> torch.Tensor:
    """int64 [3, 9]: three of text, then a grid's."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.arange(3).expand(3, 3)
    return torch.cat((text, torch.randint(3, 60, (3, 6), generator=generator)), dim=1)


SECTIONS = {"blocks": [(4, 6, 6), (1, 0, 15), (16, 0, 0)], "alternate": [(6, 5, 5), (8, 4, 4), (10, 5, 1)]}


@each_seed
@pytest.mark.parametrize("sections", SECTIONS["blocks"], ids=str)
def test_pairs_turn_by_time_height_and_width_in_blocks(sections: tuple[int, ...], seed: int) -> None:
    scaling = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(sections)}
    config = Qwen2VLTextConfig(hidden_size=128, num_attention_heads=4, rope_parameters=scaling)
    rotary = RotaryEmbedding(32, 64, RopeParameters.from_config({"rope_parameters": scaling}), CPU)
    check(rotary, random_positions(seed), Qwen2VLRotaryEmbedding(config), llama.apply_rotary_pos_emb, grid=True)


@each_seed
@pytest.mark.parametrize("sections", SECTIONS["alternate"], ids=str)
def test_pairs_turn_by_time_height_and_width_in_turns(sections: tuple[int, ...], seed: int) -> None:
    scaling = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections), "mrope_interleaved": True}
    config = Qwen3VLTextConfig(hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=scaling)
    rotary = RotaryEmbedding(32, 64, RopeParameters.from_config({"rope_parameters": scaling}), CPU)
    check(rotary, random_positions(seed), Qwen3VLTextRotaryEmbedding(config), llama.apply_rotary_pos_emb, grid=True)


@pytest.mark.parametrize("alternate", [False, True])
def test_text_needs_one_position_where_three_are_equal(alternate: bool) -> None:
    """Of the older spelling too, whose type is named after the sections."""
    scaling = {"type": "mrope", "mrope_section": [3, 3, 2], "mrope_interleaved": alternate}
    rotary = RotaryEmbedding(16, 64, RopeParameters.from_config({"rope_scaling": scaling}), CPU)
    plain = RotaryEmbedding(16, 64, RopeParameters(), CPU)
    positions = torch.tensor([0, 5, 63])
    for one, three, expected in zip(
        rotary.lookup(positions), rotary.lookup(positions.expand(3, 3)), plain.lookup(positions), strict=True
    ):
        assert torch.equal(one, expected)
        assert torch.equal(three, expected)


def test_positions_of_another_shape_are_refused() -> None:
    plain = RotaryEmbedding(16, 8, RopeParameters(), CPU)
    with pytest.raises(ValueError, match=r"positions have shape \[3, 2\]; this model's rotation takes \[T\]$"):
        plain.lookup(torch.zeros(3, 2, dtype=torch.int64))
    sectioned = RotaryEmbedding(16, 8, RopeParameters(sections=(4, 2, 2)), CPU)
    with pytest.raises(ValueError, match=r"positions have shape \[2, 2\]; .* takes \[T\] or \[3, T\]"):
        sectioned.lookup(torch.zeros(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeParameters(sections=(4, 2, 1)), r"mrope_section \[4, 2, 1\] shares out 7 pairs, but 8 rotate"),
        (
            RopeParameters(
                rope_type="longrope", short_factors=(1.0,) * 8, long_factors=(1.0,) * 7, original_max_position=9
            ),
            "long_factor has 7 entries, but 8 pairs rotate",
        ),
        (
            RopeParameters(rope_type="dynamic", factor=2.0, original_max_position=9, partial_factor=0.125),
            "'dynamic' cannot spare the fastest pair",
        ),
        (RopeParameters(rope_type="linear", factor=1e-300), "not finite, .* and factor=1e-300"),
        (RopeParameters(rope_type="dynamic", factor=1e300, original_max_position=2), "not finite, with rope_type"),
        (
            RopeParameters(rope_type="yarn", factor=2.0, original_max_position=9, attention_factor=1e300),
            "not finite, with rope_type 'yarn'",
        ),
    ],
    ids=["sections", "longrope", "dynamic", "tiny factor", "huge factor", "huge attention factor"],
)
def test_settings_that_do_not_fit_the_head_are_named(rope: RopeParameters, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        RotaryEmbedding(16, 8, rope, CPU)


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "longrope"])
def test_neighbors_may_be_pairs(rope_type: str) -> None:
    """With every scaling; the whole head as in Cohere, half of it as in GLM-4."""
    draw = random.Random(rope_type)
    scaling = random_scaling(rope_type, draw, 8) if rope_type in ("dynamic", "longrope") else {"rope_type": rope_type}
    scaling = {"rope_theta": 3000.0, **scaling} | ({"factor": 3.0} if rope_type == "linear" else {})
    fields = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 48}
    config = cohere.CohereConfig(**fields, rope_parameters=scaling)
    rope = RopeParameters.from_config({**fields, "rope_parameters": scaling})
    rotary = RotaryEmbedding(16, 96, rope, CPU, pairs_are_neighbors=True)
    positions = torch.tensor([0, 2, 48, 95])
    check(rotary, positions, cohere.CohereRotaryEmbedding(config), cohere.apply_rotary_pos_emb)

    half = glm4.Glm4Config(
        **{**fields, "hidden_size": 128}, head_dim=32, rope_parameters={**scaling, "partial_rotary_factor": 0.5}
    )
    halved = RopeParameters.from_config({**fields, "rope_parameters": {**scaling, "partial_rotary_factor": 0.5}})
    rotary = RotaryEmbedding(32, 96, halved, CPU, pairs_are_neighbors=True)
    check(rotary, positions, glm4.Glm4RotaryEmbedding(half), glm4.apply_rotary_pos_emb)


def test_neighbors_of_low_precision_are_rotated_in_float32() -> None:
    rotary = RotaryEmbedding(16, 64, RopeParameters(), CPU, pairs_are_neighbors=True)
    heads = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    factors = rotary.lookup(torch.arange(59, 64))
    exact = rotary.rotate_(heads.float(), *factors)
    assert torch.equal(rotary.rotate_(heads.clone(), *factors), exact.bfloat16())
