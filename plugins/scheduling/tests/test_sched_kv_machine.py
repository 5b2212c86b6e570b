"""The coordinator as a state machine over groups of every kind, with a worker that checks what each token reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hardpoint.interfaces import NULL_BLOCK_ID, FullAttentionSpec, KVCacheSpec, MambaCacheMode
from hardpoint_scheduling.kv_cache.coordinator import Gates, Segments
from kv_support import Row, Worker, chunked, coordinator, cross, encoder_only, full, hashes_of, latent, state, window

LONGEST = 48
IN_FLIGHT = 24

SIZES = st.sampled_from([2, 4, 8])
CACHING_KINDS = st.one_of(
    st.builds(full, SIZES),
    st.builds(latent, SIZES),
    st.builds(window, st.integers(1, 20), SIZES),
    st.builds(lambda chunk, size: chunked(chunk * size, size), st.integers(1, 4), SIZES),
    st.builds(
        lambda mode, size, checkpoints: (mode, size, checkpoints),
        st.sampled_from([MambaCacheMode.ALL, MambaCacheMode.ALIGN]),
        st.sampled_from([4, 8]),
        st.integers(0, 1),
    ),
)
OTHER_KINDS = st.one_of(
    st.builds(cross, st.just(8), SIZES),
    st.builds(encoder_only, SIZES),
    st.builds(lambda size: (MambaCacheMode.NONE, size, 0), SIZES),
)
GROUPS = st.one_of(
    st.lists(CACHING_KINDS, min_size=1, max_size=3),
    st.lists(st.one_of(CACHING_KINDS, OTHER_KINDS), min_size=1, max_size=3),
)
STEP = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2)), max_size=4)


@dataclass
class Sequence:
    """A request: its whole text is known; ``computed`` tokens of it were computed, ``processed`` are settled."""

    name: str
    tokens: tuple[int, ...]
    encoder: int
    computed: int = 0
    processed: int = 0
    entered: int = 0
    capacity: int = 0
    guessed: bool = False


class CoordinatorMachine(RuleBasedStateMachine):
    """I3.1, I3.2, I3.3, I1.6: random arrivals, chunks, guesses, loads, preemptions, ends and resets."""

    @initialize(
        groups=GROUPS,
        drafts=st.integers(0, 2),
        lookahead=st.integers(0, 2),
        extra=st.integers(0, 30),
        whole=st.booleans(),
        inside=st.booleans(),
    )
    def start(self, groups: list[Any], drafts: int, lookahead: int, extra: int, whole: bool, inside: bool) -> None:
        specs: list[KVCacheSpec] = [
            state(one[0], one[1], drafts, one[2]) if isinstance(one, tuple) else one for one in groups
        ]
        least = 1 + sum(spec.max_blocks(16, 16) for spec in specs)
        inside = inside and len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)
        self.kv = coordinator(
            least + extra,
            *specs,
            max_model_len=LONGEST,
            max_in_flight_tokens=IN_FLIGHT,
            tail_unit=2 if inside else None,
        )
        self.worker = Worker(self.kv)
        self.drafts, self.lookahead = drafts, lookahead
        self.gates = Gates(full_sequence_must_fit=whole)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.number = 0

    @rule(
        family=st.integers(0, 1), branch=st.integers(0, 40), length=st.integers(2, LONGEST), encoder=st.integers(1, 8)
    )
    def add(self, family: int, branch: int, length: int, encoder: int) -> None:
        self.number += 1
        length = min(length, self.kv.largest_sequence)
        tokens = tuple((7 * i + family) % 120 if i < branch else 120 + self.number % 100 for i in range(length))
        one = Sequence(f"r{self.number}", tokens, encoder)
        self.worker.tokens[one.name] = tokens
        self.waiting.append(one)

    @precondition(lambda self: self.waiting or self.running)
    @rule(
        chunks=STEP, admitted=st.lists(st.integers(1, 12), max_size=2), external=st.integers(0, 12), lag=st.booleans()
    )
    def step(self, chunks: list[tuple[int, int]], admitted: list[int], external: int, lag: bool) -> None:
        self.kv.begin_step()
        rows = self.grow(chunks)
        for count in admitted:
            row = self.admit(count, external) if self.waiting else None
            if row is None:
                break
            rows.append(row)
        self.worker.execute(rows)
        by_name = {one.name: one for one in self.running}
        for row in rows:
            one = by_name[row.name]
            settled = one.computed
            one.computed = self.worker.accept(row, (row.end + row.start) % (row.num_drafts + 1))
            one.processed, one.guessed = settled if lag else one.computed, row.num_drafts > 0

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 5), again=st.booleans())
    def end(self, place: int, again: bool) -> None:
        one = self.running.pop(place % len(self.running))
        self.kv.free(one.name)
        if again:
            self.waiting.insert(0, Sequence(one.name, one.tokens, one.encoder))

    @rule()
    def reset(self) -> None:
        """R3.22."""
        assert self.kv.reset() is not any(any(map(any, self.kv.block_ids(one.name))) for one in self.running)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 5))
    def forget(self, place: int) -> None:
        self.kv.forget(self.running[place % len(self.running)].name)

    def grow(self, chunks: list[tuple[int, int]]) -> list[Row]:
        rows: list[Row] = []
        for one, (count, drafts) in zip(list(self.running), chunks, strict=False):
            left = len(one.tokens) - one.computed
            if left <= 0:
                continue
            drafts = min(drafts, self.drafts, left - 1)
            if one.guessed and one.processed < one.computed:
                # Behind guesses whose fate is open there is nothing but the next token to compute.
                count = 1
            # Guesses go with a single token, otherwise it is a chunk of a prompt.
            end = one.computed + 1 + drafts if drafts else one.computed + min(count, left)
            rows.append(Row(one.name, one.computed, end, drafts))
        by_name = {one.name: one for one in self.running}
        ends = [self.kv.end_with_lookahead(row.end, self.lookahead) for row in rows]
        outgrown = [i for i, row in enumerate(rows) if ends[i] > by_name[row.name].capacity]
        growth = self.kv.grow_many(
            [rows[i].name for i in outgrown],
            [ends[i] for i in outgrown],
            [by_name[rows[i].name].processed for i in outgrown],
            [rows[i].end - rows[i].num_drafts for i in outgrown],
        )
        for i in outgrown[: growth.num_rows]:
            by_name[rows[i].name].capacity = self.kv.covered(ends[i], rows[i].end - rows[i].num_drafts)
        if growth.num_rows < len(outgrown):
            rows = rows[: outgrown[growth.num_rows]]
            self.preempt_last({row.name for row in rows})
        for row in rows:
            self.enter(by_name[row.name], row.end - row.num_drafts)
        return rows

    def admit(self, count: int, external: int) -> Row | None:
        one = self.waiting[0]
        known = len(one.tokens)
        hit = self.kv.find_prefix(hashes_of(one.tokens, self.kv.hash_block_size), known)
        assert hit.num_tokens < known
        # R3.64: nothing is loaded behind a tail.
        external = 0 if hit.num_tail_tokens else min(external, known - 1 - hit.num_tokens)
        start = hit.num_tokens + external
        new = min(count, known - start)
        segments = Segments(hit.num_tokens, external, new, self.lookahead, known, one.encoder)
        free = self.kv.pool.free_order()
        if self.kv.allocate_slots(one.name, segments, hit, self.gates) is None:
            assert self.kv.pool.free_order() == free, "a refusal changed something (R3.71)"
            assert self.running, "a sequence that fits alone is refused by an empty pool (R1.35)"
            return None
        self.running.append(self.waiting.pop(0))
        one.computed = one.processed = start
        one.capacity = self.kv.covered(self.kv.end_with_lookahead(start + new, self.lookahead), start + new)
        self.enter(one, start + new)
        return Row(one.name, start, start + new, 0, hit.num_tokens if external else None)

    def enter(self, one: Sequence, end: int) -> None:
        size = self.kv.hash_block_size
        if self.kv.prefix_caching and end >= one.entered + size:
            self.kv.enter_full_blocks_many([one.name], [hashes_of(one.tokens[:end], size)], [end])
            one.entered = end // size * size

    def preempt_last(self, busy: set[str]) -> None:
        victim = self.running[-1]
        if victim.name not in busy:
            self.running.pop()
            self.kv.free(victim.name)
            self.waiting.insert(0, Sequence(victim.name, victim.tokens, victim.encoder))

    @invariant()
    def everything_adds_up(self) -> None:
        self.kv.pool.check_integrity(self.kv.tables())
        assert set(self.kv.tables()) == {one.name for one in self.running}

    @invariant()
    def blocks_have_one_group_and_one_prefix(self) -> None:
        """I1.6, I3.2."""
        owners: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for one in self.running:
            for index, (group, table) in enumerate(zip(self.kv._groups, self.kv.block_ids(one.name), strict=True)):
                for position, block in enumerate(table):
                    if block == NULL_BLOCK_ID:
                        continue
                    place = (index, position, one.tokens[: (position + 1) * group.block_size])
                    assert owners.setdefault(block, place) == place

    @invariant()
    def room_is_what_tables_have(self) -> None:
        for one in self.running:
            assert self.kv.covers_exactly(one.name, one.capacity)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for one in self.running:
                self.kv.free(one.name)
            assert self.kv.pool.num_free == self.kv.pool.num_usable, "blocks leaked"


class LongCoordinatorMachine(CoordinatorMachine):
    """The same at length."""


LIMITS: dict[str, Any] = {"stateful_step_count": 20, "deadline": None, "suppress_health_check": list(HealthCheck)}
CoordinatorMachine.TestCase.settings = settings(max_examples=25, **LIMITS)
LongCoordinatorMachine.TestCase.settings = settings(max_examples=10_000, **LIMITS)
TestCoordinatorMachine = CoordinatorMachine.TestCase
TestLongCoordinatorMachine = pytest.mark.slow(pytest.mark.timeout(900)(LongCoordinatorMachine.TestCase))
