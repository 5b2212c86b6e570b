"""Conformance of the plugin kind ``scheduler``: derive from :class:`SchedulerSuite` and say how to create yours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from hardpoint.errors import OverloadedError
from hardpoint.interfaces import FinishReason, PauseMode, Scheduler, SchedulerContext, SchedulerLimits
from hardpoint.interfaces.request import PoolingParams, TokenLogprobs
from hardpoint.interfaces.step import LogprobArrays, RowFailure
from hardpoint.testing.fake_worker import fake_pooled
from hardpoint.testing.kv_event_rules import check_events
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint.testing.scheduler_benchmark import measure
from hardpoint.testing.scheduler_loop import SchedulerLoop, make_request, scheduler_context, solo_tokens

__all__ = ["SchedulerSuite"]

PROMPT = list(range(3, 13))
STATES = ("waiting", "partly computed", "running", "under way")


class SchedulerSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.Scheduler`, over a worker whose tokens depend on the KV it reads.

    Switches declare optional behavior: ``max_inflight_steps`` above 1, ``preempts`` requests when blocks run out,
    ``caches_prefixes``, keeps ``deadlines``, obeys ``chunked_prefill=False``, ends rows of a ``RowFailure``, hands on
    ``log_probabilities``, tells ``kv_events``, ``pools`` prompts of tasks that end with a pooled result.
    """

    kind: ClassVar[str] = "scheduler"
    torch_free: ClassVar[bool] = True
    max_inflight_steps: ClassVar[int] = 1
    preempts: ClassVar[bool] = False
    caches_prefixes: ClassVar[bool] = False
    deadlines: ClassVar[bool] = False
    unchunked: ClassVar[bool] = False
    row_failures: ClassVar[bool] = True
    log_probabilities: ClassVar[bool] = True
    kv_events: ClassVar[bool] = False
    pools: ClassVar[bool] = False

    def create_scheduler(self, ctx: SchedulerContext) -> Scheduler:
        """The scheduler under test, as its factory makes it; an installed one can reach other plugins."""
        made: Scheduler = self.create_plugin(dataclasses.replace(ctx, plugins=self.runtime()))
        return made

    @pytest.fixture
    def make_loop(self) -> Callable[..., SchedulerLoop]:
        """``make_loop(num_blocks, inflight=1, **limits)``: a fresh scheduler under the engine's step loop."""

        def make(num_blocks: int = 64, inflight: int = 1, **changes: Any) -> SchedulerLoop:
            limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
            limits = msgspec.structs.replace(limits, max_inflight_steps=inflight, **changes)
            scheduler = self.create_scheduler(scheduler_context(limits, num_blocks))
            return SchedulerLoop(scheduler, limits, num_blocks, inflight)

        return make

    @pytest.mark.parametrize("seed", range(8))
    def test_tokens_equal_those_of_the_request_alone(self, make_loop: Callable[..., SchedulerLoop], seed: int) -> None:
        """I3.8: whatever the budget, the pool and the neighbors, and no block or slot is left behind."""
        rng = np.random.default_rng(seed)
        loop = make_loop(
            int(rng.integers(16, 40)),
            max_num_seqs=int(rng.integers(1, 6)),
            max_num_batched_tokens=int(rng.integers(6, 30)),
        )
        run_random(loop, rng)

    @pytest.mark.parametrize("seed", range(4))
    def test_several_steps_under_way_change_no_token(self, make_loop: Callable[..., SchedulerLoop], seed: int) -> None:
        """I3.8: results come later, tokens stay the same."""
        if self.max_inflight_steps < 2:
            pytest.skip("the scheduler declares one step in flight")
        rng = np.random.default_rng(seed)
        run_random(make_loop(40, inflight=self.max_inflight_steps), rng)

    def test_a_prompt_over_the_budget_is_computed_in_chunks(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R3.30, I3.4: alone, every step but the last one uses the whole budget and yields no token."""
        loop = make_loop(max_num_batched_tokens=8)
        loop.add(make_request("a", range(3, 33), 1))
        loop.run()
        steps = [step for step in loop.rules.steps if step.num_tokens]
        assert [step.num_tokens for step in steps] == [8, 8, 8, 6]
        assert [step.samples.tolist() for step in steps] == [[False], [False], [False], [True]]
        assert [step.num_computed_tokens.tolist() for step in steps] == [[0], [8], [16], [24]]

    def test_without_chunking_a_prompt_is_computed_at_once(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R3.66."""
        if not self.unchunked:
            pytest.skip("the scheduler declares no support of chunked_prefill=False")
        loop = make_loop(chunked_prefill=False, max_num_batched_tokens=64)
        for name in "abc":
            loop.add(make_request(name, range(3, 43), 3))
        loop.run()
        assert all(step.samples.all() for step in loop.rules.steps)

    @pytest.mark.parametrize("seed", range(3))
    def test_events_tell_which_prefixes_are_cached(self, make_loop: Callable[..., SchedulerLoop], seed: int) -> None:
        """I3.3, for routers: nothing is stored twice or removed unseen, and a hash stands for its tokens."""
        if not self.kv_events:
            pytest.skip("the scheduler declares no KV cache events")
        check_events(make_loop(24, kv_events=True), np.random.default_rng(seed))

    def test_nobody_is_told_who_does_not_ask(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        loop = make_loop()
        loop.add(make_request("a", PROMPT, 5))
        loop.run()
        assert not loop.scheduler.take_events(), "events are collected without the setting kv_events"

    def test_running_requests_advance_while_a_prompt_is_computed(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R3.30: a long prompt delays nobody by more than its share of a step."""
        loop = make_loop(max_num_batched_tokens=8)
        loop.add(make_request("a", PROMPT[:4], 8))
        loop.advance()
        loop.add(make_request("b", range(3, 43), 2))
        for count in range(2, 6):
            loop.advance()
            assert len(loop.tokens["a"]) == count, "a running request got no token in a step"
        loop.run()

    @pytest.mark.parametrize("state", STATES)
    def test_finishing_from_outside(self, make_loop: Callable[..., SchedulerLoop], state: str) -> None:
        """One terminal output with the given reason, nothing after it, and the others do not notice."""
        loop = make_loop(max_num_seqs=2, max_num_batched_tokens=12)
        loop.add(make_request("other", PROMPT, 9))
        loop.advance()
        if state == "waiting":
            loop.add(make_request("second", PROMPT, 9))
            loop.advance()
        loop.add(make_request("a", range(5, 35), 9))
        for _ in range({"waiting": 0, "partly computed": 1, "running": 4, "under way": 4}[state]):
            loop.advance()
        under_way = loop.schedule() if state == "under way" else None
        ended = loop.finish("a", "nobody", reason=FinishReason.ERROR, error="told so")
        assert [(e.request_id, e.finish_reason, e.error) for e in ended] == [("a", FinishReason.ERROR, "told so")]
        assert loop.finish("a") == [], "the second call found the request again"
        assert "a" not in loop.scheduler.live_request_ids()
        if under_way is not None:
            loop.collect(loop.scheduler.update(*under_way))
        loop.add(make_request("next", PROMPT[:5], 6))
        loop.run()
        assert loop.tokens["other"] == solo_tokens(PROMPT, 9)
        assert loop.tokens["next"] == solo_tokens(PROMPT[:5], 6)
        loop.check_empty()

    def test_finishing_all_at_once(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """Waiting and running together."""
        loop = make_loop()
        names = [f"r{i}" for i in range(9)]
        for name in names:
            loop.add(make_request(name, PROMPT))
        loop.advance()
        assert sorted(output.request_id for output in loop.finish(*names)) == names
        loop.run()
        loop.check_empty()

    def test_reasons_to_end(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """Stop ids, end of sequence, both limits, and what holds them back."""
        tokens = solo_tokens(PROMPT, 8)
        at = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
        stop = (tokens[at],)
        for request, count, reason, stop_reason in (
            (make_request("max", PROMPT, 3), 3, FinishReason.LENGTH, None),
            (make_request("stop", PROMPT, 20, stop_token_ids=stop), at + 1, FinishReason.STOP, stop[0]),
            (make_request("eos", PROMPT, 20, eos_token_ids=stop), at + 1, FinishReason.STOP, None),
            (make_request("ignored", PROMPT, 8, eos_token_ids=stop, ignore_eos=True), 8, FinishReason.LENGTH, None),
            (make_request("context", PROMPT, None), 64 - len(PROMPT), FinishReason.LENGTH, None),
        ):
            loop = make_loop()
            loop.add(request)
            loop.run()
            end = loop.ends[request.request_id]
            assert loop.tokens[request.request_id] == solo_tokens(PROMPT, count), request.request_id
            assert (end.finish_reason, end.stop_reason) == (reason, stop_reason), request.request_id
            loop.check_empty()

    def test_what_can_never_run_ends_at_once(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R1.5: a prompt without room for a token, or one the whole pool cannot hold."""
        for num_blocks, length in ((64, 64), (64, 80), (5, 40)):
            loop = make_loop(num_blocks)
            output = loop.add(make_request("a", range(3, 3 + length)))
            assert output is not None, "a request that can never run was queued"
            assert output.finish_reason is FinishReason.LENGTH
            assert not loop.scheduler.has_work()
            loop.check_empty()

    def test_a_live_id_is_refused_and_an_ended_one_is_free(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        loop = make_loop()
        loop.add(make_request("a", PROMPT))
        with pytest.raises(ValueError, match="a"):
            loop.scheduler.add(make_request("a", PROMPT))
        loop.advance()
        with pytest.raises(ValueError, match="a"):
            loop.scheduler.add(make_request("a", PROMPT))
        loop.run()
        loop.add(make_request("a", PROMPT[:3]))
        loop.run()
        assert loop.tokens["a"] == solo_tokens(PROMPT[:3], 5)
        loop.check_empty()

    def test_a_full_queue_refuses(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """What was refused leaves no trace; later there is room again."""
        loop = make_loop(max_num_seqs=2, max_waiting=3)
        accepted = add_until_refused(loop, 20)
        assert 3 <= len(accepted) <= 5, "max_waiting, and those that the free slots take"
        assert sorted(loop.scheduler.live_request_ids()) == accepted
        loop.run()
        loop.add(make_request("later", PROMPT))
        loop.run()
        assert loop.tokens["later"] == solo_tokens(PROMPT, 5)
        loop.check_empty()

    def test_pausing(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R3.33: ``NEW`` lets the running go on, ``ALL`` nobody; no token is lost."""
        loop = make_loop()
        loop.add(make_request("a", PROMPT, 8))
        loop.advance()
        loop.scheduler.set_pause(PauseMode.NEW)
        loop.add(make_request("b", PROMPT[1:], 8))
        loop.advance()
        assert (len(loop.tokens["a"]), len(loop.tokens["b"])) == (2, 0)
        loop.scheduler.set_pause(PauseMode.ALL)
        assert not loop.scheduler.has_work(), "paused wholly, yet the loop would spin"
        assert loop.scheduler.schedule().is_empty
        loop.scheduler.set_pause(PauseMode.NONE)
        loop.run()
        assert loop.tokens == {"a": solo_tokens(PROMPT, 8), "b": solo_tokens(PROMPT[1:], 8)}
        loop.check_empty()

    def test_an_idle_scheduler_does_nothing(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        loop = make_loop()
        assert not loop.scheduler.has_work()
        assert not loop.scheduler.schedule().must_execute
        assert loop.scheduler.finish(["nobody"], FinishReason.ABORT) == []
        loop.check_empty()

    def test_statistics_add_up(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        loop = make_loop(max_num_seqs=2)
        for i in range(5):
            loop.add(make_request(f"r{i}", PROMPT[: 4 + i]))
        loop.advance()
        stats = loop.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(list(loop.scheduler.live_request_ids())) == 5
        assert stats.num_total_blocks == 63, "the null block does not count"
        assert stats.num_free_blocks < 63
        loop.run()

    def test_a_failed_row_ends_its_request_only(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        if not self.row_failures:
            pytest.skip("the scheduler declares that it ends no request for a failed row")
        loop = make_loop()
        loop.add(make_request("a", PROMPT[:6], 6))
        loop.add(make_request("b", PROMPT[:5], 6))
        step, output = loop.schedule()
        row = next(row for row in step.new_rows if row.request_id == "a")
        failure = RowFailure(row.slot, row.generation, "not finite")
        place = step.slots.tolist().index(row.slot)
        counts = output.num_sampled.copy()
        counts[place] = 0
        ids = np.delete(output.token_ids, place)
        failed = msgspec.structs.replace(output, num_sampled=counts, token_ids=ids, failures=(failure,))
        loop.collect(loop.scheduler.update(step, failed))
        assert loop.ends["a"].finish_reason is FinishReason.ERROR
        assert loop.ends["a"].error == "not finite"
        loop.run()
        assert loop.tokens["b"] == solo_tokens(PROMPT[:5], 6)
        loop.check_empty()

    @pytest.mark.parametrize("inflight", [1, 2])
    def test_a_pooled_prompt_ends_with_its_result(self, make_loop: Callable[..., SchedulerLoop], inflight: int) -> None:
        """I3.8: beside requests that generate, chunk by chunk, without a sample, and with nothing left behind."""
        if not self.pools:
            pytest.skip("the scheduler declares no tasks that pool")
        loop = make_loop(inflight=min(inflight, self.max_inflight_steps), max_num_batched_tokens=8)
        prompts = {f"p{size}": list(range(3, 3 + size)) for size in (1, 8, 30)}
        for name, prompt in prompts.items():
            request = make_request(name, prompt, None)
            loop.add(msgspec.structs.replace(request, task="embed", pooling=PoolingParams()))
        loop.add(make_request("g", PROMPT, 6))
        loop.run()
        assert loop.tokens.pop("g") == solo_tokens(PROMPT, 6)
        for name, prompt in prompts.items():
            end = loop.ends[name]
            assert (end.finish_reason, end.error, loop.tokens[name]) == (FinishReason.STOP, None, [])
            np.testing.assert_array_equal(end.pooled, fake_pooled(prompt, first=3))
        loop.check_empty()

    def test_log_probabilities_reach_the_request(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R6.20: of the sampled token, of each token of the prompt, and of nobody else's."""
        if not self.log_probabilities:
            pytest.skip("the scheduler declares that it hands on no log-probabilities")
        loop = make_loop()
        for name, prompt, wanted in (("a", PROMPT[:4], {"logprobs": 1, "prompt_logprobs": 1}), ("b", PROMPT[:3], {})):
            plain = make_request(name, prompt, 2)
            sampling = msgspec.structs.replace(plain.sampling, **wanted)
            loop.add(msgspec.structs.replace(plain, sampling=sampling))
        step, output = loop.schedule()
        place = step.slots.tolist().index(next(row.slot for row in step.new_rows if row.request_id == "a"))
        counts = output.num_sampled.tolist()
        token = int(output.token_ids[sum(counts[:place])])
        assert counts[place] == 1
        prompt_ids = np.asarray([[PROMPT[i + 1], 7] for i in range(3)] + [[token, 7]], dtype=np.int32)
        values = np.arange(8, dtype=np.float32).reshape(4, 2) - 9
        everywhere, ranks = np.full(4, place, dtype=np.int32), np.ones(4, dtype=np.int32)
        told = msgspec.structs.replace(
            output,
            logprobs=LogprobArrays(everywhere[:1], prompt_ids[3:], values[3:], ranks[:1]),
            prompt_logprobs=LogprobArrays(everywhere, prompt_ids, values, ranks),
        )
        outputs = {entry.request_id: entry for entry in loop.scheduler.update(step, told)}
        loop.collect(outputs.values())
        expected = [TokenLogprobs(ids.tolist(), row.tolist(), 1) for ids, row in zip(prompt_ids, values, strict=True)]
        assert outputs["a"].logprobs == expected[3:]
        assert outputs["a"].prompt_logprobs == [None, *expected[:3]]
        assert not outputs["b"].logprobs
        assert not outputs["b"].prompt_logprobs
        loop.run()
        loop.check_empty()

    def test_preemption_changes_no_token(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """R3.78: more is admitted than the pool holds to the end."""
        if not self.preempts:
            pytest.skip("the scheduler declares no preemption")
        loop = make_loop(10, max_num_batched_tokens=32)
        for i in range(4):
            loop.add(make_request(f"r{i}", [40 + i, *PROMPT[:6]], 20))
        loop.run()
        assert loop.scheduler.stats().num_preemptions > 0
        assert loop.tokens == {f"r{i}": solo_tokens([40 + i, *PROMPT[:6]], 20) for i in range(4)}
        loop.check_empty()

    def test_prefixes_are_shared(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """I3.8: an equal prompt computes less, a reset forgets, and the limit ``prefix_caching`` is obeyed."""
        if not self.caches_prefixes:
            pytest.skip("the scheduler declares no prefix caching")
        for enabled in (True, False):
            loop = make_loop(prefix_caching=enabled)
            for name in ("first", "second"):
                loop.add(make_request(name, PROMPT))
                loop.run()
                assert loop.tokens[name] == solo_tokens(PROMPT, 5)
            assert (loop.ends["second"].num_cached_tokens > 0) == enabled
            assert loop.scheduler.reset_prefix_cache()
            loop.add(make_request("third", PROMPT))
            loop.run()
            assert loop.ends["third"].num_cached_tokens == 0
            loop.check_empty()

    def test_a_passed_deadline_aborts(self, make_loop: Callable[..., SchedulerLoop]) -> None:
        """While waiting, and without a step."""
        if not self.deadlines:
            pytest.skip("the scheduler declares that it keeps no deadlines")
        loop = make_loop()
        loop.add(make_request("late", PROMPT, deadline=1.0))
        loop.add(make_request("a", PROMPT))
        loop.run()
        assert loop.ends["late"].finish_reason is FinishReason.ABORT
        assert loop.tokens["a"] == solo_tokens(PROMPT, 5)
        loop.check_empty()

    def test_cost_of_a_step(self, record_property: Callable[[str, object], None]) -> None:
        """Figures to look at (``hardpoint plugins test``, or ``pytest -s``), not a verdict."""
        benchmark = measure(self.create_scheduler, counts=(64, 256), num_steps=20)
        record_property("figure", benchmark.summary)
        print(benchmark.summary)


def add_until_refused(loop: SchedulerLoop, most: int) -> list[str]:
    """Ids that were accepted before the first ``OverloadedError``; ``most`` are tried."""
    accepted: list[str] = []
    for i in range(most):
        try:
            loop.add(make_request(f"r{i}", PROMPT))
        except OverloadedError:
            break
        accepted.append(f"r{i}")
    return accepted


def run_random(loop: SchedulerLoop, rng: np.random.Generator) -> None:
    """Requests that join late, some of them aborted or stopped early; all others must answer as if alone."""
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    joining = [f"r{i}" for i in range(14)]
    while joining or loop.pipeline.has_work():
        if joining and rng.random() < 0.5:
            # Few families of prompts, so that requests share a prefix and part inside a block.
            start = int(rng.integers(3, 6))
            prompt = [*range(start, start + int(rng.integers(1, 30))), int(rng.integers(3, 90))]
            count = int(rng.integers(1, 12))
            name = joining.pop()
            tokens = solo_tokens(prompt, count)
            # A stop is found late where steps are planned ahead; the tokens after it are not to be told.
            stop = tokens[int(rng.integers(0, count))] if rng.random() < 0.4 else None
            request = make_request(name, prompt, count, stop_token_ids=() if stop is None else (stop,))
            assert loop.add(request) is None, "a request that fits was refused"
            wanted[name] = tokens if stop is None else tokens[: tokens.index(stop) + 1]
        if rng.random() < 0.06:
            aborted.update(output.request_id for output in loop.finish(*list(loop.scheduler.live_request_ids())[:1]))
        loop.advance()
    assert set(loop.ends) == set(wanted), "a request never ended"
    for name, tokens in wanted.items():
        got = loop.tokens[name]
        assert got == (tokens[: len(got)] if name in aborted else tokens), f"{name} got other tokens than alone"
    loop.check_empty()
