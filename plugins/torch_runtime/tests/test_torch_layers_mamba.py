"""Mamba-2 mixers against the plain recurrence in float64, whatever a step holds: rows, chunks, checkpoints, ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import CommonAttentionMetadata, LinearMethod, LinearShape, MambaCacheMode, MambaSpec
from hardpoint_torch_runtime import ForwardContext, set_forward_context
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    MambaMixer,
    MambaSizes,
    StateMetadata,
    StateMetadataBuilder,
    TensorParallel,
    UnquantizedLinearMethod,
)

CPU = torch.device("cpu")
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


def plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


def create(sizes: MambaSizes, parallel: TensorParallel | None = None) -> MambaMixer:
    return MambaMixer("m", sizes, LinearFactory(plain, parallel or TensorParallel(), torch.float32, CPU), block_size=4)


def weights(sizes: MambaSizes, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, with decays from gentle to steep."""
    made = create(sizes)
    generator = torch.Generator().manual_seed(seed)
    stored = {name: torch.randn(made_.shape, generator=generator) for name, made_ in made.named_parameters()}
    stored["A_log"] = torch.linspace(-3, 3, sizes.num_heads)
    return stored


def load(mixer: MambaMixer, stored: Mapping[str, torch.Tensor]) -> MambaMixer:
    modules = dict(mixer.named_modules())
    for name, parameter in mixer.named_parameters():
        path, _, own = name.rpartition(".")
        placement = modules[path].place(own, None)
        assert placement.stored_shape == tuple(stored[name].shape)
        placement.target(parameter.data).copy_(placement.source(stored[name]))
    return mixer


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


@dataclass
class Sequences:
    """Runs a mixer over sequences of one mode, step by step; blocks are handed out from a cache full of NaN."""

    mixer: MambaMixer
    mode: MambaCacheMode = MambaCacheMode.NONE
    block_size: int = 4
    chunk_tokens: int = 3
    num_checkpoints: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    is_reordered: bool = True

    def __post_init__(self) -> None:
        spec = replace_spec(self.mixer.spec, self.mode, self.num_checkpoints)
        self.builder = StateMetadataBuilder(spec, CPU, self.chunk_tokens)
        self.states = tuple(torch.full((200, *shape), torch.nan) for shape in spec.shapes)
        self.free = list(range(199, 0, -1))

    def table(self, name: str, end: int) -> list[int]:
        table = self.tables.setdefault(name, [])
        wanted = 1 if self.mode is MambaCacheMode.NONE else -(-end // self.block_size)
        while len(table) < wanted:
            table.append(self.free.pop())
        return table

    def metadata(self, chunks: Mapping[str, int], *, is_exact: bool = True) -> StateMetadata:
        computed = np.array([self.computed.get(name, 0) for name in chunks], dtype=np.int32)
        lengths = np.array(list(chunks.values()), dtype=np.int32)
        starts = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        ends = (computed + lengths).astype(np.int32)
        tables = [self.table(name, int(end)) for name, end in zip(chunks, ends, strict=True)]
        ids = np.zeros((len(tables) + 2, max(map(len, tables))), dtype=np.int32)
        for row, table in enumerate(tables):
            ids[row, : len(table)] = table
        # Two rows of padding, as graphs have them.
        starts_cpu = np.concatenate((starts, starts[-1:], starts[-1:]))
        ends_cpu = np.concatenate((ends, np.zeros(2, dtype=np.int32)))
        return self.builder.build(
            CommonAttentionMetadata(
                num_rows=len(tables),
                num_tokens=int(starts[-1]),
                max_query_len=int(lengths.max()),
                max_seq_len=int(ends.max()),
                query_start_loc=torch.from_numpy(starts_cpu),
                query_start_loc_cpu=starts_cpu,
                seq_lens=torch.from_numpy(ends_cpu),
                seq_lens_cpu=ends_cpu,
                block_table=torch.from_numpy(ids),
                slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
                seq_lens_is_exact=is_exact,
                block_size=10**6 if self.mode is MambaCacheMode.NONE else self.block_size,
            )
        )

    @torch.inference_mode()
    def step(self, inputs: Mapping[str, torch.Tensor], num_padding: int = 0) -> dict[str, torch.Tensor]:
        """Outputs per sequence for its next tokens [t, C]."""
        lengths = {name: len(tokens) for name, tokens in inputs.items()}
        if self.is_reordered:
            lengths = dict(sorted(lengths.items(), key=lambda item: item[1] > 1))
        hidden = torch.cat([inputs[name] for name in lengths])
        hidden = torch.cat((hidden, torch.full((num_padding, hidden.shape[1]), torch.nan)))
        context = ForwardContext(
            attention_metadata={"m": self.metadata(lengths)},
            slot_mapping={},
            kv_caches={},
            num_tokens=len(hidden) - num_padding,
            states={"m": self.states},
        )
        with set_forward_context(context):
            output = self.mixer(hidden)[: len(hidden) - num_padding]
        for name, length in lengths.items():
            self.computed[name] = self.computed.get(name, 0) + length
        return dict(zip(lengths, output.split(list(lengths.values())), strict=True))


def replace_spec(spec: MambaSpec, mode: MambaCacheMode, num_checkpoints: int) -> MambaSpec:
    return MambaSpec(
        block_size=spec.block_size,
        shapes=spec.shapes,
        dtypes=spec.dtypes,
        mode=mode,
        num_checkpoint_blocks=num_checkpoints,
    )


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 2e-5) -> None:
    error = float((actual.double() - expected).abs().max() / expected.abs().max())
    assert error <= bound, f"relative error {error:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_into_steps_equals_the_recurrence(variant: str, data: st.DataObject) -> None:
    """Sequences join, go on by any number of tokens next to others or pause; states of NaN belong to nobody (R4.31,
    P4.4: a new sequence starts from nothing, whatever its block held)."""
    sizes = VARIANTS[variant]
    stored = weights(sizes)
    runner = Sequences(
        load(create(sizes), stored),
        mode=data.draw(st.sampled_from(MambaCacheMode)),
        chunk_tokens=data.draw(st.sampled_from([1, 3, 64])),
        num_checkpoints=data.draw(st.sampled_from([0, 2])),
        is_reordered=data.draw(st.booleans()),
    )
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(len(lengths))
    hidden = {str(n): torch.randn(length, sizes.hidden_size, generator=generator) for n, length in enumerate(lengths)}
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in hidden}
    while waiting := [name for name in hidden if runner.computed.get(name, 0) < len(hidden[name])]:
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        step = {}
        for name in chosen:
            done = runner.computed.get(name, 0)
            step[name] = hidden[name][done : done + data.draw(st.sampled_from([1, 1, 2, 5, 17]))]
        for name, output in runner.step(step, num_padding=data.draw(st.integers(0, 2))).items():
            outputs[name].append(output)
    for name, tokens in hidden.items():
        close(torch.cat(outputs[name]), recurrence(sizes, stored, tokens))


@pytest.mark.parametrize(("mode", "num_checkpoints"), [(MambaCacheMode.ALL, 0), (MambaCacheMode.ALIGN, 2)])
def test_a_sequence_goes_on_from_every_state_that_was_kept(mode: MambaCacheMode, num_checkpoints: int) -> None:
    """R1.33: mode ``all`` keeps one per block; mode ``align`` the last and the checkpoints before it."""
    stored = weights(SIZES)
    runner = Sequences(load(create(SIZES), stored), mode=mode, chunk_tokens=64, num_checkpoints=num_checkpoints)
    hidden = torch.randn(22, SIZES.hidden_size)
    runner.step({"a": hidden[:20], "b": torch.randn(3, SIZES.hidden_size)})
    expected = recurrence(SIZES, stored, hidden)
    kept = range(5) if mode is MambaCacheMode.ALL else range(2, 5)
    is_written = [not bool(state.isnan().any()) for state in runner.states[1][runner.tables["a"]]]
    assert is_written == [position in kept for position in range(5)]
    for position in kept:
        runner.computed["c"] = 4 * (position + 1)
        runner.tables["c"] = runner.tables["a"][: position + 1]
        close(runner.step({"c": hidden[4 * (position + 1) :]})["c"], expected[4 * (position + 1) :])


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


@torch.inference_mode()
def test_profiling_computes_all_tokens_as_one_row_and_touches_no_cache() -> None:
    """R5.40."""
    stored = weights(SIZES)
    hidden = torch.randn(70, SIZES.hidden_size)
    mixer = load(create(SIZES), stored)
    with set_forward_context(ForwardContext(attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=70)):
        close(mixer(hidden), recurrence(SIZES, stored, hidden))


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


@dataclass
class Ranks:
    """A communicator that plays the ranks one after another: what all of them gather is known from a first pass."""

    reduced: list[torch.Tensor] = field(default_factory=list)
    gathered: list[torch.Tensor] = field(default_factory=list)
    known: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == -1
        self.gathered.append(tensor)
        return torch.cat(self.known, dim=-1) if self.known else tensor.repeat(1, 64)

    def close(self) -> None: ...


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
