"""The engine in its own process, over the distribution of fakes: start, streams, every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.frontend import Frontend
from hardpoint.errors import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelFormatError,
    OverloadedError,
)
from hardpoint.interfaces import (
    FinishReason,
    ModelLimits,
    OutputKind,
    Prompt,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)
from hardpoint.interfaces.tokenizer import DecodeStream
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeTokenizer, next_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, output_kind=OutputKind.DELTA)
LONG = SamplingParams(temperature=0.0, max_tokens=100, output_kind=OutputKind.DELTA)
SLOW = {"step_delay_s": 0.02}
PROMPT = Prompt(token_ids=[40, 41, 42])
Start = Callable[..., Any]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 130, 35))
    return tokens[len(prompt) :]


@pytest.fixture
def start(make_spec: Callable[..., Any], make_runtime: Callable[..., Any]) -> Start:
    @asynccontextmanager
    async def start(*args: Any, **options: Any) -> AsyncIterator[AsyncLLM]:
        llm = await AsyncLLM.start(make_spec(*args, **options), make_runtime(ProcessRole.API))
        try:
            yield llm
        finally:
            await llm.shutdown(drain=False)

    return start


async def collect(llm: AsyncLLM, prompt: Prompt, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, RequestOptions(**options))]


def ids_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [i for output in outputs for one in output.outputs if one.index == index for i in one.token_ids]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)


async def test_streams_carry_the_tokens_each_prompt_has_alone(start: Start) -> None:
    prompts = [[40 + i, 41, 42] for i in range(12)]
    async with start() as llm:
        assert llm.is_ready
        assert llm.tasks == ("generate", "embed")
        runs = await asyncio.gather(*(collect(llm, Prompt(token_ids=prompt), GREEDY) for prompt in prompts))
        for prompt, outputs in zip(prompts, runs, strict=True):
            assert ids_of(outputs) == expected(prompt, 8)
            text = "".join(one.text for output in outputs for one in output.outputs)
            assert text == llm.tokenizer.decode(ids_of(outputs))
            assert [output.finished for output in outputs].count(True) == 1
            assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
        stats = await llm.refresh_stats()
        assert stats.num_free_blocks == stats.num_total_blocks


async def test_a_slow_reader_gets_merged_deltas_and_loses_nothing(start: Start) -> None:
    async with start() as llm:
        stream = llm.generate(PROMPT, LONG)
        first = await anext(stream)
        await until(lambda: llm.num_unfinished == 0)
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert ids_of([first, *rest]) == expected([40, 41, 42], 100)


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY])
async def test_whole_outputs_hold_everything(start: Start, kind: OutputKind) -> None:
    async with start() as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, output_kind=kind)
        outputs = await collect(llm, PROMPT, params)
        assert list(outputs[-1].outputs[0].token_ids) == expected([40, 41, 42], 8)
        assert len(outputs) == 1 or kind is OutputKind.CUMULATIVE
        metrics = outputs[-1].metrics
        assert metrics is not None
        assert metrics.ttft_s is not None
        assert metrics.e2e_s is not None
        assert 0 <= metrics.ttft_s <= metrics.e2e_s


async def test_several_sequences_of_one_prompt_end_as_one_request(start: Start) -> None:
    async with start() as llm:
        params = SamplingParams(n=3, seed=7, max_tokens=5, output_kind=OutputKind.DELTA)
        outputs = await collect(llm, PROMPT, params)
        assert [output.finished for output in outputs].count(True) == 1
        assert all(ids_of(outputs, index) == expected([40, 41, 42], 5) for index in range(3))
        ends = [one.index for output in outputs for one in output.outputs if one.finished]
        assert sorted(ends) == [0, 1, 2]


async def test_closing_the_stream_frees_the_blocks(start: Start) -> None:
    async with start(SLOW) as llm:
        stream = llm.generate(PROMPT, LONG)
        await anext(stream)
        await stream.aclose()
        assert llm.num_unfinished == 0
        await asyncio.sleep(0.2)
        stats = await llm.refresh_stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)


async def test_cancelling_the_reader_frees_the_blocks(start: Start) -> None:
    async with start(SLOW) as llm:
        tasks = [asyncio.create_task(collect(llm, PROMPT, LONG)) for _ in range(5)]
        await until(lambda: (stats := llm.stats()) is not None and stats.num_running == 5)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0.2)
        stats = await llm.refresh_stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)


async def test_a_stop_string_ends_the_request_in_the_engine_too(start: Start) -> None:
    async with start(SLOW) as llm:
        text = llm.tokenizer.decode(expected([40, 41, 42], 100))
        params = SamplingParams(temperature=0.0, max_tokens=100, stop=(text[5:8],), output_kind=OutputKind.DELTA)
        outputs = await collect(llm, PROMPT, params)
        assert "".join(one.text for output in outputs for one in output.outputs) == text[: text.find(text[5:8])]
        assert outputs[-1].outputs[0].finish_reason is FinishReason.STOP
        assert outputs[-1].outputs[0].stop_reason == text[5:8]
        await asyncio.sleep(0.2)
        assert (await llm.refresh_stats()).num_running == 0


async def test_a_full_queue_refuses_before_anything_is_sent(start: Start) -> None:
    async with start(SLOW, {"max_num_seqs": 2, "max_waiting": 1}) as llm:
        tasks = [asyncio.create_task(collect(llm, PROMPT, LONG)) for _ in range(3)]
        await until(lambda: llm.num_unfinished == 3)
        with pytest.raises(OverloadedError, match="at most 3"):
            await collect(llm, PROMPT, GREEDY)
        for task in tasks:
            assert not task.done()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert len(await collect(llm, PROMPT, GREEDY)) >= 1
        with pytest.raises(InvalidRequestError, match="3 sequences at a time"):
            await collect(llm, PROMPT, SamplingParams(n=4))


async def test_a_passed_deadline_aborts(start: Start) -> None:
    async with start(SLOW) as llm:
        outputs = await collect(llm, PROMPT, LONG, timeout_s=0.15)
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        assert outputs[-1].error == "the request's time limit has passed"


async def test_killing_the_engine_ends_every_stream_with_an_error(start: Start) -> None:
    async with start(SLOW) as llm:
        tasks = [asyncio.create_task(collect(llm, PROMPT, LONG)) for _ in range(4)]
        await until(lambda: (stats := llm.stats()) is not None and stats.num_running == 4)
        started = time.monotonic()
        os.kill(llm.client.child.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started < 1.0
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not llm.is_ready
        assert not llm.is_alive
        assert "SIGKILL" in (llm.dead_reason or "")
        with pytest.raises(EngineDeadError):
            await collect(llm, PROMPT, GREEDY)
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()


async def test_a_failing_step_ends_all_requests_and_the_engine(start: Start) -> None:
    async with start({"step_error_at": 5, **SLOW}) as llm:
        runs = await asyncio.gather(*(collect(llm, PROMPT, LONG) for _ in range(3)), return_exceptions=True)
        for ended in runs:
            assert isinstance(ended, EngineDeadError), "the same end as when the process itself is lost"
            assert str(ended) == "the engine failed during this request"
        await until(lambda: llm.dead_reason is not None)
        assert "the device fell off" in (llm.dead_reason or "")
        assert await asyncio.to_thread(llm.client.child.wait, 5.0) == 1


@pytest.mark.slow
async def test_a_stopped_engine_is_first_not_ready_then_not_alive(start: Start) -> None:
    async with start(stall_after_s=4.5) as llm:
        os.kill(llm.client.child.pid, signal.SIGSTOP)
        try:
            await until(lambda: not llm.is_ready, 3.0)
            assert llm.is_alive
            await until(lambda: not llm.is_alive, 6.0)
            assert "not advanced" in (llm.dead_reason or "")
        finally:
            os.kill(llm.client.child.pid, signal.SIGCONT)
        await until(lambda: llm.is_ready)
        assert ids_of(await collect(llm, PROMPT, GREEDY)) == expected([40, 41, 42], 8)


async def test_sigterm_lets_running_requests_finish(start: Start) -> None:
    async with start(SLOW) as llm:
        task = asyncio.create_task(collect(llm, PROMPT, LONG))
        await until(lambda: (stats := llm.stats()) is not None and stats.num_running == 1)
        llm.client.child.terminate()
        await asyncio.sleep(0.1)
        with pytest.raises(EngineNotReadyError):
            await collect(llm, PROMPT, GREEDY)
        assert ids_of(await task) == expected([40, 41, 42], 100)
        assert await asyncio.to_thread(llm.client.child.wait, 5.0) == 0


async def test_a_second_sigterm_aborts_them(start: Start) -> None:
    async with start({"step_delay_s": 0.1}) as llm:
        task = asyncio.create_task(collect(llm, PROMPT, LONG))
        await until(lambda: (stats := llm.stats()) is not None and stats.num_running == 1)
        llm.client.child.terminate()
        await asyncio.sleep(0.3)
        assert not task.done()
        llm.client.child.terminate()
        outputs = await asyncio.wait_for(task, 3.0)
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        assert await asyncio.to_thread(llm.client.child.wait, 5.0) == 0


async def test_draining_waits_for_the_running_and_refuses_the_new(start: Start) -> None:
    async with start(SLOW) as llm:
        task = asyncio.create_task(collect(llm, PROMPT, GREEDY))
        await until(lambda: llm.num_unfinished == 1)
        drained = asyncio.create_task(llm.drain(5.0))
        await asyncio.sleep(0)
        assert not llm.is_ready
        with pytest.raises(EngineNotReadyError):
            await collect(llm, PROMPT, GREEDY)
        assert await drained
        assert ids_of(await task) == expected([40, 41, 42], 8)


async def test_a_drain_that_takes_too_long_aborts_the_rest(start: Start) -> None:
    async with start({"step_delay_s": 0.1}) as llm:
        task = asyncio.create_task(collect(llm, PROMPT, LONG))
        await until(lambda: llm.num_unfinished == 1)
        await llm.shutdown(timeout_s=0.3)
        outputs = await task
        assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        assert llm.client.child.poll() == 0


async def test_a_failed_start_raises_the_engines_own_error(start: Start) -> None:
    with pytest.raises(ModelFormatError, match="model.gguf is cut short"):
        async with start({"load_error": "model.gguf is cut short"}):
            raise RuntimeError("the engine must not have started")


async def test_an_engine_that_dies_while_it_loads_is_reported(start: Start) -> None:
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        async with start({"load_kill": True}):
            raise RuntimeError("the engine must not have started")


async def test_giving_up_while_it_loads_leaves_no_process(start: Start) -> None:
    async def run() -> None:
        async with start({"load_delay_s": 60.0}):
            raise RuntimeError("the engine must not have started")

    task = asyncio.create_task(run())
    await asyncio.sleep(1.0)
    task.cancel()
    started = time.monotonic()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert time.monotonic() - started < 5.0


async def test_bad_frames_are_dropped_by_the_engine(start: Start) -> None:
    async with start() as llm:
        for frame in (b"", b"\xc1", b"not msgpack", b"\x81\xa4type\xa3Add", b"\x93\x01\x02\x03"):
            llm.client._sender.send(frame, zmq.NOBLOCK)
        assert ids_of(await collect(llm, PROMPT, GREEDY)) == expected([40, 41, 42], 8)
        with pytest.raises(Exception, match="does not exist"):
            await llm.client.utility("shutdown_everything")


async def test_statistics_reach_the_loggers(start: Start) -> None:
    async with start() as llm:
        outputs = await collect(llm, PROMPT, GREEDY)
        logger: Any = llm.stat_loggers["fake"]
        assert sum(event.num_generated_tokens for event in logger.steps) == 8
        assert sum(event.num_prompt_tokens for event in logger.steps) == 3
        assert [len(event.ttft_s) for event in logger.tokens].count(1) == 1
        (finished,) = logger.finished
        assert finished.request_id == outputs[0].request_id
        assert (finished.reason, finished.num_generated_tokens) == (FinishReason.LENGTH, 8)


async def test_many_readers_that_come_leave_and_stall_disturb_nobody(start: Start) -> None:
    """Every stream read to its end carries its own tokens; afterwards every block is free again."""
    async with start(limits={"max_num_seqs": 8, "max_waiting": 400}) as llm:

        async def read(number: int) -> None:
            prompt = [40 + number % 60, 50 + number % 7]
            seen: list[int] = []
            stream = llm.generate(Prompt(token_ids=prompt), LONG)
            async for output in stream:
                seen += output.outputs[0].token_ids
                if number % 3 == 1:
                    await stream.aclose()
                    return
                if number % 3 == 2:
                    await asyncio.sleep(0.01)
            assert seen == expected(prompt, 100)

        await asyncio.gather(*(read(number) for number in range(120)))
        assert llm.num_unfinished == 0
        stats = await llm.refresh_stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_total_blocks


async def test_long_texts_are_tokenized_off_the_loop(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start(model_limits=ModelLimits(vocab_size=130, max_model_len=100_000)) as llm:
        threads: list[str] = []
        encode = llm.tokenizer.encode

        def spied(text: str, **options: bool) -> list[int]:
            threads.append(threading.current_thread().name)
            return encode(text[:10], **options)

        monkeypatch.setattr(llm.tokenizer, "encode", spied)
        await collect(llm, Prompt(text="a" * 5000), GREEDY)
        await collect(llm, Prompt(text="a" * 50), GREEDY)
        assert [name.startswith("tokenize") for name in threads] == [True, False]


async def test_a_chat_goes_through_the_template(start: Start) -> None:
    async with start() as llm:
        prompt = llm.render_chat([{"role": "user", "content": "hi"}])
        outputs = await collect(llm, prompt, GREEDY)
        assert llm.tokenizer.decode(outputs[0].prompt_token_ids) == "<user>hi\n<assistant>"


async def test_a_bad_request_costs_nothing(start: Start) -> None:
    async with start() as llm:
        for prompt, params in ((Prompt(text=""), GREEDY), (PROMPT, SamplingParams(n=10**9)), (None, GREEDY)):
            with pytest.raises(InvalidRequestError):
                await collect(llm, prompt, params)  # type: ignore[arg-type]
        assert llm.num_unfinished == 0
        assert llm.stats() is None


async def test_a_request_the_front_end_cannot_follow_is_not_left_to_the_engine(start: Start) -> None:
    class Unwilling(FakeTokenizer):
        def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
            raise ValueError("no decoder for this prompt")

    async with start(SLOW) as llm:
        llm._outputs._tokenizer = Unwilling()
        with pytest.raises(ValueError, match="no decoder"):
            await collect(llm, PROMPT, LONG)
        stats = await llm.refresh_stats()
        assert (stats.num_running, stats.num_waiting, llm.num_unfinished) == (0, 0, 0)


async def test_the_tokenizer_loads_beside_the_event_loop(
    make_spec: Callable[..., Any], make_runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from_spec, threads = Frontend.from_spec, []

    def watched(*arguments: Any) -> Frontend:
        threads.append(threading.current_thread())
        return from_spec(*arguments)

    monkeypatch.setattr(Frontend, "from_spec", watched)
    llm = await AsyncLLM.start(make_spec(), make_runtime(ProcessRole.API))
    await llm.shutdown(drain=False)
    assert threads
    assert threads[0] is not threading.main_thread()


@pytest.mark.slow
async def test_a_broken_connection_ends_in_an_orderly_shutdown_all_the_same(start: Start) -> None:
    async def broken() -> None:
        raise zmq.ZMQError(zmq.ETERM)

    async with start() as llm:
        llm.client._reader.cancel()
        llm.client._reader = asyncio.create_task(broken())
        llm.client._reader.add_done_callback(llm.client._reader_ended)
        await until(lambda: llm.client.dead_reason is not None)
        assert "receiving from the engine failed" in (llm.client.dead_reason or "")
