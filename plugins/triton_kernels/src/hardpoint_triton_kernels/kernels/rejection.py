"""Which drafts count, such that the tokens have the model's own distribution. Legend: R rows, D drafts of all rows,
V vocabulary, W width of the result.

A draft that was drawn with probability q and has probability p in the model counts with probability min(1, p / q); the
first that does not is replaced by a draw from what the model has above the drafts' distribution, max(p - q, 0). Without
a distribution of the drafts each was certain: q is 1 for the draft and 0 for the others. Greedy rows keep drafts while
they are the model's best tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import next_power_of_two

__all__ = ["rejection_kernel", "rejection_sample"]

_WIDEST = 4096
_WARPS = 8


@triton.jit
def _excess(
    target: tl.tensor, proposed: tl.tensor, base: tl.tensor, token: tl.tensor, draft: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """max(p - q, 0) of the tokens ``token``, in float32."""
    p = tl.load(target + base + token, mask=inside, other=0.0)
    if proposed is not None:
        q = tl.load(proposed + base + token, mask=inside, other=0.0)
        # A missing draft takes nothing away from the model's distribution.
        result = tl.maximum(p - tl.where(draft >= 0, q, 0.0), 0.0)
    else:
        result = tl.where(token == draft, 0.0, p)
    return tl.where(inside, result, 0.0)


@triton.jit
def _redraw(
    target: tl.tensor,
    proposed: tl.tensor,
    base: tl.tensor,
    draft: tl.tensor,
    uniform: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """The first token up to which more than ``uniform`` of all excess lies; where there is none, the model's draw."""
    lanes = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), dtype=tl.float32)
    for begin in range(0, size, WIDTH):
        token = begin + lanes
        sums += _excess(target, proposed, base, token, draft, token < size)
    excess = tl.sum(sums)
    # Where nothing is above the drafts' distribution it is the model's but for roundings. Then the draw is the model's
    # own, and not the draft, which may have no probability at all.
    taken = tl.where(excess > 0, draft, -1)
    goal = uniform * tl.where(excess > 0, excess, 1.0)
    before = tl.full((), 0.0, dtype=tl.float32)
    found = tl.full((), -1, dtype=tl.int64)
    last = draft
    for begin in range(0, size, WIDTH):
        token = begin + lanes
        weight = _excess(target, proposed, base, token, taken, token < size)
        reached = before + tl.cumsum(weight, axis=0)
        hit = tl.min(tl.where((reached > goal) & (weight > 0), token, size))
        found = tl.where((found < 0) & (hit < size), hit.to(tl.int64), found)
        possible = tl.max(tl.where(weight > 0, token, -1))
        last = tl.where(possible >= 0, possible.to(tl.int64), last)
        before += tl.sum(weight)
    # Sums in another order may fall short of the goal by a rounding: then it is the last possible token.
    return tl.where(found >= 0, found, last)


@triton.jit
def rejection_kernel(
    drafts: tl.tensor,
    starts: tl.tensor,
    is_greedy: tl.tensor,
    best: tl.tensor,
    target: tl.tensor,
    proposed: tl.tensor,
    bonus: tl.tensor,
    accept_uniforms: tl.tensor,
    redraw_uniforms: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """One row: see :func:`rejection_sample`."""
    row = tl.program_id(0)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    greedy = tl.load(is_greedy + row) != 0
    output = tokens + row.to(tl.int64) * width
    accepted = tl.full((), 0, dtype=tl.int64)
    is_open = first < last
    while is_open:
        place = first + accepted
        draft = tl.load(drafts + place)
        if greedy:
            is_right = draft == tl.load(best + place)
        else:
            p = tl.load(target + place * size + draft, mask=draft >= 0, other=0.0)
            q = tl.full((), 1.0, dtype=tl.float32)
            if proposed is not None:
                q = tl.load(proposed + place * size + draft, mask=draft >= 0, other=1.0)
            is_right = (p > 0) & (tl.load(accept_uniforms + place) * q < p)
        if is_right:
            tl.store(output + accepted, draft)
            accepted += 1
        is_open = is_right & (first + accepted < last)
    if first + accepted < last:
        place = first + accepted
        if greedy:
            token = tl.load(best + place)
        else:
            uniform = tl.load(redraw_uniforms + row)
            token = _redraw(target, proposed, place * size, tl.load(drafts + place), uniform, size, WIDTH)
    else:
        token = tl.load(bonus + row)
    tl.store(output + accepted, token)
    tl.store(counts + row, accepted + 1)


def rejection_sample(
    drafts: torch.Tensor,
    starts: torch.Tensor,
    is_greedy: torch.Tensor,
    best: torch.Tensor,
    target: torch.Tensor,
    proposed: torch.Tensor | None,
    bonus: torch.Tensor,
    accept_uniforms: torch.Tensor,
    redraw_uniforms: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [R, W], -1 from where a row has none; counts int64 [R], accepted drafts and the token after them).

    Row r has the drafts ``starts[r]`` to ``starts[r + 1]`` (int64 [R + 1]) of ``drafts`` int64 [D]; -1 is a missing
    one, which never counts. ``best`` int64 [D] are the model's best tokens in their places, ``bonus`` int64 [R] its
    token behind a row's last draft. ``target`` and ``proposed`` float32 [D, V] contiguous are the distributions of
    model and drafts, after temperature and truncation; ``proposed`` None: drafts were certain. Uniforms are float32 in
    [0, 1), for each draft [D] and each row [R]. ``width`` is the most drafts of a row and one.
    """
    num_rows = len(bonus)
    tokens = torch.full((num_rows, width), -1, dtype=torch.int64, device=drafts.device)
    counts = torch.zeros(num_rows, dtype=torch.int64, device=drafts.device)
    if num_rows:
        size = target.shape[1]
        rejection_kernel[(num_rows,)](
            drafts,
            starts,
            is_greedy,
            best,
            target,
            proposed,
            bonus,
            accept_uniforms,
            redraw_uniforms,
            tokens,
            counts,
            size,
            width,
            WIDTH=min(_WIDEST, next_power_of_two(size)),
            num_warps=_WARPS,
        )
    return tokens, counts
