"""Managers of recurrent state: one state sums up all tokens before it, so few blocks serve any length.

The block at table position p holds the state after the last computed one of the tokens ``p * block_size .. (p + 1) *
block_size - 1``, and token n starts from the state at position ``(n - 1) // block_size``. Further positions, one per
speculative block, hold the states after drafts. They lie behind the running position and take its part one by one as
the sequence moves on, so that tables only grow (R3.14).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    KVBlockPool,
    KVCacheManager,
    KVSpecRegistration,
    MambaCacheMode,
    MambaSpec,
    NoOptions,
    PluginContext,
    plugin,
)
from hardpoint_scheduling.kv_cache.fixed import FixedTableManager
from hardpoint_scheduling.kv_cache.skipping import SkippingManager, Table


class StatePerBlockManager(SkippingManager):
    """Mode ``all``: a state at every block end, for whoever shares the tokens before it.

    A state is complete only after the step that computes it, so no other row of that step can start from it. Guesses
    have their own positions, so ``num_tokens`` leaves them out.
    """

    shares_within_step = False
    counts_guesses = False

    def __init__(self, pool: KVBlockPool, group_id: int, spec: MambaSpec) -> None:
        super().__init__(pool, group_id, spec)
        self._num_speculative = spec.num_speculative_blocks

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """All before the state that the next token starts from."""
        return max(num_computed_tokens - 1, 0) // self._block_size

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        """The last state alone: it stands for all before it."""
        whole = self._num_whole(block_hashes, max_tokens)
        for position, block in self._found_backwards(block_hashes, whole):
            if block is not None:
                return [*[NULL_BLOCK_ID] * position, block]
        return ()

    def _num_positions(self, num_tokens: int) -> int:
        return super()._num_positions(num_tokens) + (self._num_speculative if num_tokens > 0 else 0)


@dataclass(frozen=True, slots=True)
class _Growth:
    """``num_null`` null blocks, then ``num_new`` blocks go to the end of a table. Positions ``passed``, which were for
    drafts, end up before the running one and lend their blocks; those of the new ones that do as well are checkpoints.
    """

    num_null: int
    num_new: int
    running: int
    passed: range

    @property
    def num_needed(self) -> int:
        return max(self.num_new - len(self.passed), 0)


class AlignedStateManager(StatePerBlockManager):
    """Mode ``align``: the running state, the one it came from, and what prefixes are found by: states of steps that
    ended with a block.

    A long step leaves states at its end and in the ``num_checkpoint_blocks`` positions before, not at the other block
    ends it passes; those positions hold the null block. Such a step is planned only when no guesses are in flight.
    """

    def __init__(self, pool: KVBlockPool, group_id: int, spec: MambaSpec) -> None:
        """Raises ``ConfigError`` for blocks that the guesses of one step could pass."""
        super().__init__(pool, group_id, spec)
        if spec.num_speculative_blocks >= spec.block_size:
            raise ConfigError(
                f"{spec.num_speculative_blocks} drafts reach across whole state blocks of {spec.block_size} tokens; "
                f"set --block-size to more than {spec.num_speculative_blocks}, or propose fewer drafts"
            )
        # Where the state of the last settled token is, per request.
        self._settled: dict[str, int] = {}
        self._num_checkpoints = spec.num_checkpoint_blocks
        # Positions whose states a step computes on its way, until they are entered.
        self._checkpoints: dict[str, list[int]] = {}

    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        return self._growth(request_id, num_hit_blocks, num_tokens).num_needed

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        growth = self._growth(request_id, 0, num_tokens)
        if not growth.num_new:
            return ()
        blocks = list(self._pool.allocate(growth.num_needed))
        table = self._tables.setdefault(request_id, Table())
        for position in growth.passed:
            blocks.append(table.blocks[position])
            table.blocks[position] = NULL_BLOCK_ID
        first = len(table.blocks) + growth.num_null
        new = [*[NULL_BLOCK_ID] * growth.num_null, *blocks]
        table.blocks.extend(new)
        table.num_drafts = self._num_speculative
        if first < growth.running:
            self._checkpoints.setdefault(request_id, []).extend(range(first, growth.running))
        return new

    def allocate_many(self, request_ids: Sequence[str], ends: Sequence[int], num_free: int) -> list[Sequence[int]]:
        """Row by row: positions of one kind turn into another."""
        return KVCacheManager.allocate_many(self, request_ids, ends, num_free)

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """The state at ``num_tokens`` if a block ends there, and checkpoints before it. A block end that a step merely
        passed has no state of its own."""
        table = self._tables.get(request_id)
        if table is None:
            return
        full = min(num_tokens // self._block_size, len(table.blocks), len(block_hashes))
        ends = [position for position in self._checkpoints.get(request_id, ()) if position < full]
        if full * self._block_size == num_tokens:
            ends.append(full - 1)
        for position in ends:
            if position >= table.num_entered:
                self._enter(table.blocks[position], block_hashes[position])
        if request_id in self._checkpoints:
            self._checkpoints[request_id] = [p for p in self._checkpoints[request_id] if p >= full]
        table.num_entered = max(table.num_entered, full)

    def free(self, request_id: str) -> None:
        self._checkpoints.pop(request_id, None)
        self._settled.pop(request_id, None)
        super().free(request_id)

    def _drop(self, request_id: str, table: Table, num_processed_tokens: int, dropped: list[int]) -> None:
        self._settled[request_id] = self.num_skipped_blocks(num_processed_tokens)
        super()._drop(request_id, table, num_processed_tokens, dropped)

    def _growth(self, request_id: str, num_hit_blocks: int, num_tokens: int) -> _Growth:
        table = self._tables.get(request_id)
        held = num_hit_blocks if table is None else len(table.blocks)
        drafts = 0 if table is None else table.num_drafts
        length = self._num_positions(num_tokens)
        if length <= held:
            return _Growth(0, 0, 0, range(0))
        running = length - self._num_speculative - 1
        kept = max(running - self._num_checkpoints, 0)
        first = max(held, kept)
        # Accepted guesses take the state on into the positions that were theirs.
        lent = max(held - drafts, self._settled.get(request_id, -1) + 1)
        return _Growth(first - held, length - first, running, range(lent, max(min(held, kept), lent)))


class RunningStateManager(FixedTableManager):
    """Mode ``none``: the running state and those after drafts, in the same blocks from the first token to the last."""

    def __init__(self, pool: KVBlockPool, group_id: int, spec: MambaSpec) -> None:
        del group_id
        super().__init__(pool)
        self._num_blocks = 1 + spec.num_speculative_blocks

    def num_blocks(self, request_id: str, num_tokens: int) -> int:
        return self._num_blocks


_MANAGERS: Mapping[MambaCacheMode, Callable[[KVBlockPool, int, MambaSpec], KVCacheManager]] = {
    MambaCacheMode.NONE: RunningStateManager,
    MambaCacheMode.ALL: StatePerBlockManager,
    MambaCacheMode.ALIGN: AlignedStateManager,
}


def state_manager(pool: KVBlockPool, group_id: int, spec: MambaSpec) -> KVCacheManager:
    """The manager of the spec's mode."""
    return _MANAGERS[spec.mode](pool, group_id, spec)


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``mamba``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(MambaSpec, state_manager)
