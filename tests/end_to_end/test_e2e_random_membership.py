"""Class 43: whoever joins, leaves, is thrown out and comes back, every request has the tokens it has alone.

Histories are drawn by hypothesis and run through real engines over tiny random models: a Llama and a mixture of
experts, planning one step at a time and ahead. The engines live on from one history to the next, so that slots, blocks
and prefixes of earlier requests lie about. The pool holds about two of the longest sequences, so that requests are also
preempted for lack of room.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.interfaces import EngineOutput, EngineRequest
from hardpoint_testing_torch import make_tiny_model, write_tiny_tokenizer
from tiny_llama import write_tiny_llama

NUM_KINDS = 14
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_model_len": 72,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 19,
    "num_kv_blocks": 40,
}
Kind = tuple[list[int], SamplingParams]


def kinds(vocab_size: int) -> list[Kind]:
    """Requests that differ in length, in sampling, and in what their beginnings share."""
    source = random.Random(3)
    shared = [source.randrange(3, vocab_size) for _ in range(24)]
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 11},
        {"temperature": 0.0, "repetition_penalty": 1.7},
        {"seed": 12, "top_k": 5, "top_p": 0.9},
        {"temperature": 0.0, "logit_bias": {7: 20.0}, "presence_penalty": 1.5},
        {"seed": 13, "min_p": 0.05, "frequency_penalty": 1.0},
        {"seed": 14, "temperature": 2.0, "allowed_token_ids": tuple(source.sample(range(3, vocab_size), 9))},
    ]
    found = []
    for index in range(NUM_KINDS):
        own = [source.randrange(3, vocab_size) for _ in range(source.choice([1, 3, 4, 5, 17, 30]))]
        prompt = shared[: source.choice([9, 16, 24])] + own[:12] if index % 3 == 0 else own
        length = source.choice([1, 2, 9, 25, 33])
        params = SamplingParams(max_tokens=length, ignore_eos=True, **variants[index % len(variants)])
        found.append((prompt, params))
    return found


@dataclass(slots=True)
class Requests:
    """One history: which kind each request is of, what it has been given, and how it ended."""

    llm: LLM
    kinds: Sequence[Kind]
    prefix: str
    kind_of: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def join(self, kind: int) -> None:
        name = f"{self.prefix}-{len(self.kind_of)}"
        prompt, params = self.kinds[kind]
        self.kind_of[name], self.tokens[name], self.ends[name] = kind, [], 0
        ids = np.asarray(prompt, dtype=np.int32)
        self.llm.core.add(EngineRequest(request_id=name, prompt_token_ids=ids, sampling=params))

    def leave(self, number: int) -> None:
        running = [name for name, count in self.ends.items() if not count]
        if running:
            name = running[number % len(running)]
            self.left.add(name)
            self.llm.core.abort([name])

    def throw_out(self) -> None:
        """Everybody: blocks and places are lost, and what was computed with them."""
        self.llm.core.scheduler.reset_prefix_cache(reset_running=True)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.take([output for frame in self.llm.core.step().values() for output in frame.outputs])

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        assert self.llm.core.dead_reason is None
        for output in outputs:
            assert output.error is None
            self.tokens[output.request_id] += output.new_token_ids
            self.ends[output.request_id] += output.finish_reason is not None

    def drain(self) -> None:
        while self.llm.core.has_work():
            self.step(1)
        self.step(1)

    def check(self, alone: Sequence[list[int]]) -> None:
        assert set(self.ends.values()) <= {1}, "each request ends once"
        for name, tokens in self.tokens.items():
            wanted = alone[self.kind_of[name]]
            assert tokens == (wanted[: len(tokens)] if name in self.left else wanted), name
        stats = self.llm.core.scheduler.stats()
        assert stats.num_free_blocks == stats.num_total_blocks


@dataclass(slots=True)
class Engine:
    """An engine that goes on from history to history, and what each kind of request gives when it is alone."""

    llm: LLM
    kinds: list[Kind]
    alone: list[list[int]]
    num_histories: int = 0

    @classmethod
    def over(cls, folder: Path, **changes: Any) -> Engine:
        with LLM(str(folder), **LIMITS, prefix_caching=False) as judge:
            found = kinds(judge.limits.vocab_size)
            outputs = [judge.generate([Prompt(token_ids=prompt)], params)[0] for prompt, params in found]
        return cls(LLM(str(folder), **LIMITS, **changes), found, [list(one.outputs[0].token_ids) for one in outputs])

    def live(self, history: Sequence[tuple[str, int]]) -> None:
        self.num_histories += 1
        requests = Requests(self.llm, self.kinds, str(self.num_histories))
        acts = {"join": requests.join, "leave": requests.leave, "step": requests.step}
        for act, number in history:
            if act == "throw out":
                requests.throw_out()
            else:
                acts[act](number)
        requests.drain()
        requests.check(self.alone)


def make_folder(model: str, factory: pytest.TempPathFactory) -> Path:
    if model == "dense":
        return write_tiny_llama(factory.mktemp("dense") / "tiny")
    folder = factory.mktemp("experts")
    config: dict[str, Any] = {"num_local_experts": 4, "num_hidden_layers": 2}
    write_tiny_tokenizer(folder, make_tiny_model("MixtralForCausalLM", folder, seed=2, **config).info.vocab_size)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, bool], Engine]]:
    """Made when they are first asked for."""

    class Made(dict[tuple[str, bool], Engine]):
        def __missing__(self, key: tuple[str, bool]) -> Engine:
            self[key] = Engine.over(make_folder(key[0], tmp_path_factory), async_scheduling=key[1])
            return self[key]

    made = Made()
    yield made
    for engine in made.values():
        engine.llm.shutdown()


acts = st.one_of(
    st.tuples(st.just("join"), st.integers(0, NUM_KINDS - 1)),
    st.tuples(st.just("join"), st.integers(0, NUM_KINDS - 1)),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("throw out"), st.just(0)),
    st.tuples(st.just("throw out"), st.just(0)),
)
BUSY = [*(("join", kind) for kind in range(6)), *[("step", 3), ("throw out", 0)] * 4, ("leave", 2), ("join", 9)]
"""Four at a time, thrown out four times: this one history preempts often enough, whatever the others do."""
histories = st.lists(acts, min_size=8, max_size=40)


@given(history=histories)
@settings(max_examples=3, deadline=None, derandomize=True)
def check_briefly(engine: Engine, history: list[tuple[str, int]]) -> None:
    engine.live(history)


@given(history=histories)
@example(history=BUSY)
@settings(max_examples=50, deadline=None, derandomize=True)
def check_at_length(engine: Engine, history: list[tuple[str, int]]) -> None:
    engine.live(history)


def test_a_few_histories_change_no_token(engines: dict[tuple[str, bool], Engine]) -> None:
    check_briefly(engines["dense", True])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True], ids=["one step at a time", "planned ahead"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_random_histories_change_no_token(engines: dict[tuple[str, bool], Engine], model: str, ahead: bool) -> None:
    """R4.38, I4.4: also for requests whose tokens are still on the device when they are thrown out."""
    engine = engines[model, ahead]
    check_at_length(engine)
    assert engine.llm.core.scheduler.stats().num_preemptions > 4


def test_the_kinds_differ_and_a_wrong_token_would_show(engines: dict[tuple[str, bool], Engine]) -> None:
    engine = engines["dense", True]
    assert len({tuple(tokens) for tokens in engine.alone}) == NUM_KINDS
    requests = Requests(engine.llm, engine.kinds, "wrong")
    requests.join(3)
    requests.drain()
    requests.tokens["wrong-0"][-1] += 1
    with pytest.raises(AssertionError, match="wrong-0"):
        requests.check(engine.alone)
