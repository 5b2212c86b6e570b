"""Random lives of requests on one worker: joining, chunking, pausing, preemption with other blocks, leaving early.

Whatever happens around it, a request's tokens are those of its solo run (class 43, I4.1, I4.2, I4.4, R6.18).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 4


@dataclass
class Life:
    """One request. ``slot`` is None while it waits (new or preempted)."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    slot: int | None = None
    generation: int = 0
    blocks: list[int] = field(default_factory=list)
    sent_blocks: int = 0
    computed: int = 0
    was_on_worker: bool = False

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.wanted


class Chaos:
    """A scheduler that takes every liberty the step records allow."""

    def __init__(self, world: Any, worker: Any, builders: Any, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.make_step, self.make_row = builders
        self.world, self.worker = world, worker
        self.free_slots = list(range(world.max_seqs))
        self.free_blocks = list(range(1, world.num_blocks))
        self.generation = 0
        self.step_id = 0
        self.finished: list[int] = []
        self.preempted: list[int] = []

    def run(self, lives: list[Life]) -> None:
        """Until every life is done; at most a bounded number of steps."""
        waiting: list[Life] = list(lives)
        running: list[Life] = []
        for _ in range(400):
            if not waiting and not running:
                return
            for life in list(running):
                if life.is_done or self.random.random() < 0.08:
                    self._take_off(life)
                    running.remove(life)
                    if not life.is_done:
                        waiting.append(life)
            while waiting and self.free_slots and self.random.random() < 0.7:
                life = waiting.pop(int(self.random.integers(len(waiting))))
                if not life.is_done:
                    self._put_on(life)
                    running.append(life)
            self._step(running)
        raise AssertionError("the random scheduler made no progress")

    def _take_off(self, life: Life) -> None:
        assert life.slot is not None
        if life.was_on_worker:
            (self.finished if life.is_done else self.preempted).append(life.slot)
        self.free_slots.append(life.slot)
        self.free_blocks += life.blocks
        life.slot, life.blocks, life.computed, life.was_on_worker = None, [], 0, False

    def _put_on(self, life: Life) -> None:
        self.generation += 1
        life.slot = self.free_slots.pop(int(self.random.integers(len(self.free_slots))))
        life.generation = self.generation

    def _step(self, running: list[Life]) -> None:
        rows: list[tuple[Life, int]] = []
        budget = self.world.max_tokens
        for index in self.random.permutation(len(running)).tolist():
            life = running[index]
            missing = len(life.known) - life.computed
            if budget == 0 or self.random.random() < 0.15:
                continue
            count = min(int(self.random.integers(1, missing + 1)), budget)
            needed = -(-(life.computed + count) // BLOCK) - len(life.blocks)
            if needed > len(self.free_blocks):
                continue
            budget -= count
            for _ in range(needed):
                life.blocks.append(self.free_blocks.pop(int(self.random.integers(len(self.free_blocks)))))
            rows.append((life, count))
        output = self.worker.execute(self._record(rows))
        cursor = 0
        for (life, count), sampled in zip(rows, output.num_sampled.tolist(), strict=True):
            life.computed += count
            life.tokens += output.token_ids[cursor : cursor + sampled].tolist()
            cursor += sampled

    def _record(self, rows: list[tuple[Life, int]]) -> Any:
        new_rows, appended = [], []
        for life, _ in rows:
            appended.append(life.blocks[life.sent_blocks :] if life.was_on_worker else [])
            if not life.was_on_worker:
                new_rows.append(
                    self.make_row(
                        life.slot,
                        life.known,
                        life.blocks,
                        generation=life.generation,
                        num_prompt_tokens=len(life.prompt),
                        resumed=bool(life.tokens),
                        request_id=life.name,
                        **life.sampling,
                    )
                )
            life.was_on_worker, life.sent_blocks = True, len(life.blocks)
        step = self.make_step(
            self.step_id,
            [
                (life.slot, life.generation, life.computed, count, life.computed + count == len(life.known))
                for life, count in rows
            ],
            new_rows=new_rows,
            new_blocks=appended,
            finished=self.finished,
            preempted=self.preempted,
        )
        self.step_id += 1
        self.finished, self.preempted = [], []
        return step


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 4},
    {"temperature": 0.9, "seed": 5, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {3: 4.0}},
    {"min_tokens": 4, "bad_words_token_ids": ((1,), (30, 30)), "temperature": 2.0, "seed": 9, "min_p": 0.01},
    {"allowed_token_ids": tuple(range(5, 25))},
]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_life_equals_its_solo_run(tiny_world: Any, hand_builders: Any, seed: int) -> None:
    """I4.1, I4.2, R4.34, P4.1."""
    world, worker = tiny_world
    random = np.random.default_rng(seed)
    lives = [
        Life(
            f"r{index}",
            random.integers(0, 37, int(random.integers(1, 14))).tolist(),
            SAMPLINGS[index % len(SAMPLINGS)],
            int(random.integers(1, 9)),
        )
        for index in range(9)
    ]
    worker.runner.state.slots.release(np.arange(world.max_seqs, dtype=np.int32))
    for view in worker.runner.kv.views.values():
        view.fill_(float("nan"))
    Chaos(world, worker, hand_builders, seed).run(lives)
    worker.runner.state.slots.release(np.arange(world.max_seqs, dtype=np.int32))
    for life in lives:
        request = world.engine_request(life.name, life.prompt, max_tokens=life.wanted, **life.sampling)
        assert world.generate(worker, [request])[life.name] == life.tokens
