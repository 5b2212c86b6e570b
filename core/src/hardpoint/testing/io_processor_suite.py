"""Conformance of the plugin kind ``io_processor``: derive from :class:`IOProcessorSuite` and give it sample tasks."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import (
    IOProcessor,
    IOProcessorContext,
    IORequest,
    ModelArtifact,
    ModelInfo,
    OutputKind,
    RequestOutput,
)
from hardpoint.testing.fake_engine_client import FakeEngineClient
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["IOProcessorSuite"]

REPLIES = ("Hello, world", "{", '{"a": 1}', "]]", "42", "-1e999", "yes\nno", " ", "\\", '"', "Ünï-☃", "x" * 300)
ODD_TASKS: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    1.5,
    "",
    "x",
    "\x00",
    "y" * 5_000,
    [],
    [[]],
    [None],
    [1, "a"],
    {},
    {"a": {"b": []}},
    {"": None},
)
LEAKS = re.compile(r"Traceback|\.py\b|0x[0-9a-f]{6,}|site-packages")


class IOProcessorSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.IOProcessor`, over a fake engine with real validation.

    ``tasks`` are valid data, at least two that are answered differently. ``config`` is the model's configuration.
    """

    kind: ClassVar[str] = "io_processor"
    torch_free: ClassVar[bool] = True
    tasks: ClassVar[tuple[Any, ...]] = ()
    config: ClassVar[Mapping[str, Any]] = {}

    def create_processor(self, ctx: IOProcessorContext) -> IOProcessor:
        """The processor under test, as its factory makes it."""
        made: IOProcessor = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        """An engine for the processor, which it gets as its own."""
        client = FakeEngineClient()
        client.io_processor = self.create_processor(self.make_context(client))
        return client

    @pytest.fixture
    def processor(self, client: FakeEngineClient) -> IOProcessor:
        assert client.io_processor is not None
        return client.io_processor

    def make_context(self, client: FakeEngineClient) -> IOProcessorContext:
        artifact = ModelArtifact(name=client.model_name, root="/nowhere", files=(), source="under-test")
        model = ModelInfo(
            artifact=artifact,
            architecture="Fake",
            config=dict(self.config),
            max_position=client.limits.max_model_len,
            vocab_size=client.limits.vocab_size,
            dtype="float32",
            loader="under-test",
        )
        return self.context(
            IOProcessorContext,
            model=model,
            model_name=client.model_name,
            limits=client.limits,
            tokenizer=client.tokenizer,
            render_chat=client.render_chat,
        )

    def test_it_is_held_against_tasks(self) -> None:
        assert len(self.tasks) > 1, "the suite needs valid data: set 'tasks' to two or more of them"

    def test_valid_tasks_are_answered_in_json(self, client: FakeEngineClient) -> None:
        """R12.43: through the engine's own checks of prompts and parameters."""
        for task in self.tasks:
            result = asyncio.run(client.process(copy.deepcopy(task)))
            text = json.dumps(result, allow_nan=False)
            assert json.loads(text) == json.loads(msgspec.json.encode(result)), "JSON says something else than it is"
        assert client.num_running == 0

    def test_requests_are_records(self, processor: IOProcessor, client: FakeEngineClient) -> None:
        for task in self.tasks:
            requests = processor.parse(task)
            assert 0 < len(requests) <= client.limits.max_prompts
            for request in requests:
                assert isinstance(request, IORequest)
                prompt = request.prompt
                assert (prompt.text is None) != (prompt.token_ids is None), "a prompt is either a text or ids"

    def test_data_is_not_changed(self, processor: IOProcessor) -> None:
        """It is the caller's, who may log it or send it again."""
        for task in self.tasks:
            given = copy.deepcopy(task)
            processor.parse(given)
            assert given == task

    def test_tasks_under_way_at_the_same_time_do_not_meet(self, client: FakeEngineClient) -> None:
        """One instance serves all calls: what belongs to a call is in its requests."""
        processor = self.create_processor(self.make_context(client))
        alone = []
        for task in self.tasks:
            requests = processor.parse(task)
            alone.append(processor.finish(requests, outputs_of(client, requests)))
        assert alone[0] != alone[1], "the first two tasks must have different results; change 'tasks'"
        parsed = [processor.parse(task) for task in self.tasks]
        outputs = [outputs_of(client, requests) for requests in parsed]
        for index in reversed(range(len(parsed))):
            result = processor.finish(parsed[index], outputs[index])
            assert result == alone[index], "the result depends on the tasks that ran at the same time"

    def test_a_second_instance_knows_nothing_of_the_first(self, client: FakeEngineClient) -> None:
        """R12.13: a restarted server answers alike."""
        for task in self.tasks:
            first, second = (self.create_processor(self.make_context(client)) for _ in range(2))
            requests = first.parse(task)
            assert second.parse(task) is not requests
            outputs = outputs_of(client, requests)
            assert second.finish(requests, outputs) == first.finish(requests, outputs)

    def test_every_answer_of_the_model_is_taken(self, client: FakeEngineClient) -> None:
        """A model may say anything: the result is JSON, or the client is told why not."""
        for reply in REPLIES:
            client.reply = reply
            for task in self.tasks:
                try:
                    result = asyncio.run(client.process(task))
                except InvalidRequestError as error:
                    check_refusal(error)
                else:
                    json.dumps(result, allow_nan=False)

    def test_odd_data_is_refused_or_taken(self, processor: IOProcessor) -> None:
        """R12.43: never a failure of the server, and nothing about its inside."""
        for data in odd_tasks(self.tasks):
            try:
                requests = processor.parse(data)
            except InvalidRequestError as error:
                check_refusal(error, below=500)
            else:
                assert all(isinstance(request, IORequest) for request in requests)

    def test_odd_data_that_is_taken_can_be_answered(self, client: FakeEngineClient) -> None:
        for data in odd_tasks(self.tasks):
            try:
                json.dumps(asyncio.run(client.process(data)), allow_nan=False)
            except InvalidRequestError as error:
                check_refusal(error)
        assert client.num_running == 0

    def test_something_is_refused(self, processor: IOProcessor) -> None:
        """A processor that takes everything has a client guess what its task was."""
        refused = 0
        for data in ODD_TASKS:
            try:
                processor.parse(data)
            except InvalidRequestError:
                refused += 1
        assert refused, "none of many odd values was refused"


def outputs_of(client: FakeEngineClient, requests: Sequence[IORequest]) -> list[RequestOutput]:
    """The finished output of each."""

    async def last(request: IORequest) -> RequestOutput:
        params = msgspec.structs.replace(request.params, output_kind=OutputKind.FINAL_ONLY)
        return [output async for output in client.generate(request.prompt, params)][-1]

    async def everything() -> list[RequestOutput]:
        return [await last(request) for request in requests]

    return asyncio.run(everything())


def odd_tasks(tasks: Sequence[Any]) -> Iterator[Any]:
    """What no client should send: anything at all, and valid tasks with one field missing, odd or unknown."""
    yield from ODD_TASKS
    for task in tasks:
        if isinstance(task, Mapping):
            yield {**task, "no-such-field": 1}
            for field in task:
                yield {name: value for name, value in task.items() if name != field}
                yield from ({**task, field: value} for value in ODD_TASKS)
        elif isinstance(task, list):
            yield from ([*task, value] for value in ODD_TASKS)


def check_refusal(error: InvalidRequestError, below: int = 600) -> None:
    """A text that a client may read, and the status of an error that is somebody's fault."""
    text = str(error)
    assert text.strip(), "a refusal without a word"
    assert len(text) < 2_000, "a refusal repeats what was sent"
    assert not LEAKS.search(text), f"a refusal shows the inside: {text[:200]!r}"
    assert 400 <= error.status < below, f"this error is answered with {error.status}"
