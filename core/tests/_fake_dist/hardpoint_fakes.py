"""A distribution of fakes: with this folder on the search path, the core alone runs an engine, in one process or two.

The "model" is configured by its name's settings in ``ModelInfo.config``: ``step_delay_s`` slows each step,
``load_delay_s``, ``load_error`` and ``load_kill`` concern loading, ``step_error_at`` makes that step fail,
``crash_at`` kills the process in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

from pydantic import BaseModel

from hardpoint.errors import HardpointError, InvalidRequestError, ModelFormatError, WorkerError
from hardpoint.interfaces import (
    ChatRenderer,
    ChatRendererContext,
    DeviceDescription,
    EngineSettings,
    ExecutorContext,
    FullAttentionSpec,
    IOProcessor,
    IOProcessorContext,
    IORequest,
    KVCacheConfig,
    KVCacheGroup,
    KVLayout,
    KVPlanRequest,
    KVSpecRegistration,
    ModelArtifact,
    ModelInfo,
    ModelSource,
    Platform,
    PluginContext,
    SchedulerContext,
    StatLogger,
    ThreadPlan,
    TokenizerProvider,
    WeightLoader,
    WeightTensor,
    WorkerContext,
    plugin,
    spec_to_wire,
)
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import ModelRouter, Prompt, RequestOutput
from hardpoint.interfaces.kv_cache import BlockHash
from hardpoint.interfaces.kv_events import BlocksRemoved, KVEvent
from hardpoint.interfaces.platform import LogicalDevice
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus
from hardpoint.interfaces.request import EngineOutput, OutputKind, SamplingParams
from hardpoint.interfaces.stat_logger import RequestFinished, StepObserved, TokensEmitted
from hardpoint.interfaces.step import Deferred, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.testing import FakeChatRenderer, FakeExecutor, FakeScheduler, FakeTokenizer, FakeWorker

BLOCK_SIZE = 4
FIRST_TOKEN = 3 + 32
VOCAB_SIZE = 3 + 127
"""Sampled ids are printable ASCII in the fake tokenizer."""


class FakePlatform(Platform):
    name = "fake"

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        return DeviceDescription(device_type="cpu", name="fake")

    def check_and_update(self, settings: EngineSettings) -> None:
        settings.worker = settings.worker or "fake"
        settings.executor = settings.executor or "fake"
        settings.block_size = settings.block_size or BLOCK_SIZE

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        return ThreadPlan(compute_threads=1)

    def attention_candidates(self) -> Sequence[str]:
        return ()

    def memory_budget(self, device: LogicalDevice) -> int:
        return 1 << 30

    def memory_used(self, device: LogicalDevice) -> int:
        return 0

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> Any:
        return None


class ScriptedWorker(FakeWorker):
    """The fake worker with the faults its model's configuration asks for."""

    def __init__(self, script: Mapping[str, Any]) -> None:
        super().__init__(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, first_token=FIRST_TOKEN)
        self.script = script

    def load_model(self) -> None:
        time.sleep(self.script.get("load_delay_s", 0.0))
        if self.script.get("load_kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "load_error" in self.script:
            raise ModelFormatError(self.script["load_error"])

    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred:
        time.sleep(self.script.get("step_delay_s", 0.0))
        if step.step_id == self.script.get("step_error_at"):
            raise WorkerError("the device fell off", rank=0)
        if step.step_id == self.script.get("crash_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(step)


class FakeLayout(KVLayout):
    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        spec = next(iter(request.specs.values()))
        group = KVCacheGroup(tuple(request.specs), spec_to_wire(spec))
        return KVCacheConfig(num_blocks=request.num_blocks or 256, groups=(group,), tensors=())


class FakeHash:
    name = "sha256"
    cryptographic = True

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        return BlockHash(sha256(parent + token_bytes + extra_keys).digest())


class FakeTokenizerProvider(TokenizerProvider):
    def accepts(self, artifact: ModelArtifact) -> bool:
        return artifact.source == "fake"

    def load(self, artifact: ModelArtifact) -> Tokenizer:
        return FakeTokenizer()


class FakeSource(ModelSource):
    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        return ModelArtifact(name=name, root="/", files=(), source="fake") if name == "fake" else None

    def known_names(self) -> Sequence[str]:
        return ("fake",)


class ScriptOptions(BaseModel):
    """``script`` becomes the model's configuration (see the top of this file)."""

    script: dict[str, Any] = {}


class FakeLoader(WeightLoader):
    def __init__(self, script: dict[str, Any] | None = None) -> None:
        self.script = script or {}

    def accepts(self, artifact: ModelArtifact) -> bool:
        return artifact.source == "fake"

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        return ModelInfo(
            artifact=artifact,
            architecture="Fake",
            config=self.script,
            max_position=256,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            loader="fake",
        )

    def num_bytes(self, info: ModelInfo) -> int:
        return 0

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        return iter(())


class FakeStatLogger(StatLogger):
    """Collects what it is told."""

    def __init__(self) -> None:
        self.steps: list[StepObserved] = []
        self.finished: list[RequestFinished] = []
        self.tokens: list[TokensEmitted] = []

    def on_step(self, event: StepObserved) -> None:
        self.steps.append(event)

    def on_tokens(self, event: TokensEmitted) -> None:
        self.tokens.append(event)

    def on_finished(self, event: RequestFinished) -> None:
        self.finished.append(event)

    def flush(self) -> None:
        """Nothing is buffered."""


@plugin("platform", probe=lambda: ProbeResult(ProbeStatus.AVAILABLE, "a fake is always there"))
def create_platform(ctx: PluginContext, options: Any) -> Platform:
    return FakePlatform()


@plugin("executor")
def create_executor(ctx: ExecutorContext, options: Any) -> FakeExecutor:
    if ctx.plugins is None:
        raise ValueError("the executor needs plugin access to create its worker")
    base = ctx.plugins.context("worker", ctx.worker)
    fields = {name: getattr(base, name) for name in PluginContext.__dataclass_fields__}
    worker = ctx.plugins.create("worker", ctx.worker, WorkerContext(**fields, config=ctx.config))
    return FakeExecutor(worker)


@plugin("worker")
def create_worker(ctx: WorkerContext, options: Any) -> FakeWorker:
    return ScriptedWorker(ctx.config.model.config if ctx.config is not None else {})


class TellingScheduler(FakeScheduler):
    """Caches nothing, but tells of one block per step, its hash the step's number."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.events: list[KVEvent] = []

    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        self.events.append(BlocksRemoved(block_hashes=[BlockHash(step.step_id.to_bytes(4, "big"))]))
        return super().update(step, output)

    def take_events(self) -> list[KVEvent]:
        events, self.events = self.events, []
        return events


@plugin("scheduler")
def create_scheduler(ctx: SchedulerContext, options: Any) -> FakeScheduler:
    made = TellingScheduler if ctx.limits.kv_events else FakeScheduler
    return made(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=BLOCK_SIZE)


@plugin("kv_layout")
def create_layout(ctx: PluginContext, options: Any) -> KVLayout:
    return FakeLayout()


@plugin("kv_cache_spec")
def create_kv_spec(ctx: PluginContext, options: Any) -> KVSpecRegistration:
    return KVSpecRegistration(FullAttentionSpec, cast("Callable[[Any, int, Any], Any]", object))


@plugin("hash")
def create_hash(ctx: PluginContext, options: Any) -> FakeHash:
    return FakeHash()


@plugin("tokenizer")
def create_tokenizer(ctx: PluginContext, options: Any) -> TokenizerProvider:
    return FakeTokenizerProvider()


@plugin("model_source")
def create_source(ctx: PluginContext, options: Any) -> ModelSource:
    return FakeSource()


@plugin("weight_loader", options=ScriptOptions)
def create_loader(ctx: PluginContext, options: ScriptOptions) -> WeightLoader:
    return FakeLoader(options.script)


class FakeProcessor(IOProcessor):
    """``{"words": [...], "max_tokens": 4}`` becomes ``{"model": ..., "answers": {word: token ids}}``."""

    def __init__(self, ctx: IOProcessorContext) -> None:
        self.ctx = ctx

    def parse(self, data: Any) -> Sequence[IORequest]:
        if not isinstance(data, dict) or not isinstance(data.get("words"), list):
            raise InvalidRequestError("'data' must hold 'words', a list of texts", param="data.words")
        params = SamplingParams(temperature=0.0, max_tokens=data.get("max_tokens", 4), ignore_eos=True)
        return [IORequest(Prompt(text=word), params, state=word) for word in data["words"]]

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        rows = zip(requests, outputs, strict=True)
        answers = {request.state: list(output.outputs[0].token_ids) for request, output in rows}
        return {"model": self.ctx.model_name, "answers": answers}


@plugin("chat_renderer")
def create_chat_renderer(ctx: ChatRendererContext, options: Any) -> ChatRenderer:
    if ctx.template == "broken":
        raise ModelFormatError("the chat template cannot be compiled")
    renderer = FakeChatRenderer(ctx.tokenizer)
    renderer.ctx = ctx  # type: ignore[attr-defined]
    return renderer


@plugin("io_processor")
def create_io_processor(ctx: IOProcessorContext, options: Any) -> IOProcessor:
    return FakeProcessor(ctx)


@plugin("stat_logger")
def create_stat_logger(ctx: PluginContext, options: Any) -> StatLogger:
    return FakeStatLogger()


class FakeEndpoint(Endpoint):
    """``POST /generate/{num_tokens}``: one JSON line per output, the last one with the reason or the error."""

    def __init__(self, router: ModelRouter) -> None:
        self.router = router

    def routes(self) -> Any:
        from fastapi import APIRouter
        from fastapi.responses import StreamingResponse

        router = APIRouter()

        @router.post("/generate/{num_tokens}", response_class=StreamingResponse)
        async def generate(num_tokens: int) -> StreamingResponse:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=OutputKind.DELTA)
            outputs = self.router.resolve(None).generate(Prompt(text="hello"), params)
            first = await anext(outputs)
            return StreamingResponse(self.lines(first, outputs))

        return router

    async def lines(self, first: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncIterator[str]:
        async with contextlib.aclosing(outputs):
            yield line(first)
            try:
                async for output in outputs:
                    yield line(output)
            except HardpointError as error:
                yield json.dumps({"error": type(error).__name__}) + "\n"


def line(output: RequestOutput) -> str:
    sequence = output.outputs[0]
    return json.dumps({"text": sequence.text, "reason": sequence.finish_reason}) + "\n"


@plugin("endpoint")
def create_endpoint(ctx: EndpointContext, options: Any) -> Endpoint:
    assert ctx.router is not None
    return FakeEndpoint(ctx.router)
