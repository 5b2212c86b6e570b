"""What blocks cost, and whether a sequence of the largest length fits them."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.errors import ConfigError
from hardpoint.interfaces import KVPlanRequest
from hardpoint_scheduling.kv_cache.grouping import LayerGroup


def bytes_per_block(groups: Sequence[LayerGroup]) -> int:
    """Memory that one more block id costs: groups share it, so it is that of the largest."""
    return max(group.page_bytes for group in groups)


def on_rank(groups: Sequence[LayerGroup], names: Sequence[str]) -> list[LayerGroup]:
    """The groups' layers on one rank of a pipeline. Raises ``ConfigError`` for a rank without any."""
    kept = set(names)
    shares = [{n: s for n, s in zip(group.names, group.specs, strict=True) if n in kept} for group in groups]
    if not any(shares):
        raise ConfigError(f"a rank with the layers {list(names)} keeps no KV; use fewer pipeline stages")
    return [LayerGroup.of(share, group.role) for group, share in zip(groups, shares, strict=True) if share]


def check_one_sequence_fits(
    request: KVPlanRequest, groups: Sequence[LayerGroup], block_bytes: int, num_blocks: int
) -> None:
    """Raises ``ConfigError`` with numbers to set, each of which works."""
    needed = _blocks_for(groups, request.max_model_len, request.max_num_batched_tokens)
    if needed <= num_blocks:
        return
    needed_bytes = needed * block_bytes
    fitting = _longest_fitting(request, groups, num_blocks)
    shorter = f"set --max-model-len {fitting} or less, or " if fitting else ""
    if request.num_blocks is None:
        have = f"the budget of {request.budget_bytes:,} bytes holds {max(num_blocks, 0)}"
        more = f"--kv-cache-memory {needed_bytes} or more"
    else:
        have = f"--num-kv-blocks allows {num_blocks}"
        more = f"--num-kv-blocks {needed} or more ({needed_bytes:,} bytes)"
    raise ConfigError(
        f"one sequence of --max-model-len {request.max_model_len} tokens needs {needed} KV cache blocks (the null "
        f"block included), but {have}; {shorter}set {more}"
    )


def _blocks_for(groups: Sequence[LayerGroup], max_model_len: int, max_in_flight: int) -> int:
    """Blocks one sequence can hold, and the null block."""
    return 1 + sum(group.spec.max_blocks(max_model_len, max_in_flight) for group in groups)


def _longest_fitting(request: KVPlanRequest, groups: Sequence[LayerGroup], num_blocks: int) -> int:
    """The largest context length that fits ``num_blocks``; 0 when not even one token does."""
    fits, fails = 0, request.max_model_len
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _blocks_for(groups, middle, request.max_num_batched_tokens) <= num_blocks:
            fits = middle
        else:
            fails = middle
    return fits
