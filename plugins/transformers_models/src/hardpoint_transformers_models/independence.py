"""Whether tokens meet anywhere but in attention, tried on the loaded model.

A layer that shifts, convolves or sums over tokens would compute with whatever lies next to each other in a batch, and
nothing would tell. With attention that gives every token its own value, no token may notice another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from hardpoint_transformers_models.refusal import refusal
from hardpoint_transformers_models.replacement import PagedAttention

__all__ = ["require_independent_tokens"]

MAX_CHANGE = 0.05
"""Largest share of the largest value by which an output may differ: batches of other tokens are rounded otherwise."""


def require_independent_tokens(
    architecture: str,
    layers: Iterable[PagedAttention],
    compute: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    device: torch.device,
) -> None:
    """Raise ``UnsupportedModelError`` where outputs [T, C], which ``compute`` gives of ids [T], depend on others."""
    first, middle, last = 0, vocab_size // 2, vocab_size - 1
    with _alone(tuple(layers)):
        outputs = [
            compute(torch.tensor(ids, device=device)).float()
            for ids in ((first, middle), (last, middle), (first, last))
        ]
    pairs = ((outputs[0][1], outputs[1][1], "those before"), (outputs[0][0], outputs[2][0], "those behind"))
    for one, other, where in pairs:
        if float((one - other).abs().max()) > MAX_CHANGE * float(one.abs().max()):
            raise refusal(architecture, f"outside of attention tokens depend on {where} them")


@contextmanager
def _alone(layers: tuple[PagedAttention, ...]) -> Iterator[None]:
    for layer in layers:
        layer.gives_own_value = True
    try:
        yield
    finally:
        for layer in layers:
            layer.gives_own_value = False
