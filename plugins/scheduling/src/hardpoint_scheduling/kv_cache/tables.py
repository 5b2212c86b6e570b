"""Growing many block tables at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hardpoint.interfaces import KVBlockPool


def grow_tables(
    pool: KVBlockPool, tables: Sequence[list[int]], lengths: Iterable[int], num_free: int
) -> list[Sequence[int]] | None:
    """Give every table the blocks it lacks up to its length, by one call to the pool: rows at a block boundary come
    together. Returns the new ids per table; None, and nothing changed, when they all need more than ``num_free``.
    """
    counts = [max(length - len(table), 0) for length, table in zip(lengths, tables, strict=True)]
    total = sum(counts)
    if total > num_free:
        return None
    blocks = pool.allocate(total)
    grown: list[Sequence[int]] = []
    start = 0
    for table, count in zip(tables, counts, strict=True):
        new = blocks[start : start + count]
        table.extend(new)
        grown.append(new)
        start += count
    return grown
