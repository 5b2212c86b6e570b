"""How many blocks an admission takes from the pool."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint_scheduling.kv_cache.groups import KVGroup, num_real
from hardpoint_scheduling.kv_cache.records import Segments

Admission = Sequence[tuple[KVGroup, Sequence[int]]]
"""Per group, the positions of its table that a request takes over when it is admitted."""


def needed_to_admit(
    request_id: str, admission: Admission, segments: Segments, end: int, whole: int | None, max_in_flight_tokens: int
) -> int:
    """Blocks that leave the free ones besides the hit, for a table up to ``end``.

    ``whole``: length of a sequence that has to fit (R3.73), by the bound of start-up (R1.35); None: no such gate.
    """
    needed = 0
    for group, blocks in admission:
        manager, held = group.manager, len(blocks)
        more = 0
        if segments.external and manager.grows:
            more = manager.blocks_needed(request_id, segments.computed, held)
        more += manager.blocks_needed(request_id, tokens_to_admit(group, segments, end), held + more)
        if not manager.counts_guesses:
            # Positions for guesses move on from the first allocation to the second.
            more = min(more, group.most_blocks(end, max_in_flight_tokens))
        if whole is not None and manager.grows:
            if manager.keeps_all:
                more = max(more, manager.blocks_needed(request_id, whole, held))
            else:
                more = max(more, group.most_blocks(whole, max_in_flight_tokens) - num_real(blocks))
        needed += more
    return needed


def tokens_to_admit(group: KVGroup, segments: Segments, end: int) -> int:
    """What the group's table is to cover."""
    if group.counts_encoder:
        return segments.encoder
    return group.tokens(end, min(segments.computed + max(segments.new, 0), end))
