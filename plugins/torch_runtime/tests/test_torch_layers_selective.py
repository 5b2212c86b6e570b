"""Mamba-1 mixers against the plain recurrence in float64, whatever a step holds: rows, chunks, checkpoints, ranks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import MambaCacheMode
from hardpoint_testing_torch.rank_threads import RankThreads
from hardpoint_torch_runtime.layers import RMSNorm, SelectiveMixer, SelectiveSizes, TensorParallel
from hardpoint_torch_runtime.layers import selective_scan as scan_module
from hardpoint_torch_runtime.layers.selective_scan import linear_recurrence
from recurrent_steps import (
    CPU,
    Sequences,
    check_any_split,
    check_kept_states,
    check_profiling,
    check_two_steps,
    close,
    factory_of,
    load,
)

SIZES = SelectiveSizes(hidden_size=12, inner_size=18, state_size=5, step_rank=3, conv_width=4)
VARIANTS = {
    "plain": SIZES,
    "biases": replace(SIZES, has_bias=True, has_conv_bias=False, conv_width=2),
    "norms": replace(SIZES, norm_eps=1e-5, state_size=1, step_rank=7),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def norm(size: int, eps: float) -> RMSNorm:
    return RMSNorm(size, eps, torch.float32, CPU)


def create(sizes: SelectiveSizes, parallel: TensorParallel | None = None) -> SelectiveMixer:
    return SelectiveMixer("m", sizes, factory_of(parallel), norm, block_size=4)


def weights(sizes: SelectiveSizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, with decays from gentle to steep."""
    generator = torch.Generator().manual_seed(seed)
    stored = {name: torch.randn(made.shape, generator=generator) for name, made in create(sizes).named_parameters()}
    stored["A_log"] = torch.linspace(-3, 3, sizes.inner_size * sizes.state_size).view(-1, sizes.state_size)
    return stored


def recurrence(sizes: SelectiveSizes, stored: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """One sequence [T, C], token after token in float64."""
    w = {name: tensor.double() for name, tensor in stored.items()}
    none = torch.zeros(()).double()
    x, gate = (hidden.double() @ w["in_proj.weight"].T + w.get("in_proj.bias", none)).chunk(2, dim=-1)
    line = torch.cat((torch.zeros(sizes.conv_width - 1, sizes.inner_size).double(), x))
    state = torch.zeros(sizes.inner_size, sizes.state_size).double()
    outputs = []
    for token in range(len(hidden)):
        window = line[token : token + sizes.conv_width]
        x = torch.nn.functional.silu((window * w["conv1d.weight"][:, 0].T).sum(0) + w.get("conv1d.bias", none))
        parts = dict(
            zip("dbc", (w["x_proj.weight"] @ x).split((sizes.step_rank, *[sizes.state_size] * 2)), strict=True)
        )
        if sizes.norm_eps is not None:
            for name, part in parts.items():
                weight = w[f"{'dt' if name == 'd' else name}_layernorm.weight"]
                parts[name] = part / (part.square().mean() + sizes.norm_eps).sqrt() * weight
        step = torch.nn.functional.softplus(w["dt_proj.weight"] @ parts["d"] + w["dt_bias"])
        state = torch.exp(-step[:, None] * w["A_log"].exp()) * state + (step * x)[:, None] * parts["b"]
        outputs.append(state @ parts["c"] + w["D"] * x)
    y = torch.stack(outputs) * torch.nn.functional.silu(gate)
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", none)


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
    check_profiling(mixer, SIZES.hidden_size, lambda tokens: recurrence(SIZES, stored, tokens), 70)


def test_channels_may_be_taken_in_any_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide models take them one portion after another; here one channel at a time, and three."""
    stored = weights(SIZES)
    hidden = torch.randn(11, SIZES.hidden_size)
    for elements in (1, 3 * 11 * SIZES.state_size):
        monkeypatch.setattr(scan_module, "_MAX_ELEMENTS", elements)
        runner = Sequences(load(create(SIZES), stored), chunk_tokens=64)
        close(runner.step({"a": hidden})["a"], recurrence(SIZES, stored, hidden))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 63, 64, 65])
def test_all_values_of_a_linear_recurrence(length: int) -> None:
    keep, add = torch.rand(2, length, 3).double(), torch.randn(2, length, 3).double()
    value, expected = torch.zeros(2, 3).double(), []
    for place in range(length):
        value = keep[:, place] * value + add[:, place]
        expected.append(value)
    assert torch.allclose(linear_recurrence(keep, add), torch.stack(expected, dim=1), rtol=1e-12, atol=1e-12)


@dataclass
class Meeting:
    """Sums what ranks bring that run at the same time."""

    size: int
    parts: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=30)

    def communicator(self, rank: int) -> MeetingPlace:
        return MeetingPlace(self, rank)


@dataclass
class MeetingPlace:
    meeting: Meeting
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.meeting.parts[self.rank] = tensor
        self.meeting.barrier.wait()
        total = torch.stack([self.meeting.parts[rank] for rank in range(self.meeting.size)]).sum(0)
        self.meeting.barrier.wait()
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError("a selective mixer gathers nothing")

    def close(self) -> None: ...


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_together_are_the_whole(variant: str, size: int) -> None:
    """Channels are divided; what they select is summed over the ranks before it is normalized."""
    sizes, stored = VARIANTS[variant], weights(VARIANTS[variant])
    hidden = torch.randn(9, sizes.hidden_size)
    meeting = Meeting(size)

    def body(rank: int) -> torch.Tensor:
        mixer = load(create(sizes, TensorParallel(rank, size, meeting.communicator(rank))), stored)
        return Sequences(mixer).step({"a": hidden})["a"]

    for output in RankThreads.run(size, body, patience_s=60):
        close(output, recurrence(sizes, stored, hidden))


def test_what_ranks_cannot_divide_is_named() -> None:
    with pytest.raises(ConfigError, match="m: inner size is 18 and cannot be split over tensor_parallel_size=4"):
        create(SIZES, TensorParallel(0, 4, Meeting(4).communicator(0)))


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="conv_width=1 must be 2 or more"):
        replace(SIZES, conv_width=1)


@pytest.mark.parametrize(("parameter", "shard"), [("weight", None), ("D", "q"), ("bias", None)])
def test_parts_that_are_not_there_are_named(parameter: str, shard: str | None) -> None:
    with pytest.raises(KeyError, match="a mixer has whole A_log, D, dt_bias, not"):
        create(SIZES).place(parameter, shard)
