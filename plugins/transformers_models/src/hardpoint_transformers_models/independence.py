"""Whether what a layer computes for a token is that token's and its position's alone, attention apart: tried with the
loaded weights.

A layer that shifts, convolves or sums over tokens, that counts positions by itself or keeps something from one forward
to the next would compute with whatever lies next to each other in a batch, and nothing would tell. With attention that
gives every token something of its own, no token may notice another one.

Legend: N tokens of the trial, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from hardpoint.errors import ModelFormatError
from hardpoint_transformers_models.refusal import refusal
from hardpoint_transformers_models.replacement import PagedAttention

__all__ = ["attending_to_themselves", "differs", "require_independent_tokens"]

NUM_TOKENS = 24
MAX_CHANGE = 1e-3
"""Largest share of the largest value by which any output may differ in float32: batches that hold other tokens are
rounded otherwise."""
MAX_MEDIAN_CHANGE = 0.05
"""The same in narrower dtypes, for most tokens: a few may go to other experts for the sake of a last bit."""


def require_independent_tokens(
    architecture: str,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    vocab_size: int,
    num_positions: int,
    device: torch.device,
) -> None:
    """Raise ``UnsupportedModelError`` where outputs [N, C], which ``compute`` gives of ids [N] at positions [N], depend
    on what else is in the batch, on the order there, or on forwards before. To be called while
    :func:`attending_to_themselves`.

    Raises ``ModelFormatError`` where most outputs are no numbers, so that nothing can be told from them.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator).to(device)
    positions = (torch.rand(NUM_TOKENS, generator=generator) * num_positions).long().to(device)
    order = torch.randperm(NUM_TOKENS, generator=generator).to(device)
    half = NUM_TOKENS // 2
    outputs = compute(ids, positions)
    if int(outputs.isfinite().all(-1).sum()) <= half:
        raise ModelFormatError(
            f"{architecture}: what the weights make of tokens are no finite numbers; they are damaged, or need a "
            "wider --dtype"
        )
    trials = (
        (compute(ids[order], positions[order]), outputs[order], "on their order in a batch"),
        (compute(ids[:half], positions[:half]), outputs[:half], "on others in the batch"),
        (compute(ids, positions), outputs, "on forwards before"),
    )
    for found, expected, what in trials:
        if differs(found, expected):
            raise refusal(architecture, f"outside of attention tokens depend {what}")


def differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether one of [N, C] is further from the ``expected`` than rounding explains."""
    is_exact = expected.dtype is torch.float32
    finite = expected.isfinite().all(-1)
    if not torch.equal(finite, found.isfinite().all(-1)):
        return True
    found, expected = found[finite].float(), expected[finite].float()
    changes = (found - expected).abs().amax(-1) / expected.abs().amax()
    return float(changes.max()) > MAX_CHANGE if is_exact else float(changes.median()) > MAX_MEDIAN_CHANGE


@contextmanager
def attending_to_themselves(layers: Iterable[PagedAttention]) -> Iterator[None]:
    """Meanwhile every token gets something of its own from ``layers``, which need no cache for it."""
    layers = tuple(layers)
    for layer in layers:
        layer.attends_to_itself = True
    try:
        yield
    finally:
        for layer in layers:
            layer.attends_to_itself = False
