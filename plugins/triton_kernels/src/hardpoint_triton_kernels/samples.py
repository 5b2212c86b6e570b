"""Arguments for the operators, small and of several sizes, on which the conformance kit compares them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["block_lists", "block_pairs", "drafts", "gated", "mixtures", "penalties", "rotations", "rows"]

Arguments = Iterable[tuple[Any, ...]]


def _normal(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _whole(device: str, highest: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(highest + sum(shape))
    return torch.randint(highest, shape, generator=generator).to(device)


def gated(device: str) -> Arguments:
    return [
        (_normal(device, tokens, 2 * size), exact)
        for tokens, size, exact in ((1, 4, True), (0, 4, True), (3, 19, False))
    ]


def rows(device: str) -> Arguments:
    return [(_normal(device, *shape),) for shape in ((1, 8), (0, 8), (2, 3, 17))]


def rotations(device: str) -> Arguments:
    found = []
    for tokens, heads, size, rotated in ((1, 1, 8, 8), (3, 2, 12, 4)):
        angles = _normal(device, tokens, 1, rotated // 2).repeat_interleave(2, dim=-1)
        signs = torch.tensor([-1.0, 1.0], device=device).repeat(rotated // 2)
        found.append((_normal(device, tokens, heads, size), angles.cos(), angles.sin() * signs, rotated))
    return found


def penalties(device: str) -> Arguments:
    found = []
    for num_rows, size, length in ((1, 9, 3), (3, 40, 7)):
        tokens = _whole(device, size + 1, num_rows, length)
        factors = (1 + _normal(device, num_rows, seed=seed).abs() for seed in range(3))
        chosen = torch.arange(num_rows, device=device)
        found.append((_normal(device, num_rows + 1, size), chosen, tokens, tokens % 2 == 0, *factors))
    return found


def drafts(device: str) -> Arguments:
    found: list[tuple[Any, ...]] = []
    for lengths, size, has_proposals in (((1,), 5, True), ((2, 0, 3), 11, False)):
        total = sum(lengths)
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
        target = _normal(device, total, size).softmax(-1)
        proposed = _normal(device, total, size, seed=1).softmax(-1) if has_proposals else None
        uniforms = (_normal(device, count, seed=2).sigmoid() for count in (total, len(lengths)))
        is_greedy = torch.arange(len(lengths), device=device) % 2 == 1
        bonus = _whole(device, size, len(lengths))
        ids = _whole(device, size, total)
        found.append((ids, starts, is_greedy, target.argmax(-1), target, proposed, bonus, *uniforms, max(lengths) + 1))
    return found


def mixtures(device: str) -> Arguments:
    found = []
    for tokens, hidden, size, experts, choices in ((1, 8, 4, 2, 1), (5, 16, 12, 4, 2)):
        gate_up = _normal(device, experts, 2 * size, hidden) / hidden**0.5
        down = _normal(device, experts, hidden, size) / size**0.5
        weights = _normal(device, tokens, choices).softmax(-1)
        chosen = _whole(device, experts, tokens, choices)
        found.append((_normal(device, tokens, hidden), gate_up, down, weights, chosen, "silu"))
    return found


def block_pairs(device: str) -> Arguments:
    return [
        (_normal(device, 4, 2, 3, 8), torch.tensor(sources, device=device), torch.tensor(targets, device=device))
        for sources, targets in (([1], [0]), ([3, -1], [2, 1]))
    ]


def block_lists(device: str) -> Arguments:
    return [(_normal(device, 4, 2, 3, 8), torch.tensor(blocks, device=device)) for blocks in ([1], [0, -1, 3])]
