"""KV groups of any kind for tests, and a worker that remembers what each block holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    spec_to_wire,
)
from hardpoint_scheduling.kv_cache.coordinator import Gates, KVCoordinator, PrefixHit, Segments
from hardpoint_scheduling.kv_cache.registry import SpecRegistry
from sched_support import spec as full

__all__ = [
    "Row",
    "Worker",
    "admit",
    "chunked",
    "coordinator",
    "cross",
    "encoder_only",
    "full",
    "hashes_of",
    "latent",
    "state",
    "window",
]

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "int8"}


def latent(block_size: int = 4) -> MLASpec:
    return MLASpec(block_size=block_size, **HEADS)


def window(tokens: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **HEADS)


def chunked(tokens: int, block_size: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block_size, chunk_size=tokens, **HEADS)


def cross(max_tokens: int = 20, block_size: int = 4) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size=block_size, max_encoder_tokens=max_tokens, **HEADS)


def encoder_only(block_size: int = 4) -> EncoderOnlyAttentionSpec:
    return EncoderOnlyAttentionSpec(block_size=block_size, **HEADS)


def state(mode: MambaCacheMode, block_size: int = 4, drafts: int = 0, checkpoints: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((2,),),
        dtypes=("float32",),
        mode=mode,
        num_speculative_blocks=drafts,
        num_checkpoint_blocks=checkpoints,
    )


def coordinator(num_blocks: int, *specs: KVCacheSpec, max_model_len: int = 1000, **fields: Any) -> KVCoordinator:
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=())
    return KVCoordinator(config, SpecRegistry(), max_model_len=max_model_len, **fields)


Prefix = tuple[int, ...]


@dataclass
class Row:
    """A request's part of one step: tokens ``start .. end - 1``, of which the last ``num_drafts`` are guesses.

    ``loaded`` tokens before ``start`` come from elsewhere, those before ``loaded_from`` are a hit.
    """

    name: str
    start: int
    end: int
    num_drafts: int = 0
    loaded_from: int | None = None


class Worker:
    """Holds, for each block, what a device would: per token slot the prefix that its KV was computed from, or the
    prefix that a state sums up. Raises ``AssertionError`` for a read that would see anything else.
    """

    def __init__(self, kv: KVCoordinator) -> None:
        self.kv = kv
        self.tokens: dict[str, Prefix] = {}
        self.kept: dict[int, dict[int, Prefix]] = {}
        self.states: dict[int, Prefix] = {}

    def execute(self, rows: Sequence[Row]) -> None:
        """In a step's order: copies, clearing, loads, states read, keys and values written, read, states written."""
        for source, destination in self.kv.take_block_copies():
            self.kept[destination] = dict(self.kept[source])
        for block in self.kv.take_blocks_to_zero():
            self.kept.pop(block, None)
            self.states.pop(block, None)
        for row in rows:
            if row.loaded_from is not None:
                self._write_tokens(row.name, row.loaded_from, row.start)
                self._write_loaded_state(row.name, row.start)
        for row in rows:
            self._read_state(row)
        for row in rows:
            self._write_tokens(row.name, row.start, row.end)
        for row in rows:
            self._read_tokens(row)
        for row in rows:
            self._write_states(row)

    def accept(self, row: Row, num_accepted: int) -> int:
        """The row keeps so many of its guesses; returns its length. States move to where the sequence now ends."""
        end = row.end - row.num_drafts + num_accepted
        for group, table in self._tables(row.name):
            if group.is_state and group.manager.grows:
                size, running = group.block_size, (row.end - row.num_drafts - 1) // group.block_size
                after = [self.states[table[running + i]] for i in range(num_accepted + 1)]
                for position in range(running, (end - 1) // size + 1):
                    last = min((position + 1) * size, end)
                    self.states[table[position]] = after[last - (row.end - row.num_drafts)]
            elif group.is_state:
                self.states[table[0]] = self.states[table[num_accepted]]
        return end

    def check_hit(self, name: str, hit: PrefixHit) -> None:
        """I3.3: a hit's blocks hold what a request with these tokens would have computed."""
        for group, blocks in zip(self.kv._groups, hit.blocks, strict=True):
            assert len(blocks) * group.block_size == hit.num_tokens
            for position, block in enumerate(blocks):
                if block == NULL_BLOCK_ID:
                    continue
                ends = range(position * group.block_size + 1, (position + 1) * group.block_size + 1)
                if group.is_state:
                    assert self.states[block] == self.tokens[name][: ends[-1]]
                else:
                    assert [self.kept[block][i] for i in range(group.block_size)] == [
                        self.tokens[name][:end] for end in ends
                    ]

    def _tables(self, name: str) -> Any:
        return zip(self.kv._groups, self.kv.block_ids(name), strict=True)

    def _write_tokens(self, name: str, start: int, end: int) -> None:
        for group, table in self._tables(name):
            if group.is_state or not group.manager.grows:
                continue
            for position in range(start, end):
                block = table[position // group.block_size]
                if block != NULL_BLOCK_ID:
                    slots = self.kept.setdefault(block, {})
                    slots[position % group.block_size] = self.tokens[name][: position + 1]

    def _read_tokens(self, row: Row) -> None:
        for group, table in self._tables(row.name):
            if group.is_state or not group.manager.grows:
                continue
            for token in (row.start, row.end - 1):
                for position in range(_first_read(group.spec, token), token + 1):
                    found = self.kept.get(table[position // group.block_size], {}).get(position % group.block_size)
                    assert found == self.tokens[row.name][: position + 1], f"token {token} of {row} reads {position}"

    def _read_state(self, row: Row) -> None:
        for group, table in self._tables(row.name):
            if group.is_state and row.start > 0:
                place = (row.start - 1) // group.block_size if group.manager.grows else 0
                assert table[place] != NULL_BLOCK_ID, f"{row} starts from a state that is gone"
                assert self.states.get(table[place]) == self.tokens[row.name][: row.start], f"{row} starts wrong"

    def _write_states(self, row: Row) -> None:
        sure = row.end - row.num_drafts
        for group, table in self._tables(row.name):
            if not group.is_state:
                continue
            running = (sure - 1) // group.block_size if group.manager.grows else 0
            assert table[running] != NULL_BLOCK_ID, f"{row} has no place for its state"
            if group.manager.grows:
                self._write_passed(row, group, table, running)
            self.states[table[running]] = self.tokens[row.name][:sure]
            for draft in range(1, row.num_drafts + 1):
                assert table[running + draft] != NULL_BLOCK_ID, f"{row} has no place for the state after draft {draft}"
                self.states[table[running + draft]] = self.tokens[row.name][: sure + draft]

    def _write_passed(self, row: Row, group: Any, table: Sequence[int], running: int) -> None:
        """Block ends before the running position: all of them, or those with a block that this step brought."""
        first = row.start // group.block_size
        if group.spec.mode is not MambaCacheMode.ALL:
            first = max(first, (row.start - 1) // group.block_size + 1) if row.start else first
        for position in range(first, running):
            if table[position] != NULL_BLOCK_ID:
                self.states[table[position]] = self.tokens[row.name][: (position + 1) * group.block_size]

    def _write_loaded_state(self, name: str, end: int) -> None:
        for group, table in self._tables(name):
            if group.is_state:
                place = (end - 1) // group.block_size if group.manager.grows else 0
                assert table[place] != NULL_BLOCK_ID, f"{name} has no place for the state it loads"
                self.states[table[place]] = self.tokens[name][:end]


def _first_read(spec: KVCacheSpec, token: int) -> int:
    if isinstance(spec, SlidingWindowSpec):
        return max(token - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return token // spec.chunk_size * spec.chunk_size
    return 0


def hashes_of(tokens: Sequence[int], size: int) -> list[BlockHash]:
    """One per complete hash block, chained by containing all tokens before."""
    return [BlockHash(bytes(tokens[: (i + 1) * size])) for i in range(len(tokens) // size)]


def admit(
    kv: KVCoordinator,
    name: str,
    num_tokens: int,
    hit: PrefixHit | None = None,
    gates: Gates | None = None,
    **segments: int,
) -> Any:
    """Tables of a request that computes ``num_tokens`` behind its hit; None without room."""
    fields = {"hit": hit.num_tokens if hit else 0, "external": 0, "new": num_tokens, "lookahead": 0}
    whole = fields["hit"] + segments.get("external", 0) + num_tokens
    parts = Segments(**{**fields, "whole": whole, **segments})
    return kv.allocate_slots(name, parts, hit or kv.no_hit(), gates or Gates())
