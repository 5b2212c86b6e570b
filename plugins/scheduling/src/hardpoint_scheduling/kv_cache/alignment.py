"""Phases 2 and 3 of block-size alignment: pages of equal size for layers of different kinds in one block pool.

A pool hands out ids without knowing what they will hold, so every page in it must be as large as the largest. Phase 1
(the launcher's) chose a block size that the attention backends accept; these phases may enlarge it and pad the rest,
also where the user chose the size. Sizes of blocks are in tokens, of pages in bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces import BlockSizeRule, KVCacheSpec, MambaCacheMode, MambaSpec, smallest_block_size

_logger = logging.getLogger(__name__)

HYBRID_PHASE = 2
DTYPE_PHASE = 3

STATES_RULE = "the tokens of a state"
BLOCKS_RULE = "the blocks of other layers"


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


def equal_pages(specs: Mapping[str, KVCacheSpec], rules: Mapping[str, BlockSizeRule]) -> dict[str, KVCacheSpec]:
    """The layers' specs with blocks and padding such that all pages have one size.

    Main layers are the most frequent among those whose pages grow with the block. ``rules`` by attention backend.
    Raises ``ConfigError`` where the main block cannot grow as far as phase 3 needs.
    """
    if len({spec.page_size_bytes for spec in specs.values()}) <= 1:
        return dict(specs)
    growing = Counter(_shape(spec) for spec in specs.values() if spec.tokens_per_state > 0)
    main = growing.most_common(1)[0][0] if growing else None
    others = [spec for spec in specs.values() if _shape(spec) != main]
    aligned, page = dict(specs), max(spec.page_size_bytes for spec in specs.values())
    if main is not None:
        block_size, used_bytes, page_bytes = main
        size = PageSize(block_size, used_bytes, page_bytes, {**rules, **_own_rules(specs.values(), main, bool(rules))})
        states = (spec.page_size_bytes for spec in others if spec.tokens_per_state <= 0)
        try:
            size = align(size, states, (spec.page_size_bytes for spec in others if spec.tokens_per_state > 0))
        except ConfigError as error:
            advice = "or give all layers one block table with --no-hybrid-kv-cache, where they allow it"
            raise ConfigError(f"{error}; {advice}") from error
        if size.block_size != block_size:
            grown = {"block_size": size.block_size, "padded_page_size": None}
            aligned = {n: msgspec.structs.replace(s, **grown) if _shape(s) == main else s for n, s in specs.items()}
            aligned = {name: _following(spec, size.block_size) for name, spec in aligned.items()}
        page = size.page_bytes
    return _padded(aligned, page)


def _following(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """States that prefixes are found by lie at ends of the main layers' blocks: at others no prefix has both."""
    is_found = isinstance(spec, MambaSpec) and spec.mode is not MambaCacheMode.NONE
    return msgspec.structs.replace(spec, block_size=block_size) if is_found and spec.block_size < block_size else spec


def _padded(specs: Mapping[str, KVCacheSpec], page: int) -> dict[str, KVCacheSpec]:
    """Every page of at least ``page`` bytes; a spec may round further up, and then all others follow."""
    while True:
        padded = {
            name: spec if spec.page_size_bytes == page else msgspec.structs.replace(spec, padded_page_size=page)
            for name, spec in specs.items()
        }
        largest = max(spec.page_size_bytes for spec in padded.values())
        if largest == page:
            return padded
        page = largest


def _shape(spec: KVCacheSpec) -> tuple[int, int, int]:
    return spec.block_size, spec.unpadded_page_size_bytes, spec.page_size_bytes


def _own_rules(specs: Iterable[KVCacheSpec], main: tuple[int, int, int], has_rules: bool) -> dict[str, BlockSizeRule]:
    """What a new main block must be a multiple of, backends aside: whole states, and blocks that keep their size, so
    that hashes of one granularity serve all groups."""
    growing = [spec for spec in specs if spec.tokens_per_state > 0]
    states = lcm(*(Fraction(spec.tokens_per_state).numerator for spec in growing if _shape(spec) == main))
    others = lcm(*(spec.block_size for spec in growing if _shape(spec) != main))
    if not has_rules:
        others = lcm(others, main[0])
    sizes = {STATES_RULE: states, BLOCKS_RULE: others}
    return {name: BlockSizeRule(multiple_of=size) for name, size in sizes.items() if size > 1}


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
