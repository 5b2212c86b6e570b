"""Gated delta networks against the plain recurrence in float64, whatever a step holds: rows, chunks, states, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import MambaCacheMode
from hardpoint_torch_runtime.layers import DeltaMixer, DeltaSizes, TensorParallel
from recurrent_steps import (
    Ranks,
    Sequences,
    check_any_split,
    check_kept_states,
    check_profiling,
    check_two_steps,
    close,
    factory_of,
    load,
)

SIZES = DeltaSizes(hidden_size=12, num_heads=6, head_size=4, num_groups=2, key_size=5, conv_width=4, norm_eps=1e-5)
VARIANTS = {
    "grouped": SIZES,
    "as-many-keys": replace(SIZES, num_groups=6, conv_width=2),
    "one-key": replace(SIZES, num_groups=1, key_size=3, head_size=7),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def create(sizes: DeltaSizes, parallel: TensorParallel | None = None) -> DeltaMixer:
    return DeltaMixer("m", sizes, factory_of(parallel), block_size=4)


def weights(sizes: DeltaSizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, with decays from gentle to steep."""
    generator = torch.Generator().manual_seed(seed)
    stored = {name: torch.randn(made.shape, generator=generator) for name, made in create(sizes).named_parameters()}
    stored["A_log"] = torch.linspace(-4, 3, sizes.num_heads)
    return stored


def recurrence(sizes: DeltaSizes, stored: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """One sequence [T, C], token after token and head after head in float64."""
    w = {name: tensor.double() for name, tensor in stored.items()}
    per_group = sizes.num_heads // sizes.num_groups
    silu = torch.nn.functional.silu
    widths = (sizes.key_size, sizes.key_size, per_group * sizes.head_size, per_group * sizes.head_size)
    by_group = (hidden.double() @ w["in_proj_qkvz.weight"].T).unflatten(-1, (sizes.num_groups, -1)).split(widths, -1)
    gate = by_group[3].reshape(len(hidden), sizes.num_heads, -1)
    mixed = torch.cat([part.flatten(1) for part in by_group[:3]], -1)
    rates, decays = (hidden.double() @ w["in_proj_ba.weight"].T).view(len(hidden), sizes.num_groups, 2, -1).unbind(2)
    line = torch.cat((torch.zeros(sizes.conv_width - 1, mixed.shape[1]).double(), mixed))
    state = torch.zeros(sizes.num_heads, sizes.key_size, sizes.head_size).double()
    keys = sizes.num_groups * sizes.key_size
    outputs = torch.zeros(len(hidden), sizes.num_heads, sizes.head_size).double()
    for token in range(len(hidden)):
        x = silu((line[token : token + sizes.conv_width] * w["conv1d.weight"][:, 0].T).sum(0))
        query, key, value = x.split((keys, keys, sizes.num_heads * sizes.head_size))
        query, key = (part.view(sizes.num_groups, -1) for part in (query, key))
        query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
        for head in range(sizes.num_heads):
            q, k, v = query[head // per_group], key[head // per_group], value.view(sizes.num_heads, -1)[head]
            step = torch.nn.functional.softplus(decays[token].flatten()[head] + w["dt_bias"][head])
            state[head] *= torch.exp(-w["A_log"][head].exp() * step)
            rate = rates[token].flatten()[head].sigmoid()
            state[head] += torch.outer(k, rate * (v - k @ state[head]))
            outputs[token, head] = q @ state[head] / sizes.key_size**0.5
    y = outputs / (outputs.square().mean(-1, keepdim=True) + sizes.norm_eps).sqrt() * w["norm.weight"] * silu(gate)
    return y.flatten(1) @ w["out_proj.weight"].T


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_into_steps_equals_the_recurrence(variant: str, data: st.DataObject) -> None:
    """States of NaN belong to nobody (R4.31, P4.4: a new sequence starts from nothing, whatever its block held)."""
    sizes, stored = VARIANTS[variant], weights(VARIANTS[variant])
    mixer = load(create(sizes), stored)
    check_any_split(mixer, sizes.hidden_size, lambda tokens: recurrence(sizes, stored, tokens), data)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_in_two_steps_and_then_single_tokens(variant: str) -> None:
    sizes, stored = VARIANTS[variant], weights(VARIANTS[variant])
    check_two_steps(load(create(sizes), stored), sizes.hidden_size, lambda tokens: recurrence(sizes, stored, tokens))


@pytest.mark.parametrize(("mode", "num_checkpoints"), [(MambaCacheMode.ALL, 0), (MambaCacheMode.ALIGN, 2)])
def test_a_sequence_goes_on_from_every_state_that_was_kept(mode: MambaCacheMode, num_checkpoints: int) -> None:
    """R1.33: mode ``all`` keeps one per block; mode ``align`` the last and the checkpoints before it."""
    stored = weights(SIZES)
    mixer = load(create(SIZES), stored)
    check_kept_states(mixer, SIZES.hidden_size, lambda tokens: recurrence(SIZES, stored, tokens), mode, num_checkpoints)


def test_profiling_computes_all_tokens_as_one_row_and_touches_no_cache() -> None:
    """R5.40."""
    stored = weights(SIZES)
    mixer = load(create(SIZES), stored)
    check_profiling(mixer, SIZES.hidden_size, lambda tokens: recurrence(SIZES, stored, tokens), 140)


@torch.inference_mode()
def test_a_chunk_of_equal_keys_without_decay() -> None:
    """The triangular system is full, and corrections of corrections reach from its first place to the last."""
    stored = weights(SIZES)
    stored["A_log"] = torch.full((SIZES.num_heads,), -20.0)
    hidden = torch.randn(1, SIZES.hidden_size).expand(64, -1)
    output = Sequences(load(create(SIZES), stored), chunk_tokens=64).step({"a": hidden})["a"]
    close(output, recurrence(SIZES, stored, hidden))


@pytest.mark.parametrize(("num_groups", "size"), [(2, 2), (6, 2), (6, 3)])
def test_ranks_together_are_the_whole(num_groups: int, size: int) -> None:
    """Groups are divided and heads go with them, in every stored projection."""
    sizes = replace(SIZES, num_groups=num_groups, num_heads=12)
    stored = weights(sizes)
    hidden = torch.randn(9, sizes.hidden_size)
    ranks = Ranks()
    for rank in range(size):
        Sequences(load(create(sizes, TensorParallel(rank, size, ranks)), stored)).step({"a": hidden})
    close(torch.stack(ranks.reduced).sum(0), recurrence(sizes, stored, hidden))


def test_what_ranks_cannot_divide_is_named() -> None:
    with pytest.raises(ConfigError, match="m: number of key heads is 2 and cannot be split over"):
        create(SIZES, TensorParallel(0, 3, Ranks()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_groups": 4}, "num_heads=6 is no multiple of num_groups=4"), ({"conv_width": 1}, "conv_width=1 must be")],
)
def test_impossible_sizes_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SIZES, **changes)


def test_parts_that_are_not_there_are_named() -> None:
    mixer = create(SIZES)
    for parameter, shard in (("weight", None), ("A_log", "q"), ("D", None)):
        with pytest.raises(KeyError, match="a delta mixer has whole"):
            mixer.place(parameter, shard)
    with pytest.raises(KeyError, match="a norm of heads has only"):
        mixer.norm.place("bias", None)
