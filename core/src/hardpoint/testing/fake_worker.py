"""A worker without a model: its next token is a pure function of the tokens before it, read *through the block table*.

So a scheduler that hands out wrong blocks, slots or counts produces wrong tokens, as on a real device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID, FullAttentionSpec, KVCacheConfig, LayerSpec, spec_to_wire
from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.step import Deferred, GrammarMask, NewRow, RunnerOutput, SchedulerOutput, TokenUpdate
from hardpoint.interfaces.worker import Worker


def next_token(token_ids: Sequence[int], vocab_size: int, first: int = 0) -> int:
    """The fake model: a checksum of all tokens so far, in ``[first, vocab_size)``."""
    data = np.asarray(token_ids, dtype=np.int32).tobytes()
    return first + zlib.crc32(data) % (vocab_size - first)


class ScriptedDrafter:
    """Guesses ``num_drafts`` tokens after a sequence, of which as many are right as ``pattern`` says for its length.

    The pattern repeats; more than ``num_drafts`` means all.
    """

    def __init__(self, num_drafts: int, pattern: Sequence[int], *, vocab_size: int = 97, first_token: int = 3) -> None:
        self.num_drafts = num_drafts
        self.pattern = tuple(pattern)
        self.vocab_size = vocab_size
        self.first_token = first_token

    def __call__(self, token_ids: Sequence[int]) -> list[int]:
        right = self.pattern[len(token_ids) % len(self.pattern)]
        tokens = list(token_ids)
        for place in range(self.num_drafts):
            token = next_token(tokens, self.vocab_size, self.first_token)
            tokens.append(token if place < right else self.first_token + (token == self.first_token))
        return tokens[len(token_ids) :]


def fake_pooled(token_ids: Sequence[int], vocab_size: int = 97, first: int = 0) -> np.ndarray:
    """What the fake model makes of a prompt for a task that pools: float32 ``[2]``, its checksum and its length."""
    return np.asarray([next_token(token_ids, vocab_size, first), len(token_ids)], dtype=np.float32)


class SlotState(msgspec.Struct):
    """What the fake keeps per slot. ``num_refused``: drafts that turned out wrong so far."""

    request_id: str
    generation: int
    tokens: list[int]
    blocks: list[int]
    sampling: SamplingParams
    guesses: list[int] = []
    num_refused: int = 0
    pools: bool = False


class FakeWorker(Worker):
    """Stores token ids as its "KV" and checks every rule of the step records; a broken rule raises ``AssertionError``.

    ``first_token`` keeps sampled ids out of a reserved low range; ``deferred`` makes every step two-phased,
    whatever the step says. ``drafter`` guesses what follows a sequence after each sample; with ``keeps_drafts`` the
    guesses stay here and are reported as -1.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        vocab_size: int = 97,
        first_token: int = 3,
        num_layers: int = 2,
        deferred: bool = False,
        drafter: Callable[[Sequence[int]], list[int]] | None = None,
        keeps_drafts: bool = False,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.first_token = first_token
        self.num_layers = num_layers
        self.deferred = deferred
        self.drafter = drafter
        self.keeps_drafts = keeps_drafts
        self.slots: dict[int, SlotState] = {}
        self.kv = np.zeros((0, block_size), dtype=np.int32)
        self.last_step_id = -1
        self.steps: list[SchedulerOutput] = []
        self._pending: RunnerOutput | None = None

    def init_device(self) -> None:
        """Nothing to bind."""

    def load_model(self) -> None:
        """Nothing to load."""

    def warm_up(self) -> None:
        """Nothing to warm."""

    def kv_cache_specs(self) -> list[LayerSpec]:
        spec = FullAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=1, dtype="int8")
        return [LayerSpec(f"layers.{i}", spec_to_wire(spec)) for i in range(self.num_layers)]

    def kv_cache_budget(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.kv = np.full((config.num_blocks, self.block_size), -7, dtype=np.int32)

    def supported_tasks(self) -> list[str]:
        return ["generate", "embed"]

    def check_health(self) -> None:
        """Always healthy."""

    def shutdown(self) -> None:
        self.slots.clear()

    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step_id} still waits for sampling")
        output = self._run(step)
        if self.deferred or step.defers_sampling:
            self._pending = output
            return Deferred(step.step_id)
        return output

    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput:
        if self._pending is None or self._pending.step_id != step_id:
            raise RuntimeError(f"no deferred step {step_id} is pending")
        output, self._pending = self._pending, None
        return output

    def _run(self, step: SchedulerOutput) -> RunnerOutput:
        self._check(step)
        self.steps.append(step)
        for slot in [*step.finished_slots.tolist(), *step.preempted_slots.tolist()]:
            self.slots.pop(slot, None)
        for source, destination in [] if step.block_copies is None else step.block_copies.tolist():
            self.kv[destination] = self.kv[source]
        for row in step.new_rows:
            self._enter(row)
        self._append_blocks(step)
        sampled = [self._compute(step, i, guesses) for i, guesses in enumerate(self._guesses(step))]
        return RunnerOutput(
            step_id=step.step_id,
            slots=step.slots,
            generations=step.generations,
            num_sampled=np.asarray([len(tokens) for tokens in sampled], dtype=np.int32),
            token_ids=np.asarray([token for tokens in sampled for token in tokens], dtype=np.int32),
            drafts=self._draft(step),
            pooled=self._pooled(step),
        )

    def _pooled(self, step: SchedulerOutput) -> dict[int, np.ndarray]:
        """By row, for tasks that pool, once their last token is computed."""
        pooled = {}
        for i, slot in enumerate(step.slots.tolist()):
            state = self.slots[slot]
            end = int(step.num_computed_tokens[i]) + int(step.num_scheduled_tokens[i])
            if state.pools and end == len(state.tokens):
                pooled[i] = fake_pooled(self._gather(state), self.vocab_size, self.first_token)
        return pooled

    def _guesses(self, step: SchedulerOutput) -> list[list[int]]:
        """Per row the drafts to verify; those that only this worker knows are filled in, or left out if it has none."""
        if step.drafts is None:
            return [[] for _ in range(step.num_rows)]
        found, start = [], 0
        for slot, count in zip(step.slots.tolist(), step.drafts.counts.tolist(), strict=True):
            ids = step.drafts.ids[start : start + count].tolist()
            own = self.slots[slot].guesses[:count]
            assert ids in ([-1] * count, own), f"drafts {ids} are scheduled, but {own} were guessed"
            found.append(own)
            start += count
        assert start == len(step.drafts.ids), "draft ids and counts disagree"
        return found

    def _draft(self, step: SchedulerOutput) -> TokenUpdate | None:
        """Guesses at what follows the tokens just sampled."""
        if self.drafter is None:
            return None
        guesses: list[list[int]] = []
        for slot, samples in zip(step.slots.tolist(), step.samples.tolist(), strict=True):
            state = self.slots[slot]
            state.guesses = self.drafter(state.tokens) if samples else []
            guesses.append(state.guesses)
        ids = [-1 if self.keeps_drafts else guess for row in guesses for guess in row]
        counts = np.asarray([len(row) for row in guesses], dtype=np.int32)
        return TokenUpdate(counts, np.asarray(ids, dtype=np.int32))

    def _check(self, step: SchedulerOutput) -> None:
        assert step.step_id > self.last_step_id, "step ids must increase"
        self.last_step_id = step.step_id
        assert int(step.num_scheduled_tokens.sum()) == step.num_tokens, "scheduled tokens must add up"
        assert len(set(step.slots.tolist())) == step.num_rows, "a slot is scheduled twice"
        assert bool((step.num_scheduled_tokens > 0).all()), "every row must advance"

    def _enter(self, row: NewRow) -> None:
        assert row.slot not in self.slots, f"slot {row.slot} is handed out while it is held"
        blocks = row.block_ids[0].tolist()
        state = SlotState(row.request_id, row.generation, row.token_ids.tolist(), blocks, row.sampling)
        state.pools = row.task != "generate"
        assert not state.pools or len(state.tokens) == row.num_prompt_tokens, "a request that pools has no outputs"
        self.slots[row.slot] = state

    def _append_blocks(self, step: SchedulerOutput) -> None:
        update = step.new_blocks[0]
        start = 0
        for slot, count in zip(step.slots.tolist(), update.counts.tolist(), strict=True):
            self.slots[slot].blocks.extend(update.ids[start : start + count].tolist())
            start += count
        assert start == len(update.ids), "block ids and counts disagree"

    def _compute(self, step: SchedulerOutput, i: int, guesses: list[int]) -> list[int]:
        """Write the row's KV; the tokens it samples, which are one more than its guesses that were right."""
        state = self.slots[int(step.slots[i])]
        assert state.generation == int(step.generations[i]), "stale generation"
        start = int(step.num_computed_tokens[i])
        end = start + int(step.num_scheduled_tokens[i])
        num_drafts = int(step.drafts.counts[i]) if step.drafts is not None else 0
        assert not (state.pools and bool(step.samples[i])), "a row whose task pools does not sample"
        if not bool(step.samples[i]):
            assert num_drafts == 0, "drafts in a row that does not sample"
            assert end <= len(state.tokens), "scheduled past the known tokens"
            self._write(state, start, state.tokens[start:end])
            return []
        surplus = max(start - (len(state.tokens) - 1), 0)
        assert surplus <= state.num_refused, "a row starts behind its last token"
        start, end = start - surplus, end - surplus
        assert end - num_drafts == len(state.tokens), "a row samples before or behind its last known token"
        self._write(state, start, [*state.tokens[start:], *guesses])
        sampled = []
        for guess in [*guesses, None]:
            token = self._next(state)
            state.tokens.append(token)
            sampled.append(token)
            if guess != token:
                break
        state.num_refused += num_drafts + 1 - len(sampled)
        return sampled

    def _write(self, state: SlotState, start: int, tokens: Sequence[int]) -> None:
        assert start + len(tokens) <= len(state.blocks) * self.block_size, "scheduled past the allocated blocks"
        for position, token in enumerate(tokens, start):
            block = state.blocks[position // self.block_size]
            assert block != NULL_BLOCK_ID, "a real token may not be written to the null block"
            self.kv[block, position % self.block_size] = token

    def _next(self, state: SlotState) -> int:
        """The token after all known ones."""
        return next_token(self._gather(state), self.vocab_size, self.first_token)

    def _gather(self, state: SlotState) -> list[int]:
        """All known tokens, read from the KV."""
        end = len(state.tokens)
        needed = -(-end // self.block_size)
        gathered: list[int] = self.kv[np.asarray(state.blocks[:needed])].reshape(-1)[:end].tolist()
        return gathered
