"""A distribution of fakes: with this folder on the search path, the core alone runs an engine, in one process or two.

The "model" is configured by its name's settings in ``ModelInfo.config``: ``step_delay_s`` slows each step,
``load_delay_s``, ``load_error`` and ``load_kill`` concern loading, ``step_error_at`` makes that step fail,
``crash_at`` kills the process in it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

from hardpoint.errors import ModelFormatError, WorkerError
from hardpoint.interfaces import (
    DeviceDescription,
    EngineSettings,
    ExecutorContext,
    FullAttentionSpec,
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
from hardpoint.interfaces.kv_cache import BlockHash
from hardpoint.interfaces.platform import LogicalDevice
from hardpoint.interfaces.stat_logger import RequestFinished, StepObserved, TokensEmitted
from hardpoint.interfaces.step import Deferred, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.testing import FakeExecutor, FakeScheduler, FakeTokenizer, FakeWorker

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


class FakeLoader(WeightLoader):
    def accepts(self, artifact: ModelArtifact) -> bool:
        return artifact.source == "fake"

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        return ModelInfo(
            artifact=artifact,
            architecture="Fake",
            config={},
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


@plugin("platform")
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


@plugin("scheduler")
def create_scheduler(ctx: SchedulerContext, options: Any) -> FakeScheduler:
    return FakeScheduler(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=BLOCK_SIZE)


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


@plugin("weight_loader")
def create_loader(ctx: PluginContext, options: Any) -> WeightLoader:
    return FakeLoader()


@plugin("stat_logger")
def create_stat_logger(ctx: PluginContext, options: Any) -> StatLogger:
    return FakeStatLogger()
