"""Merging generations, and answers that do not depend on how the engine cuts its outputs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import EngineDeadError
from hardpoint.interfaces.engine import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from hardpoint.interfaces.request import FinishReason
from hardpoint.testing import FakeTokenizer
from hardpoint_serving.openai.chat import chat_completion, chat_frames
from hardpoint_serving.openai.completions import CompletionWriter
from hardpoint_serving.openai.protocol import ChatRequest, CompletionRequest, Message
from hardpoint_serving.openai.translate import Identity
from hardpoint_serving.outputs import ClientGone, OutputStream, until_gone
from hardpoint_serving.sse import EventStream

IDENTITY = Identity("id-1", 1, "fake", "fp_1")
PROMPT = (5, 6)


class Source:
    """A scripted generation. ``closed`` tells that it was ended, by itself or from outside."""

    def __init__(self, outputs: Sequence[RequestOutput | Exception], *, endless: bool = False) -> None:
        self.outputs = outputs
        self.endless = endless
        self.closed = False
        self.num_taken = 0

    async def run(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for item in self.outputs:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                self.num_taken += 1
                yield item
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def output(text: str, *, last: bool = False, count: int = 1, index: int = 0, **fields: Any) -> RequestOutput:
    sequence = CompletionOutput(
        index, text, (7,), finish_reason=FinishReason.STOP if last else None, num_generated_tokens=count, **fields
    )
    return RequestOutput("r", None, PROMPT, (sequence,), finished=last)


def never() -> asyncio.Task[None]:
    async def wait() -> None:
        await asyncio.Event().wait()

    return asyncio.create_task(wait())


async def soon() -> None:
    await asyncio.sleep(0.01)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_merging_keeps_each_sources_order_and_loses_nothing(lengths: list[int]) -> None:
    async def collect() -> list[tuple[int, str]]:
        sources = [Source([output(str(step)) for step in range(length)]) for length in lengths]
        stream = OutputStream([source.run() for source in sources])
        found = [(index, one.outputs[0].text) async for index, one in stream]
        await stream.close()
        assert all(source.closed for source in sources)
        return found

    found = asyncio.run(collect())
    for number, length in enumerate(lengths):
        assert [text for index, text in found if index == number] == [str(step) for step in range(length)]


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_of_one_ends_all(count: int) -> None:
    others = [Source([], endless=True) for _ in range(count - 1)]
    failing = Source([output("a"), EngineDeadError("gone")])
    stream = OutputStream([source.run() for source in (failing, *others)])
    gone = never()
    with pytest.raises(EngineDeadError):
        await stream.collect(gone)
    await stream.close()
    gone.cancel()
    assert all(source.closed for source in (failing, *others))


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_ends_what_runs(count: int) -> None:
    sources = [Source([output("a")], endless=True) for _ in range(count)]
    stream = OutputStream([source.run() for source in sources])
    await stream.prime(never(), 5)
    await soon()
    await stream.close()
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_stream_nobody_reads_is_held_back(count: int) -> None:
    sources = [Source([output("a")] * 1000) for _ in range(count)]
    stream = OutputStream([source.run() for source in sources])
    await stream.prime(never(), 5)
    await soon()
    assert sum(source.num_taken for source in sources) <= 4 * count
    await stream.close()


async def test_priming_raises_what_comes_before_the_first_output() -> None:
    stream = OutputStream([Source([EngineDeadError("gone")]).run()])
    with pytest.raises(EngineDeadError):
        await stream.prime(never(), 5)
    await stream.close()


async def test_priming_gives_up_in_time_and_loses_nothing() -> None:
    async def slow() -> AsyncGenerator[RequestOutput, None]:
        await asyncio.sleep(0.05)
        yield output("late", last=True)

    stream = OutputStream([slow()])
    await stream.prime(never(), 0.001)
    assert [one.outputs[0].text async for _, one in stream] == ["late"]
    await stream.close()


async def test_a_client_that_left_is_noticed_in_every_wait() -> None:
    source = Source([], endless=True)
    stream = OutputStream([source.run()])
    with pytest.raises(ClientGone):
        await stream.prime(asyncio.create_task(soon()), 5)
    await stream.close()
    assert source.closed
    source = Source([output("a")], endless=True)
    stream = OutputStream([source.run()])
    with pytest.raises(ClientGone):
        await stream.collect(asyncio.create_task(soon()))
    await stream.close()
    assert source.closed
    with pytest.raises(ClientGone):
        await until_gone(asyncio.sleep(30), asyncio.create_task(soon()))


def position(text: str) -> PositionLogprobs:
    chosen = Logprob(7, -1.0, text, text.encode(), 1)
    return PositionLogprobs(chosen, (chosen, Logprob(8, -2.0, "?", b"?", 2)))


def cut(tokens: Sequence[str], cuts: Sequence[int]) -> list[RequestOutput]:
    """The same generation, delivered in the given portions (the rest in a last one)."""
    outputs, begin = [], 0
    for size in [*cuts, len(tokens)]:
        part = tokens[begin : begin + size]
        begin += len(part)
        last = begin == len(tokens)
        logprobs = tuple(position(token) for token in part)
        outputs.append(output("".join(part), last=last, count=begin, logprobs=logprobs))
        if last:
            break
    return outputs


def parse(frames: list[bytes]) -> list[Any]:
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def run_frames(make: Callable[[OutputStream], Any], outputs: Sequence[RequestOutput]) -> list[Any]:
    async def collect() -> list[bytes]:
        stream = OutputStream([Source(outputs).run()])
        return [frame async for frame in make(stream)]

    return parse(asyncio.run(collect()))


TOKENS = st.lists(st.sampled_from(["a", "bc", " ", "é", "\n", "", "🙂"]), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.lists(st.integers(1, 3), max_size=8))
def test_a_chat_stream_says_what_the_whole_answer_says(tokens: list[str], cuts: list[int]) -> None:
    request = ChatRequest(messages=[Message("user", "x")], logprobs=True, stream=True)
    outputs = cut(tokens, cuts)
    chunks = run_frames(lambda stream: chat_frames(request, IDENTITY, stream), outputs)
    whole = json.loads(msgspec.json.encode(chat_completion(request, IDENTITY, [(0, cut(tokens, [])[0])])))
    choice = whole["choices"][0]
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == choice["message"]["content"]
    streamed = [entry for delta in deltas if delta["logprobs"] for entry in delta["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]
    assert [delta["finish_reason"] for delta in deltas if delta["finish_reason"]] == [choice["finish_reason"]]


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.lists(st.integers(1, 3), max_size=8), st.booleans())
def test_a_completion_stream_says_what_the_whole_answer_says(tokens: list[str], cuts: list[int], echo: bool) -> None:
    request = CompletionRequest(prompt="x", logprobs=2, echo=echo, stream=True)

    def writer() -> CompletionWriter:
        return CompletionWriter(request, IDENTITY, FakeTokenizer())

    chunks = run_frames(writer().frames, cut(tokens, cuts))
    whole = json.loads(msgspec.json.encode(writer().whole([(0, cut(tokens, [])[0])])))["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [item for choice in choices if choice["logprobs"] for item in choice["logprobs"][key]] == (
            whole["logprobs"][key]
        )


def test_what_follows_the_end_of_a_sequence_is_not_sent_again() -> None:
    request = ChatRequest(messages=[Message("user", "x")], stream=True)
    repeated = [output("a", last=False), output("b", last=True), output("b", last=True)]
    chunks = run_frames(lambda stream: chat_frames(request, IDENTITY, stream), repeated)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a", "b", None]
    completion = CompletionRequest(prompt="x", stream=True)
    chunks = run_frames(CompletionWriter(completion, IDENTITY, FakeTokenizer()).frames, repeated)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]


def test_token_ids_are_sent_even_where_no_text_is_complete() -> None:
    outputs = [output(""), output("é", last=True, count=2)]
    request = ChatRequest(messages=[Message("user", "x")], stream=True, return_token_ids=True)
    chunks = run_frames(lambda stream: chat_frames(request, IDENTITY, stream), outputs)
    assert chunks[0]["prompt_token_ids"] == list(PROMPT)
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [7], [7], None]
    completion = CompletionRequest(prompt="x", stream=True, return_token_ids=True)
    chunks = run_frames(CompletionWriter(completion, IDENTITY, FakeTokenizer()).frames, outputs)
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[7], [7]]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(PROMPT)
    assert "prompt_token_ids" not in chunks[1]["choices"][0]


def test_offsets_count_tokens_whose_text_is_still_held_back() -> None:
    """Text that may begin a stop string comes later than its token; the token's place is the same."""

    def logprob(text: str) -> PositionLogprobs:
        return PositionLogprobs(Logprob(7, -1.0, text, text.encode(), 1), ())

    parts = [("", "ab"), ("abc", "cd"), ("def", "ef")]
    outputs = [
        output(text, last=number == 2, count=number + 1, logprobs=(logprob(token),))
        for number, (text, token) in enumerate(parts)
    ]
    request = CompletionRequest(prompt="x", logprobs=0, stream=True)
    chunks = run_frames(CompletionWriter(request, IDENTITY, FakeTokenizer()).frames, outputs)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [2], [4]]


async def test_a_stream_that_cannot_even_begin_is_closed() -> None:
    source = Source([output("a")], endless=True)
    stream = OutputStream([source.run()])
    gone = never()
    await stream.prime(gone, 1.0)

    async def frames() -> AsyncGenerator[bytes, None]:
        yield b"x"

    async def send(message: Any) -> None:
        raise OSError("the connection is gone")

    answer = EventStream(frames(), gone=gone, close=stream.close, error_body=lambda failure: {}, keepalive_s=1.0)
    with pytest.raises(OSError, match="connection is gone"):
        await answer({}, None, send)
    assert source.closed
    assert gone.cancelled()
