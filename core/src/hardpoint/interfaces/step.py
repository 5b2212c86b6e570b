"""The records of one step: what the scheduler decided and what the workers produced.

Struct of arrays. A *row* is one scheduled request of the step; rows are keyed by ``(slot, generation)``: the slot is
the
request's place in the workers' persistent state (``0 <= slot < max_num_seqs``), the generation counts how often the
slot
was handed out, so that late results of an earlier owner are recognized. Legend: R rows, T scheduled tokens of the step,
G KV cache groups, S sampled positions.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hardpoint.interfaces.request import BoolArray, Float32Array, Int32Array, RequestWork


class NewRow(RequestWork, frozen=True, kw_only=True, omit_defaults=True):
    """Full state of a request that enters, or re-enters after preemption, the workers' persistent batch.

    Attributes:
        token_ids: int32, every known token (prompt, and outputs when resumed).
        num_prompt_tokens: length of the prompt part of ``token_ids``.
        block_ids: per group, int32 ids of all blocks the request holds; replaces whatever the slot held before.
        resumed: the request ran before; its generator state must continue where it was (the key is ``request_id``).
    """

    slot: int
    generation: int
    token_ids: Int32Array
    num_prompt_tokens: int
    block_ids: tuple[Int32Array, ...]
    resumed: bool = False


class BlockUpdate(msgspec.Struct, frozen=True):
    """Blocks appended in one KV cache group: ``counts`` int32 [R], ``ids`` int32 [sum(counts)], row after row.

    Rows listed in ``SchedulerOutput.new_rows`` count 0 here: their blocks come with the :class:`NewRow`.
    """

    counts: Int32Array
    ids: Int32Array


class TokenUpdate(msgspec.Struct, frozen=True):
    """Tokens per row: ``counts`` int32 [R], ``ids`` int32 [sum(counts)], row after row.

    An id of -1 stands for a token that is already on the worker.
    """

    counts: Int32Array
    ids: Int32Array


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One scheduling decision. Workers apply it in this order: finished, copying, zeroing, new rows, blocks,
    forward.

    Rows may share blocks, also one that an earlier row fills in this very step: in each layer a worker writes the KV of
    all rows before any row attends.

    Attributes:
        step_id: strictly increasing per engine.
        slots, generations: int32 [R]; rows in the order the scheduler chose.
        num_computed_tokens: int32 [R], tokens whose KV exists before this step. Drafts of steps whose output was not
            back yet count as if they were right; a worker that refused some since then starts earlier by as many.
        num_scheduled_tokens: int32 [R], all > 0; their sum is ``num_tokens``.
        samples: bool [R], True where the row's last scheduled token yields a sample (False: partial prefill, or a task
            that pools: its result comes with the prompt's last token).
        new_blocks: one :class:`BlockUpdate` per group.
        finished_slots, preempted_slots: int32, slots whose worker state is to be dropped before anything else. A slot
        may
            be finished and handed to a new row in the same step.
        blocks_to_zero: int32 block ids to clear before use (only for specs that need it).
        block_copies: int32 [C, 2], pairs of blocks of which the first is copied to the second in every layer, one pair
            after another: a row goes on inside a block that somebody else filled up to there. None: nothing to copy.
        num_common_prefix_blocks: per group, leading blocks shared by all rows that hold KV.
        known_tokens: tokens that rows already running learned elsewhere (another pipeline stage sampled them); appended
            to the slot's tokens before the forward.
        drafts: the last ``counts[r]`` scheduled tokens of row r are guesses to verify; such a row yields 1 to
            ``counts[r] + 1`` tokens. Of guesses with the id -1 the worker takes those it made itself in its last step;
            missing ones count as wrong.
        defers_sampling: the worker answers ``Deferred`` exactly when this is set.
        extensions: per feature, an opaque msgpack-able struct (connector, drafts, adapters, encoder inputs).
    """

    step_id: int
    slots: Int32Array
    generations: Int32Array
    num_computed_tokens: Int32Array
    num_scheduled_tokens: Int32Array
    samples: BoolArray
    new_rows: tuple[NewRow, ...]
    new_blocks: tuple[BlockUpdate, ...]
    finished_slots: Int32Array
    preempted_slots: Int32Array
    blocks_to_zero: Int32Array
    num_common_prefix_blocks: tuple[int, ...]
    num_tokens: int
    block_copies: Int32Array | None = None
    known_tokens: TokenUpdate | None = None
    drafts: TokenUpdate | None = None
    defers_sampling: bool = False
    extensions: dict[str, Any] = {}

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to compute; finished slots may still have to be delivered."""
        return self.num_tokens == 0

    @property
    def must_execute(self) -> bool:
        """Whether workers have to see this step, be it only for freed slots or a feature's payload."""
        return bool(
            self.num_tokens
            or len(self.finished_slots)
            or len(self.preempted_slots)
            or len(self.blocks_to_zero)
            or self.extensions
        )


class LogprobArrays(msgspec.Struct, frozen=True):
    """Log-probabilities for some rows. ``rows`` int32 [N] indexes the step's rows (several entries per row possible).

    ``token_ids`` int32 [N, K + 1] with the sampled token first and -1 as padding; ``logprobs`` float32 of that shape;
    ``ranks`` int32 [N], 1-based.
    """

    rows: Int32Array
    token_ids: Int32Array
    logprobs: Float32Array
    ranks: Int32Array


class RowFailure(msgspec.Struct, frozen=True):
    """One row could not be computed (NaN logits and the like); only that request ends, with a client-safe
    ``reason``."""

    slot: int
    generation: int
    reason: str


class RunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Result of one step, rows in the order of the step's ``slots``.

    Attributes:
        num_sampled: int32 [R], tokens sampled per row (0 for partial prefills; with drafts 1 more than were right).
        token_ids: int32 [sum(num_sampled)], row after row.
        logprobs: sampled positions, for rows that asked.
        prompt_logprobs: prompt positions computed in this step, for rows that asked: entry i of a row's entries is the
            log-probability of the token *after* computed position i.
        pooled: step row to its result, float32 [D] (``token_embed``: [prompt, D]), for rows whose task pools and whose
            last prompt token was computed in this step.
        drafts: guesses at the tokens after those sampled here, to be verified by the row's next step.
    """

    step_id: int
    slots: Int32Array
    generations: Int32Array
    num_sampled: Int32Array
    token_ids: Int32Array
    logprobs: LogprobArrays | None = None
    prompt_logprobs: LogprobArrays | None = None
    failures: tuple[RowFailure, ...] = ()
    pooled: dict[int, np.ndarray] = {}
    drafts: TokenUpdate | None = None
    extensions: dict[str, Any] = {}


class Deferred(msgspec.Struct, frozen=True, tag=True):
    """The forward of ``step_id`` is submitted, sampling waits for ``Executor.sample`` (grammar masks and the like)."""

    step_id: int


class GrammarMask(msgspec.Struct, frozen=True):
    """Bitmask rows for sampling. ``rows`` int32 [N] indexes the step's rows; ``bits`` int32 [N, ceil(vocab / 32)].

    A row with drafts has consecutive entries: one per draft position, the bonus position last.
    """

    rows: Int32Array
    bits: Int32Array
