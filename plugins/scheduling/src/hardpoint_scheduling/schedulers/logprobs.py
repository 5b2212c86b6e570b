"""Log-probability arrays of a step as per-request records."""

from __future__ import annotations

from hardpoint.interfaces import LogprobArrays, TokenLogprobs


def by_row(arrays: LogprobArrays | None) -> dict[int, list[TokenLogprobs]]:
    """Entries per row of the step, in their order. Padding (token id -1) is dropped."""
    found: dict[int, list[TokenLogprobs]] = {}
    if arrays is None:
        return found
    columns = zip(
        arrays.rows.tolist(), arrays.token_ids.tolist(), arrays.logprobs.tolist(), arrays.ranks.tolist(), strict=True
    )
    for row, token_ids, logprobs, rank in columns:
        width = token_ids.index(-1) if -1 in token_ids else len(token_ids)
        found.setdefault(row, []).append(TokenLogprobs(token_ids[:width], logprobs[:width], rank))
    return found
