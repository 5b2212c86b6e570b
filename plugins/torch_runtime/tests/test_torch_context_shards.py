"""Contexts dealt out among ranks: who holds what, and how much at most."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_torch_runtime.layers import ContextShards, LocalLengths

shards = st.builds(ContextShards, st.integers(1, 5), st.integers(1, 4))


@given(shards=shards, length=st.integers(0, 100))
def test_every_token_has_one_place(shards: ContextShards, length: int) -> None:
    """R5.91: local lengths with interleave, by counting; their bound holds for every rank."""
    positions = np.arange(length)
    owners, local = shards.owners(positions), shards.local_positions(positions)
    for rank in range(shards.num_ranks):
        held = positions[owners == rank]
        assert local[owners == rank].tolist() == list(range(len(held))), "a rank's tokens lie back to back"
        assert shards.global_positions(np.arange(len(held)), rank).tolist() == held.tolist()
        lengths = np.array([length], dtype=np.int32)
        counted = shards.local_lengths(lengths, rank)
        assert counted.tolist() == [len(held)]
        assert counted.dtype == np.int32
        assert shards.local_lengths(torch.from_numpy(lengths), rank).tolist() == [len(held)]
        assert len(held) <= shards.bound(length)


@pytest.mark.parametrize(
    ("ranks", "interleave", "length", "bound"),
    [(1, 1, 7, 7), (4, 1, 7, 2), (4, 1, 8, 2), (4, 1, 9, 3), (2, 16, 33, 32), (2, 16, 32, 16), (2, 16, 0, 0)],
)
def test_the_bound(ranks: int, interleave: int, length: int, bound: int) -> None:
    """R5.91: ceil(L / (N I)) I, by hand."""
    assert ContextShards(ranks, interleave).bound(length) == bound


@given(shards=shards, batches=st.lists(st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=4))
def test_the_buffer_is_as_if_new(shards: ContextShards, batches: list[list[int]]) -> None:
    """R5.91, R5.38, I5.4, I5.5: one address, and zeros behind the rows whatever was there before."""
    held = LocalLengths(shards, shards.num_ranks - 1, 6, torch.device("cpu"))
    address = held.buffer.data_ptr()
    for batch in batches:
        lengths = torch.tensor(batch, dtype=torch.int32)
        used = held.fill(lengths)
        assert used.tolist() == shards.local_lengths(lengths, held.rank).tolist()
        assert not held.buffer[len(batch) :].any()
        assert held.buffer.data_ptr() == address


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 rows do not fit a buffer of 2"):
        LocalLengths(ContextShards(2), 0, 2, torch.device("cpu")).fill(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
        ContextShards(2).local_lengths(np.array([1]), 2)
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="one rank or more"):
            ContextShards(*wrong)
