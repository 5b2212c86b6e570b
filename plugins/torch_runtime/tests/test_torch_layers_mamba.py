"""Mamba-2 mixers against the plain recurrence in float64, whatever a step holds: rows, chunks, checkpoints, ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import LinearMethod, LinearShape, MambaCacheMode
from hardpoint_torch_runtime import ForwardContext, set_forward_context
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    MambaMixer,
    MambaSizes,
    TensorParallel,
    UnquantizedLinearMethod,
)
from recurrent_steps import (
    CPU,
    Ranks,
    Sequences,
    check_any_split,
    check_kept_states,
    check_profiling,
    close,
    factory_of,
    load,
)

SIZES = MambaSizes(
    hidden_size=12, num_heads=6, head_size=4, num_groups=2, state_size=5, conv_width=4, norm_eps=1e-5, has_bias=True
)
VARIANTS = {
    "grouped": SIZES,
    "one-group": replace(SIZES, num_groups=1, has_bias=False, has_conv_bias=False),
    "limits": replace(SIZES, num_groups=6, step_limits=(0.2, 0.9), conv_width=2),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def create(sizes: MambaSizes, parallel: TensorParallel | None = None) -> MambaMixer:
    return MambaMixer("m", sizes, factory_of(parallel), block_size=4)


def weights(sizes: MambaSizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, with decays from gentle to steep."""
    made = create(sizes)
    generator = torch.Generator().manual_seed(seed)
    stored = {name: torch.randn(made_.shape, generator=generator) for name, made_ in made.named_parameters()}
    stored["A_log"] = torch.linspace(-3, 3, sizes.num_heads)
    return stored


def recurrence(sizes: MambaSizes, stored: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """One sequence [T, C], token after token in float64."""
    w = {name: tensor.double() for name, tensor in stored.items()}
    inner, shared = sizes.inner_size, sizes.num_groups * sizes.state_size
    projected = hidden.double() @ w["in_proj.weight"].T + w.get("in_proj.bias", torch.zeros(()))
    gate, convolved, steps = projected.split((inner, inner + 2 * shared, sizes.num_heads), dim=-1)
    line = torch.cat((torch.zeros(sizes.conv_width - 1, convolved.shape[1]).double(), convolved))
    state = torch.zeros(sizes.num_heads, sizes.head_size, sizes.state_size).double()
    per_group = sizes.num_heads // sizes.num_groups
    outputs = []
    for token in range(len(hidden)):
        window = line[token : token + sizes.conv_width]
        x = (window * w["conv1d.weight"][:, 0].T).sum(0) + w.get("conv1d.bias", torch.zeros(()))
        x, b, c = torch.nn.functional.silu(x).split((inner, shared, shared))
        x = x.view(sizes.num_heads, sizes.head_size)
        b, c = (part.view(sizes.num_groups, -1).repeat_interleave(per_group, 0) for part in (b, c))
        step = torch.nn.functional.softplus(steps[token] + w["dt_bias"]).clamp(*sizes.step_limits)
        decay = torch.exp(-step * w["A_log"].exp())
        state = decay[:, None, None] * state + step[:, None, None] * x[:, :, None] * b[:, None, :]
        outputs.append(((state * c[:, None, :]).sum(-1) + w["D"][:, None] * x).flatten())
    y = torch.stack(outputs) * torch.nn.functional.silu(gate)
    groups = y.unflatten(-1, (sizes.num_groups, -1))
    y = (groups / (groups.square().mean(-1, keepdim=True) + sizes.norm_eps).sqrt()).flatten(-2) * w["norm.weight"]
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", torch.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_into_steps_equals_the_recurrence(variant: str, data: st.DataObject) -> None:
    """Sequences join, go on by any number of tokens next to others or pause; states of NaN belong to nobody (R4.31,
    P4.4: a new sequence starts from nothing, whatever its block held)."""
    sizes, stored = VARIANTS[variant], weights(VARIANTS[variant])
    mixer = load(create(sizes), stored)
    check_any_split(mixer, sizes.hidden_size, lambda tokens: recurrence(sizes, stored, tokens), data)


@pytest.mark.parametrize(("mode", "num_checkpoints"), [(MambaCacheMode.ALL, 0), (MambaCacheMode.ALIGN, 2)])
def test_a_sequence_goes_on_from_every_state_that_was_kept(mode: MambaCacheMode, num_checkpoints: int) -> None:
    """R1.33: mode ``all`` keeps one per block; mode ``align`` the last and the checkpoints before it."""
    stored = weights(SIZES)
    mixer = load(create(SIZES), stored)
    check_kept_states(mixer, SIZES.hidden_size, lambda tokens: recurrence(SIZES, stored, tokens), mode, num_checkpoints)


@pytest.mark.parametrize("mode", [MambaCacheMode.NONE, MambaCacheMode.ALL])
def test_a_row_that_starts_anew_in_a_used_block_owes_it_nothing(mode: MambaCacheMode) -> None:
    """R4.31, P4.4."""
    stored = weights(SIZES)
    runner = Sequences(load(create(SIZES), stored), mode=mode)
    hidden = torch.randn(7, SIZES.hidden_size)
    for first in (1, 7):
        for tensor in runner.states:
            tensor.fill_(torch.nan)
        runner.computed.clear()
        output = [runner.step({"a": hidden[:first]})["a"]]
        if first < 7:
            output.append(runner.step({"a": hidden[first:]})["a"])
        close(torch.cat(output), recurrence(SIZES, stored, hidden))


def test_a_gentle_decay_behind_a_steep_one_keeps_its_precision() -> None:
    """Sums of exponents that differ by orders of magnitude."""
    sizes = replace(SIZES, num_groups=1, num_heads=1, head_size=24)
    stored = weights(sizes)
    stored["A_log"] = torch.tensor([math.log(200.0)])
    stored["in_proj.weight"][-1] = 0.0
    stored["in_proj.weight"][-1, 0] = 1.0
    stored["in_proj.bias"][-1] = stored["dt_bias"][0] = 0.0
    hidden = torch.randn(40, sizes.hidden_size)
    hidden[:, 0] = -9.0
    hidden[3, 0] = 60.0
    runner = Sequences(load(create(sizes), stored), chunk_tokens=64)
    close(runner.step({"a": hidden})["a"], recurrence(sizes, stored, hidden))


def test_profiling_computes_all_tokens_as_one_row_and_touches_no_cache() -> None:
    """R5.40."""
    stored = weights(SIZES)
    mixer = load(create(SIZES), stored)
    check_profiling(mixer, SIZES.hidden_size, lambda tokens: recurrence(SIZES, stored, tokens), 70)


def test_rows_without_new_tokens_of_their_own_kind() -> None:
    """A step of decodes only needs no scan, and a scan no decodes."""
    runner = Sequences(load(create(SIZES), weights(SIZES)))
    scans = runner.metadata({"a": 3, "b": 2})
    assert (scans.decodes, scans.num_decodes) == (None, 0)
    runner.computed.update(a=3, b=2)
    decodes = runner.metadata({"a": 1, "b": 1})
    assert (decodes.scans, decodes.num_decodes) == (None, 2)


def test_lengths_that_nobody_knows_yet_are_refused() -> None:
    runner = Sequences(load(create(SIZES), weights(SIZES)))
    with pytest.raises(RuntimeError, match="the fate of earlier draft tokens is still open"):
        runner.metadata({"a": 3}, is_exact=False)


def test_metadata_of_another_kind_is_refused_by_name() -> None:
    context = ForwardContext(attention_metadata={"m": "other"}, slot_mapping={}, kv_caches={}, num_tokens=1)
    with (
        set_forward_context(context),
        pytest.raises(RuntimeError, match="has str for layer 'm'; a recurrent layer needs StateMetadata"),
    ):
        create(SIZES)(torch.zeros(1, SIZES.hidden_size))


@pytest.mark.parametrize(("num_groups", "size"), [(1, 2), (2, 2), (6, 2), (6, 3), (2, 4), (4, 2), (1, 3)])
def test_ranks_together_are_the_whole(num_groups: int, size: int) -> None:
    """Heads are divided; groups go with them, whole or shared by neighbors, and the norm spans its group's ranks."""
    sizes = replace(SIZES, num_groups=num_groups, num_heads=12)
    stored = weights(sizes)
    hidden = torch.randn(9, sizes.hidden_size)
    ranks = Ranks()
    for is_known in (False, True):
        ranks.reduced.clear()
        ranks.known, ranks.gathered = ranks.gathered if is_known else [], []
        for rank in range(size):
            Sequences(load(create(sizes, TensorParallel(rank, size, ranks)), stored)).step({"a": hidden})
    close(torch.stack(ranks.reduced).sum(0), recurrence(sizes, stored, hidden))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 4, "number of heads is 6 and cannot be split over tensor_parallel_size=4"),
        ({"num_heads": 12, "num_groups": 4}, 3, "number of groups is 4 and cannot be split over"),
        ({"num_heads": 12, "num_groups": 4}, 6, "number of groups is 4 and cannot be shared evenly"),
    ],
)
def test_what_ranks_cannot_divide_is_named(changes: dict[str, int], size: int, message: str) -> None:
    sizes = replace(SIZES, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        create(sizes, TensorParallel(0, size, Ranks()))


def test_a_quantized_projection_is_not_cut_between_ranks() -> None:
    """Its stored tensor holds five projections; only a plain weight can be taken apart."""

    class Quantized(LinearMethod):
        def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
            UnquantizedLinearMethod(torch.float32, CPU).create_weights(layer, shape)

        def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return x

    factory = LinearFactory(lambda name, shape: Quantized(), TensorParallel(0, 2, Ranks()), torch.float32, CPU)
    mixer = MambaMixer("m", SIZES, factory, 4)
    with pytest.raises(ConfigError, match=r"'m.in_proj' has 5 projections in one stored tensor.*Quantized"):
        mixer.in_proj.place("weight", None)
    alone = LinearFactory(lambda name, shape: Quantized(), TensorParallel(), torch.float32, CPU)
    assert MambaMixer("m", SIZES, alone, 4).in_proj.place("weight", None).stored_shape == (24 + 24 + 20 + 6, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_groups": 4}, "num_heads=6 is no multiple of num_groups=4"), ({"conv_width": 1}, "conv_width=1 must be")],
)
def test_impossible_sizes_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SIZES, **changes)  # type: ignore[arg-type]


def test_parts_that_are_not_there_are_named() -> None:
    mixer = create(SIZES)
    parts: Sequence[tuple[torch.nn.Module, str, str | None]] = [
        (mixer, "weight", None),
        (mixer, "D", "q"),
        (mixer.conv1d, "weight", "x"),
        (mixer.norm, "bias", None),
        (mixer.in_proj, "weight", "gate"),
    ]
    for module, parameter, shard in parts:
        with pytest.raises(KeyError):
            module.place(parameter, shard)  # type: ignore[operator]
