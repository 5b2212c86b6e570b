"""The decoder stack's kernels against the same arithmetic in torch, at every level, and what they refuse.

Legend: T tokens, C hidden size, H and K query and KV heads, D head size, M intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hardpoint_cpu.native.attention import LayerFacts, RowFacts, cache_view
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.native.stack import BlockParts, NativeStack, NormWeight, RotationTable, StepGroup

C, H, K, D, M, POSITIONS = 44, 4, 2, 24, 52, 32
ROTATED = 20


@dataclass(frozen=True, slots=True)
class Weights:
    """One layer in torch; the norms' weights by the names of ``BlockParts``."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: dict[str, torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor
    neighbors: bool
    activation: str


def make_weights(*, everything: bool, activation: str) -> Weights:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    optional = {"query_norm": D, "key_norm": D, "attention_output_norm": C, "feed_forward_output_norm": C}
    sizes = {"input_norm": C, "feed_forward_norm": C} | (optional if everything else {})
    angles = torch.outer(torch.arange(POSITIONS), torch.rand(ROTATED // 2, generator=generator))
    return Weights(
        *(random((H + 2 * K) * D, C), random(C, H * D), random(2 * M, C), random(C, M)),
        {name: 1 + random(size) for name, size in sizes.items()},
        *(angles.cos(), angles.sin()),
        neighbors=everything,
        activation=activation,
    )


def make_parts(library: NativeLibrary, weights: Weights) -> BlockParts:
    norms = {name: NormWeight(weight, 1e-5) for name, weight in weights.norms.items()}
    return BlockParts(
        qkv=library.linear_f32(weights.qkv),
        o=library.linear_f32(weights.o),
        gate_up=library.linear_f32(weights.gate_up),
        down=library.linear_f32(weights.down),
        attention=LayerFacts.make(H, K, D, D**-0.5),
        rotation=RotationTable(weights.cos, weights.sin, weights.neighbors),
        input_norm=norms["input_norm"],
        query_norm=norms.get("query_norm"),
        key_norm=norms.get("key_norm"),
        attention_output_norm=norms.get("attention_output_norm"),
        feed_forward_norm=norms["feed_forward_norm"],
        feed_forward_output_norm=norms.get("feed_forward_output_norm"),
        activation=weights.activation,
    )


def normed(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    weight = weights.norms.get(name)
    return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def rotated(heads: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = weights.cos[positions][:, None], weights.sin[positions][:, None]
    part, rest = heads[..., :ROTATED], heads[..., ROTATED:]
    if weights.neighbors:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = part.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def expected(x: torch.Tensor, weights: Weights, positions: torch.Tensor) -> torch.Tensor:
    """One layer over the tokens of one sequence."""
    heads = F.linear(normed(x, weights, "input_norm"), weights.qkv).view(len(x), -1, D)
    query, key, value = heads.split((H, K, K), dim=1)
    query = rotated(normed(query, weights, "query_norm"), weights, positions)
    key = rotated(normed(key, weights, "key_norm"), weights, positions)
    key, value = (one.repeat_interleave(H // K, dim=1).transpose(0, 1) for one in (key, value))
    attended = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, is_causal=True)
    output = F.linear(attended.transpose(0, 1).flatten(1), weights.o)
    x = x + normed(output, weights, "attention_output_norm")
    gate, up = F.linear(normed(x, weights, "feed_forward_norm"), weights.gate_up).chunk(2, dim=-1)
    active = F.silu(gate) if weights.activation == "silu" else F.gelu(gate, approximate="tanh")
    return x + normed(F.linear(active * up, weights.down), weights, "feed_forward_output_norm")


def run(stack: NativeStack, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    count = len(x)
    caches = [torch.full((3, K, 16, 2 * D), torch.nan) for _ in stack.blocks]
    stack.bind([cache_view(cache, K, D) for cache in caches], [0] * len(caches))
    lengths = torch.tensor([count], dtype=torch.int32)
    rows = RowFacts.make(torch.tensor([0, count], dtype=torch.int32), lengths, torch.tensor([[2, 1]]).int())
    slots = torch.tensor([2 * 16 + place if place < 16 else place for place in range(count)])
    hidden = x.clone()
    stack.run(hidden, positions, (StepGroup(rows.struct, slots),))
    return hidden


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("count", [1, 9, 20])
def test_a_stack_is_its_layers_one_after_the_other(native: NativeLibrary, everything: bool, count: int) -> None:
    layers = [make_weights(everything=everything, activation=name) for name in ("silu", "gelu_tanh")]
    final = torch.rand(C)
    stack = NativeStack(native, [make_parts(native, layer) for layer in layers], NormWeight(final, 1e-6))
    x, positions = torch.randn(count, C), torch.arange(count)
    wanted = x
    for layer in layers:
        wanted = expected(wanted, layer, positions)
    wanted = F.rms_norm(wanted, (C,), final, 1e-6)
    torch.testing.assert_close(run(stack, x, positions), wanted, rtol=2e-5, atol=2e-5)


def test_large_gates_neither_overflow_nor_become_nothing(native: NativeLibrary) -> None:
    for activation in ("silu", "gelu_tanh"):
        weights = make_weights(everything=False, activation=activation)
        weights = replace(weights, gate_up=weights.gate_up * 100)
        stack = NativeStack(native, [make_parts(native, weights)], None)
        x, positions = torch.randn(5, C), torch.arange(5)
        wanted = expected(x, weights, positions)
        # Sums of large terms of both signs: any order of additions loses digits of what is small beside them.
        lost = 1e-3 * float(wanted.abs().max())
        torch.testing.assert_close(run(stack, x, positions), wanted, rtol=1e-3, atol=lost)


class TestRefusals:
    @pytest.fixture
    def parts(self, best_native: NativeLibrary) -> BlockParts:
        return make_parts(best_native, make_weights(everything=False, activation="silu"))

    def test_parts_that_do_not_fit(self, best_native: NativeLibrary, parts: BlockParts) -> None:
        other = best_native.linear_f32(torch.zeros(C, C))
        for name, fault in (
            ("o", "projections of 192 and 44 values for 4 and 2 heads of 24"),
            ("down", "104 values for a gate and as many others, but 44 are expected"),
            ("qkv", "projections of 44 and 96 values"),
        ):
            changed: dict[str, Any] = {name: other}
            with pytest.raises(ValueError, match=fault):
                NativeStack(best_native, [replace(parts, **changed)], None)

    def test_no_layers(self, best_native: NativeLibrary) -> None:
        with pytest.raises(ValueError, match="a stack without blocks"):
            NativeStack(best_native, [], None)

    def test_norms_of_another_size(self, best_native: NativeLibrary, parts: BlockParts) -> None:
        wrong = NormWeight(torch.ones(C + 1), 1e-5)
        with pytest.raises(ValueError, match="over 44 values has a weight"):
            NativeStack(best_native, [replace(parts, input_norm=wrong)], None)
        with pytest.raises(ValueError, match="the final norm has a weight"):
            NativeStack(best_native, [parts], wrong)

    def test_rotations_longer_than_a_head(self, best_native: NativeLibrary, parts: BlockParts) -> None:
        table = torch.zeros(4, D)
        with pytest.raises(ValueError, match="turns 48 of 24 values of a head"):
            NativeStack(best_native, [replace(parts, rotation=RotationTable(table, table, False))], None)

    def test_steps_that_do_not_fit(self, best_native: NativeLibrary, parts: BlockParts) -> None:
        stack = NativeStack(best_native, [parts], None)
        x = torch.zeros(2, C)
        with pytest.raises(RuntimeError, match="no caches are bound"):
            stack.run(x, torch.arange(2), ())
        with pytest.raises(ValueError, match="1 layers have 0 caches and 0 groups"):
            stack.bind([], [])
        with pytest.raises(ValueError, match="is at position -1"):
            run(stack, x, torch.tensor([0, -1]))
        with pytest.raises(ValueError, match="2 tokens have 1 positions"):
            run(stack, x, torch.arange(1))
        with pytest.raises(ValueError, match="hidden must be a contiguous float32 CPU tensor"):
            run(stack, x.double(), torch.arange(2))

    def test_groups_that_are_not_there(self, best_native: NativeLibrary, parts: BlockParts) -> None:
        stack = NativeStack(best_native, [parts], None)
        stack.bind([cache_view(torch.zeros(3, K, 16, 2 * D), K, D)], [1])
        with pytest.raises(ValueError, match="block 0 is of group 1 of 0"):
            stack.run(torch.zeros(1, C), torch.arange(1), ())
