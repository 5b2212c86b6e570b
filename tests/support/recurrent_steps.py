"""Runs recurrent layers over sequences step by step, as a worker would, and compares them with plain recurrences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from hypothesis import strategies as st

from hardpoint.interfaces import CommonAttentionMetadata, LinearMethod, LinearShape, MambaCacheMode, MambaSpec
from hardpoint_torch_runtime import ForwardContext, set_forward_context
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    RecurrentLayer,
    StateMetadata,
    StateMetadataBuilder,
    TensorParallel,
    UnquantizedLinearMethod,
)

__all__ = [
    "CPU",
    "Ranks",
    "Sequences",
    "check_any_split",
    "check_kept_states",
    "check_profiling",
    "check_two_steps",
    "close",
    "factory_of",
    "load",
]

CPU = torch.device("cpu")
Layer = TypeVar("Layer", bound=RecurrentLayer)
Recurrence = Callable[[torch.Tensor], torch.Tensor]
"""Outputs [T, C] of one sequence [T, C], token after token in float64."""


def _plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


def factory_of(parallel: TensorParallel | None = None) -> LinearFactory:
    """Of plain float32 linears."""
    return LinearFactory(_plain, parallel or TensorParallel(), torch.float32, CPU)


def load(mixer: Layer, stored: Mapping[str, torch.Tensor]) -> Layer:
    """The layer with this rank's share of the stored tensors."""
    modules = dict(mixer.named_modules())
    for name, parameter in mixer.named_parameters():
        path, _, own = name.rpartition(".")
        placement = modules[path].place(own, None)
        assert placement.stored_shape == tuple(stored[name].shape)
        placement.target(parameter.data).copy_(placement.source(stored[name]))
    return mixer


@dataclass
class Sequences:
    """Runs a mixer over sequences of one mode, step by step; blocks are handed out from a cache full of NaN."""

    mixer: RecurrentLayer
    mode: MambaCacheMode = MambaCacheMode.NONE
    block_size: int = 4
    chunk_tokens: int = 3
    num_checkpoints: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    is_reordered: bool = True

    def __post_init__(self) -> None:
        spec = _replace_spec(self.mixer.spec, self.mode, self.num_checkpoints)
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


def _replace_spec(spec: MambaSpec, mode: MambaCacheMode, num_checkpoints: int) -> MambaSpec:
    return MambaSpec(
        block_size=spec.block_size,
        shapes=spec.shapes,
        dtypes=spec.dtypes,
        mode=mode,
        num_checkpoint_blocks=num_checkpoints,
    )


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float = 2e-5) -> None:
    """Raises ``AssertionError`` for an error above ``bound``, relative to the largest value expected."""
    error = float((actual.double() - expected).abs().max() / expected.abs().max())
    assert error <= bound, f"relative error {error:.3g}"


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


def check_any_split(mixer: RecurrentLayer, hidden_size: int, recurrence: Recurrence, data: st.DataObject) -> None:
    """Sequences join, go on by any number of tokens next to others or pause; each must come out as ``recurrence`` says
    of all of its tokens, whatever mode the states are kept in."""
    runner = Sequences(
        mixer,
        mode=data.draw(st.sampled_from(MambaCacheMode)),
        chunk_tokens=data.draw(st.sampled_from([1, 3, 64])),
        num_checkpoints=data.draw(st.sampled_from([0, 2])),
        is_reordered=data.draw(st.booleans()),
    )
    lengths = data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(len(lengths))
    hidden = {str(n): torch.randn(length, hidden_size, generator=generator) for n, length in enumerate(lengths)}
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
        close(torch.cat(outputs[name]), recurrence(tokens))


def check_two_steps(mixer: RecurrentLayer, hidden_size: int, recurrence: Recurrence) -> None:
    """A prompt in two steps and then single tokens, beside another and before padding."""
    runner = Sequences(mixer, chunk_tokens=5)
    hidden = torch.randn(25, hidden_size)
    parts = [runner.step({"a": part, "b": part}, num_padding=2)["a"] for part in torch.split(hidden, [13, 9, 1, 1, 1])]
    close(torch.cat(parts), recurrence(hidden))


def check_kept_states(
    mixer: RecurrentLayer, hidden_size: int, recurrence: Recurrence, mode: MambaCacheMode, num_checkpoints: int
) -> None:
    """A sequence of five blocks goes on from every state that was kept, and no other one was written: in mode ``all``
    one per block, in mode ``align`` the last and the checkpoints before it."""
    runner = Sequences(mixer, mode=mode, chunk_tokens=64, num_checkpoints=num_checkpoints)
    hidden = torch.randn(22, hidden_size)
    runner.step({"a": hidden[:20], "b": torch.randn(3, hidden_size)})
    expected = recurrence(hidden)
    kept = range(5) if mode is MambaCacheMode.ALL else range(4 - num_checkpoints, 5)
    is_written = [not bool(state.isnan().any()) for state in runner.states[1][runner.tables["a"]]]
    assert is_written == [position in kept for position in range(5)]
    for position in kept:
        runner.computed["c"] = 4 * (position + 1)
        runner.tables["c"] = runner.tables["a"][: position + 1]
        close(runner.step({"c": hidden[4 * (position + 1) :]})["c"], expected[4 * (position + 1) :])


@torch.inference_mode()
def check_profiling(mixer: RecurrentLayer, hidden_size: int, recurrence: Recurrence, num_tokens: int) -> None:
    """Without metadata all tokens are one row, and no cache is touched."""
    hidden = torch.randn(num_tokens, hidden_size)
    context = ForwardContext(attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=num_tokens)
    with set_forward_context(context):
        close(mixer(hidden), recurrence(hidden))
