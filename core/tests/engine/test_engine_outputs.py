"""From engine frames to what readers see: states, log-probabilities, refusals, statistics."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.core import ERROR_CODE
from hardpoint.engine.input_processor import InputProcessor
from hardpoint.engine.output_processor import OutputProcessor, StatEvent
from hardpoint.engine.output_state import MAX_UNREAD_LOGPROBS, RequestState
from hardpoint.engine.stats import StatFanout
from hardpoint.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError, OverloadedError, PluginLoadError
from hardpoint.interfaces import (
    EngineOutput,
    EngineOutputs,
    FinishReason,
    ModelLimits,
    OutputKind,
    Prompt,
    RequestFinished,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StatLogger,
    StepObserved,
    TokenLogprobs,
    TokensEmitted,
)
from hardpoint.testing import FakeTokenizer

TOKENIZER = FakeTokenizer()
LIMITS = ModelLimits(vocab_size=300, max_model_len=100_000)


class Bench:
    """A processor whose clock the test turns, and whose events it keeps."""

    def __init__(self) -> None:
        self.now = 10.0
        self.events: list[StatEvent] = []
        self.inputs = InputProcessor(TOKENIZER, LIMITS, clock=lambda: self.now)
        self.outputs = OutputProcessor(TOKENIZER, "m", observe=self.events.append, clock=lambda: self.now)
        self.notified = 0

    def add(self, **params: Any) -> RequestState:
        processed = self.inputs.process(Prompt(token_ids=[70, 71]), SamplingParams(**params))
        return self.outputs.add(processed, self._notify)

    def _notify(self) -> None:
        self.notified += 1

    def feed(self, state: RequestState, text: str = "", index: int = 0, **fields: Any) -> list[str]:
        ids = fields.pop("ids", TOKENIZER.encode(text, add_special_tokens=False))
        output = EngineOutput(state.sequences[index].request_id, ids, **fields)
        return self.outputs.process(EngineOutputs([output], SchedulerStats(), self.now))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def take(state: RequestState) -> RequestOutput:
    output = state.take()
    assert output is not None
    return output


def test_deltas_between_reads_are_merged(bench: Bench) -> None:
    state = bench.add(output_kind=OutputKind.DELTA)
    assert state.take() is None
    for piece in ("ab", "c", "d"):
        bench.feed(state, piece)
    first = take(state).outputs[0]
    assert (first.text, len(first.token_ids), first.num_generated_tokens) == ("abcd", 4, 4)
    assert state.take() is None
    bench.feed(state, "e", finish_reason=FinishReason.LENGTH)
    last = take(state)
    assert (last.outputs[0].text, last.finished) == ("e", True)
    assert state.take() is None
    assert bench.notified == 4


def test_cumulative_outputs_repeat_what_was_shown(bench: Bench) -> None:
    state = bench.add()
    bench.feed(state, "ab")
    assert take(state).outputs[0].text == "ab"
    bench.feed(state, "c", finish_reason=FinishReason.LENGTH)
    assert take(state).outputs[0].text == "abc"


def test_a_final_output_comes_once(bench: Bench) -> None:
    state = bench.add(output_kind=OutputKind.FINAL_ONLY, n=2)
    bench.feed(state, "ab", finish_reason=FinishReason.STOP, stop_reason=None)
    assert state.take() is None
    bench.feed(state, "xy", 1, finish_reason=FinishReason.LENGTH)
    output = take(state)
    assert [(one.index, one.text, one.finish_reason) for one in output.outputs] == [
        (0, "a", FinishReason.STOP),
        (1, "xy", FinishReason.LENGTH),
    ]


def test_tokens_after_a_stop_string_are_dropped_and_the_engine_told(bench: Bench) -> None:
    state = bench.add(stop=("cd",), output_kind=OutputKind.DELTA, logprobs=0)
    raw = [TokenLogprobs([i], [-1.0], 1) for i in TOKENIZER.encode("abcdef", add_special_tokens=False)]
    aborts = bench.feed(state, "abcdef", logprobs=raw)
    assert aborts == [state.sequences[0].request_id]
    (one,) = take(state).outputs
    assert (one.text, one.stop_reason, one.finish_reason) == ("ab", "cd", FinishReason.STOP)
    assert (len(one.token_ids), one.num_generated_tokens, len(one.logprobs or ())) == (4, 4, 4)
    assert bench.feed(state, "late", finish_reason=FinishReason.ABORT) == []
    assert state.take() is None


def test_a_stop_string_beats_the_length_it_coincides_with(bench: Bench) -> None:
    state = bench.add(stop=("b",))
    assert bench.feed(state, "ab", finish_reason=FinishReason.LENGTH) == []
    assert take(state).outputs[0].finish_reason is FinishReason.STOP


def test_logprobs_carry_text_bytes_and_ranks(bench: Bench) -> None:
    state = bench.add(logprobs=2, prompt_logprobs=1)
    a, b, half = 3 + ord("a"), 3 + ord("b"), 3 + 0xF0
    raw = TokenLogprobs([half, a, b, -1], [-3.0, -0.1, -0.2, 0.0], 7)
    prompt = [None, TokenLogprobs([a, b], [-1.0, -0.5], 2)]
    bench.feed(state, ids=[half], logprobs=[raw], prompt_logprobs=prompt, finish_reason=FinishReason.LENGTH)
    output = take(state)
    (position,) = output.outputs[0].logprobs or ()
    chosen = position.chosen
    assert (chosen.token_id, chosen.rank, chosen.text, chosen.token_bytes) == (half, 7, "�", b"\xf0")
    assert [(one.text, one.rank) for one in position.top] == [("a", 1), ("b", 2)]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1].chosen.rank == 2


def test_no_logprobs_are_shown_unasked(bench: Bench) -> None:
    state = bench.add()
    bench.feed(state, "a")
    output = take(state)
    assert (output.outputs[0].logprobs, output.prompt_logprobs) == (None, None)


def test_aborting_ends_all_sequences_once_and_ignores_the_echo(bench: Bench) -> None:
    state = bench.add(n=3, output_kind=OutputKind.DELTA)
    bench.feed(state, "a", 1, finish_reason=FinishReason.STOP)
    ids = [sequence.request_id for sequence in state.sequences]
    assert bench.outputs.abort(state.processed.request_id) == [ids[0], ids[2]]
    assert bench.outputs.abort(state.processed.request_id) == []
    assert bench.outputs.num_sequences == 0
    assert take(state).finished
    assert sum(isinstance(event, RequestFinished) for event in bench.events) == 1


@pytest.mark.parametrize("kind", [OverloadedError, EngineNotReadyError, InvalidRequestError, EngineDeadError])
def test_refusals_of_the_engine_become_exceptions(bench: Bench, kind: type[Exception]) -> None:
    state = bench.add()
    bench.feed(state, finish_reason=FinishReason.ERROR, error="no", extensions={ERROR_CODE: kind.__name__})
    assert isinstance(state.failure, kind)
    assert state.finished


def test_an_error_of_one_row_is_an_output_with_its_text(bench: Bench) -> None:
    state = bench.add()
    bench.feed(state, finish_reason=FinishReason.ERROR, error="the logits were not numbers")
    assert state.failure is None
    output = take(state)
    assert (output.error, output.outputs[0].finish_reason) == ("the logits were not numbers", FinishReason.ERROR)


def test_each_reader_gets_its_own_exception_when_the_engine_dies(bench: Bench) -> None:
    states = [bench.add(), bench.add()]
    bench.outputs.fail_all(lambda: EngineDeadError("gone"))
    assert all(isinstance(state.failure, EngineDeadError) for state in states)
    assert states[0].failure is not states[1].failure
    assert bench.outputs.num_sequences == 0


def test_a_decoder_that_breaks_ends_only_its_request(bench: Bench) -> None:
    good, bad = bench.add(), bench.add(logprobs=1)
    aborts = bench.feed(bad, "a", prompt_logprobs=[TokenLogprobs([], [], 1)])
    assert aborts == [bad.sequences[0].request_id]
    assert take(bad).error == "the output could not be decoded"
    bench.feed(good, "a", finish_reason=FinishReason.LENGTH)
    assert take(good).outputs[0].text == "a"


def test_a_stalled_reader_of_many_logprobs_is_cut_off(bench: Bench) -> None:
    state = bench.add(logprobs=20, output_kind=OutputKind.DELTA)
    raw = TokenLogprobs(list(range(3, 24)), [-1.0] * 21, 1)
    count = 1
    while not bench.feed(state, "a", logprobs=[raw]):
        count += 1
    assert 0 < count * 21 - MAX_UNREAD_LOGPROBS <= 21
    assert take(state).error == "the output was read too slowly"


def test_a_stalled_reader_costs_little(bench: Bench) -> None:
    """At most a megabyte each, for as many tokens as a context holds."""
    state = bench.add(output_kind=OutputKind.DELTA)
    for _ in range(30_000):
        bench.feed(state, "ab")
    (sequence,) = state.sequences
    detokenizer: Any = sequence._detokenizer
    held = sys.getsizeof(sequence._token_ids) + sys.getsizeof(detokenizer._final)
    assert held < 2**20
    assert len(take(state).outputs[0].text) == 60_000


def test_times_are_counted_from_arrival(bench: Bench) -> None:
    state = bench.add(output_kind=OutputKind.DELTA)
    bench.now = 12.0
    bench.feed(state, "a", first_scheduled_time=11.5, num_cached_tokens=1)
    for moment in (12.5, 13.0, 14.0):
        bench.now = moment
        bench.feed(state, "b", finish_reason=FinishReason.LENGTH if moment == 14.0 else None)
    output = take(state)
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.queue_s, metrics.ttft_s, metrics.e2e_s) == (1.5, 2.0, 4.0)
    assert metrics.decode_tokens_per_s == pytest.approx(1.5)
    assert output.num_cached_tokens == 1


def test_statistics_add_up(bench: Bench) -> None:
    """L12.24: typed events, whose figures are those of the request."""
    state = bench.add()
    bench.now = 11.0
    bench.feed(state, "a")
    bench.now = 11.5
    bench.feed(state, "bc", finish_reason=FinishReason.LENGTH)
    steps = [event for event in bench.events if isinstance(event, StepObserved)]
    assert [(s.num_prompt_tokens, s.num_generated_tokens, s.num_requests) for s in steps] == [(2, 1, 1), (0, 2, 0)]
    emitted = [event for event in bench.events if isinstance(event, TokensEmitted)]
    assert [(e.ttft_s, e.inter_token_s) for e in emitted] == [((1.0,), ()), ((), (0.25,))]
    (finished,) = [event for event in bench.events if isinstance(event, RequestFinished)]
    assert (finished.num_generated_tokens, finished.e2e_s, finished.inter_token_s) == (3, 1.5, 0.25)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.sampled_from(["stop", "abort", None])), max_size=12))
def test_events_of_all_front_ends_make_the_whole(requests: list[tuple[bool, int, str | None]]) -> None:
    """L12.24: each request ends in one event with its id, at the front end that took it; sums are of all of them."""
    benches = {False: Bench(), True: Bench()}
    ended: dict[bool, set[str]] = {False: set(), True: set()}
    for other, count, end in requests:
        bench = benches[other]
        state = bench.add()
        bench.feed(state, "a" * count, finish_reason=FinishReason.STOP if end == "stop" else None)
        if end == "abort":
            bench.outputs.abort(state.processed.request_id)
        if end is not None:
            ended[other].add(state.processed.request_id)
    for other, bench in benches.items():
        finished = [event.request_id for event in bench.events if isinstance(event, RequestFinished)]
        assert sorted(finished) == sorted(ended[other])
    steps = [event for bench in benches.values() for event in bench.events if isinstance(event, StepObserved)]
    assert sum(step.num_generated_tokens for step in steps) == sum(count for _, count, _ in requests)
    assert len(ended[False] | ended[True]) == len(ended[False]) + len(ended[True])


@settings(max_examples=150, deadline=None)
@given(
    st.text("abé😀", max_size=20),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_any_reading_rhythm_gives_the_same_answer(text: str, rhythm: list[tuple[int, bool]], stop: list[str]) -> None:
    bench = Bench()
    kinds = [OutputKind.DELTA, OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY]
    states = {kind: bench.add(output_kind=kind, stop=tuple(stop)) for kind in kinds}
    shown: dict[OutputKind, list[RequestOutput]] = {kind: [] for kind in kinds}
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for size, reads in [*rhythm, (len(ids) + 1, True)]:
        part, ids = ids[:size], ids[size:]
        for kind, state in states.items():
            bench.feed(state, ids=part, finish_reason=FinishReason.LENGTH if size > 5 or not ids else None)
            if reads and (output := state.take()) is not None:
                shown[kind].append(output)
    for kind, state in states.items():
        if (output := state.take()) is not None:
            shown[kind].append(output)
    whole = shown[OutputKind.FINAL_ONLY][-1].outputs[0]
    assert shown[OutputKind.CUMULATIVE][-1].outputs[0] == whole
    deltas = [output.outputs[0] for output in shown[OutputKind.DELTA]]
    assert "".join(one.text for one in deltas) == whole.text
    assert tuple(i for one in deltas for i in one.token_ids) == whole.token_ids
    assert [output.finished for output in shown[OutputKind.DELTA]].count(True) == 1


class _Failing(StatLogger):
    def __init__(self) -> None:
        self.calls = 0

    def on_finished(self, event: RequestFinished) -> None:
        self.calls += 1
        raise RuntimeError("disk full")

    def flush(self) -> None:
        self.calls += 1


def test_a_failing_logger_is_left_out_and_reported() -> None:
    told: list[str] = []
    failing, fine = _Failing(), _Failing()
    fanout = StatFanout({"bad": failing}, lambda name, error: told.append(f"{name}: {error}"))
    event = RequestFinished("r", "m", FinishReason.STOP, 1, 0, 1, 0.5)
    fanout.observe(event)
    fanout.observe(event)
    fanout.flush()
    assert told == ["bad: disk full"]
    assert failing.calls == 1
    StatFanout({"fine": fine}).flush()
    assert fine.calls == 1


def test_a_logger_that_calls_for_the_end_of_the_process_is_left_out_like_any_other() -> None:
    class Leaving(_Failing):
        def flush(self) -> None:
            self.calls += 1
            raise SystemExit(3)

    told: list[Exception] = []
    leaving, fine = Leaving(), _Failing()
    fanout = StatFanout({"bad": leaving, "fine": fine}, lambda name, error: told.append(error))
    fanout.flush()
    fanout.flush()
    assert [str(error) for error in told] == ["SystemExit: 3"]
    assert (leaving.calls, fine.calls) == (1, 2)


async def test_loggers_are_flushed_at_their_own_interval() -> None:
    import asyncio

    logger = _Failing()
    logger.interval_s = 0.01
    task = asyncio.create_task(StatFanout({"x": logger}).run())
    await asyncio.sleep(0.1)
    task.cancel()
    assert logger.calls >= 3


def test_a_failing_logger_that_must_not_fail_ends_no_stream() -> None:
    """Its owner may call the failure fatal; the frame it happened in still reaches every reader."""

    def fatal(name: str, error: Exception) -> None:
        raise PluginLoadError(f"{name} failed: {error}")

    bench, fanout = Bench(), StatFanout({"bad": _Failing()}, fatal)
    bench.outputs = OutputProcessor(TOKENIZER, "m", observe=fanout.observe)
    states = [bench.add(), bench.add()]
    ends = [EngineOutput(state.sequences[0].request_id, [70], FinishReason.STOP) for state in states]
    bench.outputs.process(EngineOutputs(ends, SchedulerStats(), 1.0))
    assert [state.finished for state in states] == [True, True]
    assert bench.notified == 2
