"""Phases 2 and 3 of block-size alignment: pages of equal size for layers of different kinds in one block pool.

A pool hands out ids without knowing what they will hold, so every page in it must be as large as the largest. Phase 1
(the launcher's) chose a block size that the attention backends accept; these phases may enlarge it and pad the rest,
also where the user chose the size. Sizes of blocks are in tokens, of pages in bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hardpoint.errors import ConfigError
from hardpoint.interfaces import BlockSizeRule, smallest_block_size

_logger = logging.getLogger(__name__)

HYBRID_PHASE = 2
DTYPE_PHASE = 3


@dataclass(frozen=True, slots=True)
class PageSize:
    """The main attention layers' block and what every page of the pool takes.

    ``used_bytes`` is what a main page holds, ``page_bytes`` that and its padding. ``rules`` are the sizes each
    attention backend accepts, by its name; where a state spans several tokens, their number is one more rule.
    """

    block_size: int
    used_bytes: int
    page_bytes: int
    rules: Mapping[str, BlockSizeRule]

    @classmethod
    def of(cls, block_size: int, used_bytes: int, rules: Mapping[str, BlockSizeRule]) -> PageSize:
        """The main layers' page as phase 1 left it."""
        return cls(block_size, used_bytes, used_bytes, rules)


def align_hybrid(size: PageSize, state_bytes: int) -> PageSize:
    """Phase 2 (R12.40): attention layers and recurrent layers, whose page of ``state_bytes`` no block size changes.

    Where the state is larger the block grows to the smallest accepted size whose page covers it, or the attention page
    is padded if the backends accept none; where it is smaller its own page is padded.
    """
    if state_bytes <= size.page_bytes:
        return size
    try:
        return _grown(size, state_bytes, HYBRID_PHASE, "a recurrent state")
    except ConfigError as error:
        _logger.info("KV pages padded to %d bytes by phase %d of alignment: %s", state_bytes, HYBRID_PHASE, error)
        return replace(size, page_bytes=state_bytes)


def align_dtypes(size: PageSize, other_pages: Iterable[int]) -> PageSize:
    """Phase 3 (R12.41): further attention layers keep their own blocks, of ``other_pages`` bytes (padding included).

    The main block grows until its page covers the largest; smaller ones are padded. Raises ``ConfigError`` listing each
    backend's sizes when none is large enough.
    """
    largest = max(other_pages, default=0)
    return size if largest <= size.page_bytes else _grown(size, largest, DTYPE_PHASE, "a layer of another dtype")


def align(size: PageSize, state_pages: Iterable[int] = (), other_pages: Iterable[int] = ()) -> PageSize:
    """Both phases in their order (R12.42)."""
    return align_dtypes(align_hybrid(size, max(state_pages, default=0)), other_pages)


def _grown(size: PageSize, needed: int, phase: int, what: str) -> PageSize:
    """The smallest accepted block with a page of at least ``needed`` bytes; the change is logged with its phase."""
    # A block holds a whole number of states, so its bytes grow in proportion to its tokens.
    grown = smallest_block_size(size.rules, -(-needed * size.block_size // size.used_bytes))
    content = size.used_bytes * grown // size.block_size
    _logger.info(
        "KV block size %d, set by phase %d of alignment (was %d): its page of %d bytes covers %s of %d bytes",
        *(grown, phase, size.block_size, content, what, needed),
    )
    return replace(size, block_size=grown, used_bytes=content, page_bytes=content)
