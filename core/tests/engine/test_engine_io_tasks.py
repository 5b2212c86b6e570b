"""Tasks of IO processors, offline and over an engine process; which processor a model gets (R12.43 to R12.47)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.build import build_engine
from hardpoint.engine.frontend import Frontend
from hardpoint.engine.io_tasks import process_task, start_task
from hardpoint.engine.llm import LLM
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import EngineDeadError, InvalidRequestError, PluginNotFoundError
from hardpoint.interfaces import IOProcessor, IORequest, ModelLimits, Prompt, RequestOutput, SamplingParams
from hardpoint.launch import Launch, prepare
from hardpoint.plugins.plan import SelectedBy
from hardpoint.plugins.report import PluginState
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeEngineClient, next_token

LIMITS = ModelLimits(vocab_size=259, max_model_len=512, max_prompts=4)
FAKE_PARTS: Mapping[str, Any] = {
    "platform": "fake",
    "executor": "fake",
    "scheduler": "fake",
    "kv_layout": "fake",
    "loader": "fake",
    "chat_renderer": "fake",
}
PINS = tuple(f"{name}=hardpoint-fakes" for name in ("hash:sha256", "kv_cache_spec:full_attention"))


class Echo(IOProcessor):
    """A list of texts; the result is the list of answers, each with its own state."""

    def __init__(self, params: SamplingParams | None = None) -> None:
        self.params = params or SamplingParams(max_tokens=5)

    def parse(self, data: Any) -> Sequence[IORequest]:
        return [IORequest(Prompt(text=text), self.params, state=number) for number, text in enumerate(data)]

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        rows = zip(requests, outputs, strict=True)
        return [(request.state, output.prompt, output.outputs[0].text) for request, output in rows]


def expected(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 130, 35))
    return tokens[len(prompt) :]


def launch(script: dict[str, Any] | None = None, **settings: Any) -> Launch:
    """Through the launcher, from settings to a spec."""
    config = AppConfig.model_validate(
        {
            "engines": {"fake": EngineConfig.sections("fake", **FAKE_PARTS, **settings)},
            "plugins": {"weight_loader": {"fake": {"script": script or {}}}},
            "plugin_policy": {"pins": PINS},
        }
    )
    roles = frozenset({ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER})
    return prepare(config, "fake", environ={}, roles=roles)


def test_neither_argument_nor_model_names_one_so_none_is_loaded() -> None:
    """R12.44, R12.45."""
    started = launch()
    assert Frontend.from_spec(started.spec, started.runtime).io_processor is None
    (status,) = [row for row in started.runtime.report().plugins if (row.kind, row.name) == ("io_processor", "fake")]
    assert status.state is PluginState.ALLOWED, "nobody asked for it, so nothing was imported"


def asked_for(name: str) -> Any:
    """In both ways."""
    ways = [({}, {"io_processor": name}), ({"io_processor_plugin": name}, {})]
    return pytest.mark.parametrize(("script", "settings"), ways, ids=["flag", "model"])


@asked_for("fake")
def test_the_argument_or_else_the_model_names_it(script: dict[str, Any], settings: dict[str, Any]) -> None:
    """R12.44, R12.47: created once, with what the model is."""
    started = launch(script, **settings)
    planned = started.runtime.plan.find("io_processor", "fake")
    assert planned.active
    frontend = Frontend.from_spec(started.spec, started.runtime)
    made: Any = frontend.io_processor
    assert made.ctx.model is started.spec.model
    assert (made.ctx.model_name, made.ctx.limits) == ("fake", started.spec.model_limits)
    assert made.ctx.tokenizer is frontend.tokenizer
    assert made.ctx.roles >= {ProcessRole.API}


def test_the_argument_wins_over_the_model() -> None:
    """R12.44: the model's own wish, which nobody installed, is not even looked for."""
    started = launch({"io_processor_plugin": "of-somebody"}, io_processor="fake")
    assert started.runtime.plan.selected("io_processor").name == "fake"


@asked_for("fak")
def test_a_missing_one_lists_those_available(script: dict[str, Any], settings: dict[str, Any]) -> None:
    """R12.46."""
    with pytest.raises(PluginNotFoundError, match="no io_processor plugin 'fak'.*did you mean 'fake'.*installed: fake"):
        launch(script, **settings)


def test_one_is_required_but_none_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """R12.46."""
    from hardpoint.plugins.discovery import discover
    from hardpoint.plugins.resolve import build_plan
    from hardpoint.plugins.selection import PluginSelection

    with pytest.raises(PluginNotFoundError, match="installed: none, but one is required"):
        build_plan(discover([str(tmp_path)]), PluginSelection(choices={"io_processor": "fake"}))


def test_a_field_of_another_type_is_an_error_like_a_wrong_name() -> None:
    with pytest.raises(PluginNotFoundError, match="no io_processor plugin"):
        launch({"io_processor_plugin": ["fake"]})


def with_processor(spec: EngineSpec, runtime: PluginRuntime) -> tuple[EngineSpec, PluginRuntime]:
    runtime.plan = runtime.plan.choose("io_processor", "fake", SelectedBy.NAMED, "the test's wish")
    return msgspec.structs.replace(spec, plan=runtime.plan.to_bytes()), runtime


def test_a_task_runs_offline(make_spec: Callable[..., Any], make_runtime: Callable[..., Any]) -> None:
    spec, runtime = with_processor(make_spec(), make_runtime())
    with LLM.from_parts(build_engine(spec, runtime), Frontend.from_spec(spec, runtime)) as llm:
        answer = llm.process({"words": ["hello", "you"], "max_tokens": 3})
        ids = {word: expected(llm.tokenizer.encode(word), 3) for word in ("hello", "you")}
        assert answer == {"model": "fake", "answers": ids}
        with pytest.raises(InvalidRequestError, match="'words', a list of texts") as refused:
            llm.process("hello")
        assert refused.value.status == 400
        assert llm.process({"words": ["again"], "max_tokens": 1})["answers"]["again"]


def test_without_a_processor_a_task_is_refused(make_spec: Callable[..., Any], make_runtime: Callable[..., Any]) -> None:
    spec, runtime = make_spec(), make_runtime()
    with LLM.from_parts(build_engine(spec, runtime), Frontend.from_spec(spec, runtime)) as llm:
        with pytest.raises(InvalidRequestError, match="no IO processor; .*--io-processor") as refused:
            llm.process(1)
        assert refused.value.code == "no_io_processor"


async def test_tasks_run_over_an_engine_process(
    make_spec: Callable[..., Any], make_runtime: Callable[..., Any]
) -> None:
    llm = await AsyncLLM.start(*with_processor(make_spec(), make_runtime(ProcessRole.API)))
    async with llm:
        tasks = [llm.process({"words": [f"w{n}", "x"], "max_tokens": 6}) for n in range(5)]
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            word = f"w{number}"
            assert answer["answers"][word] == expected(llm.tokenizer.encode(word), 6)
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            await llm.process({"words": ["a", "b"], "max_tokens": 10_000})
        assert llm.num_unfinished == 0


async def test_outputs_come_back_in_the_order_of_the_requests() -> None:
    client = FakeEngineClient(reply="Hello", io_processor=Echo())
    assert await client.process(["a", "b"]) == [(0, "a", "Hello"), (1, "b", "Hello")]


async def running(client: FakeEngineClient, count: int) -> None:
    for _ in range(2_000):
        if client.num_running == count:
            return
        await asyncio.sleep(0.001)
    raise TimeoutError(f"{client.num_running} of {count} requests run")


async def test_cancelling_aborts_every_prompt() -> None:
    client = FakeEngineClient(io_processor=Echo())
    client.hold.clear()
    task = asyncio.create_task(client.process(["a", "b", "c"]))
    await running(client, 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (client.num_running, client.num_aborted) == (0, 3)


async def test_the_first_failure_aborts_the_others_and_is_raised_plainly() -> None:
    client = FakeEngineClient(io_processor=Echo())
    client.hold.clear()
    task = asyncio.create_task(client.process(["a", "b"]))
    await running(client, 2)
    client.die()
    with pytest.raises(EngineDeadError):
        await task
    assert client.num_running == 0


async def test_a_request_that_failed_in_the_engine_fails_the_task() -> None:
    """The processor never sees half an answer."""
    client = FakeEngineClient(io_processor=Echo())
    client.fail_after = 2
    with pytest.raises(InvalidRequestError, match="not finite") as failed:
        await client.process(["a"])
    assert (failed.value.status, failed.value.code) == (500, "request_failed")


async def test_the_processor_does_not_hold_up_the_event_loop() -> None:
    import threading

    class Slow(Echo):
        def parse(self, data: Any) -> Sequence[IORequest]:
            threads.append(threading.current_thread())
            return super().parse(data)

        def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
            threads.append(threading.current_thread())
            return super().finish(requests, outputs)

    threads: list[threading.Thread] = []
    await process_task(FakeEngineClient(), Slow(), ["a"])
    assert len(threads) == 2
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("texts", [[], ["x"] * 5])
def test_the_number_of_prompts_is_bounded(texts: list[str]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        start_task(Echo(), texts, LIMITS)


def test_the_number_of_sequences_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="sequences|n "):
        start_task(Echo(SamplingParams(n=100)), ["a", "b"], LIMITS)
