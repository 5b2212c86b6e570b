"""The asynchronous front end of one engine process: what servers and asyncio programs hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from hardpoint.engine.frontend import Frontend, ModelFront
from hardpoint.engine.input_processor import task_of
from hardpoint.engine.io_tasks import embedding_of, last_output, process_task
from hardpoint.engine.process_client import ProcessClient
from hardpoint.engine.spec import EngineSpec
from hardpoint.engine.stats import StatFanout
from hardpoint.engine.validation import validate_batch
from hardpoint.errors import ConfigError, EngineDeadError, EngineNotReadyError, InvalidRequestError, OverloadedError
from hardpoint.interfaces.engine import EmbeddingOutput, Prompt, RequestOptions, RequestOutput
from hardpoint.interfaces.kv_events import KVEventBatch
from hardpoint.interfaces.request import EngineOutputs, Int32Array, PoolingParams, SamplingParams, SchedulerStats
from hardpoint.launch import launch_model
from hardpoint.plugins.report import LoadReport
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.process import announce_stop, starting
from hardpoint.roles import ProcessRole

_logger = logging.getLogger("hardpoint.engine")
OFF_LOOP_CHARS = 4096
"""Texts longer than this are tokenized on a thread, so that other streams go on."""


class AsyncLLM(ModelFront, contextlib.AbstractAsyncContextManager["AsyncLLM"]):
    """Implements ``EngineClient`` on one event loop; owns ``client``, the engine process.

    Made by :meth:`create` from a model's name, by :meth:`start` from a spec, or from its parts. ``limit``
    sequences are admitted at a time (None: no limit).
    """

    def __init__(
        self, client: ProcessClient, frontend: Frontend, *, limit: int | None = None, stats: StatFanout | None = None
    ) -> None:
        self.client = client
        self.stats_fanout = stats or StatFanout({})
        self.stat_loggers = self.stats_fanout.loggers
        super().__init__(frontend, limit, self.stats_fanout.observe)
        self._latest: SchedulerStats | None = None
        self._sends_kv_events = False
        self._kv_event_sinks: list[Callable[[KVEventBatch], None]] = []
        self._on_stop: Callable[[], None] = lambda: None
        self._is_draining = False
        self._changed = asyncio.Event()
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._flusher = asyncio.get_running_loop().create_task(self.stats_fanout.run(), name="stat-loggers")
        client.on_outputs = self._on_outputs
        client.on_dead = self._on_dead

    @classmethod
    async def create(cls, model: str, **settings: Any) -> AsyncLLM:
        """Start the engine of ``model``; ``settings`` are the command line's in their Python spelling."""
        launch = await asyncio.to_thread(launch_model, model, settings, frozenset({ProcessRole.API}))
        return await cls.start(launch.spec, launch.runtime)

    @classmethod
    async def start(cls, spec: EngineSpec, runtime: PluginRuntime) -> AsyncLLM:
        """Load the tokenizer here and the model in a new engine process. Raises whatever stops the start."""
        with starting(runtime):
            # A large vocabulary takes a second to read; probes and signals are answered meanwhile.
            frontend = await asyncio.to_thread(Frontend.from_spec, spec, runtime)
            loggers = runtime.create_all("stat_logger")
            stats = StatFanout(loggers, lambda name, error: runtime.quarantine("stat_logger", name, error))
            _logger.info("%s", runtime.report().summary())
            client = await ProcessClient.launch(spec)
        llm = cls(client, frontend, limit=spec.max_unfinished, stats=stats)
        llm._on_stop = partial(announce_stop, runtime)
        llm._sends_kv_events = spec.limits.kv_events
        return llm

    @property
    def tasks(self) -> tuple[str, ...]:
        return self._frontend.tasks if self.client.tasks is None else self.client.tasks

    @property
    def is_ready(self) -> bool:
        return self.client.is_ready and not self._is_draining

    @property
    def is_alive(self) -> bool:
        return self.client.is_alive

    @property
    def dead_reason(self) -> str | None:
        if self.client.dead_reason is None and not self.client.is_alive:
            return f"the step loop has not advanced for {self.client.silence_s:.0f} s"
        return self.client.dead_reason

    @property
    def num_unfinished(self) -> int:
        """Sequences without a terminal event."""
        return self._outputs.num_sequences

    def stats(self) -> SchedulerStats | None:
        return self._latest

    async def refresh_stats(self) -> SchedulerStats:
        """Statistics from the engine now, also while it is idle. Raises ``EngineDeadError``."""
        self._latest = SchedulerStats(**await self.client.utility("stats"))
        return self._latest

    async def load_reports(self) -> tuple[LoadReport, ...]:
        return msgspec.convert(await self.client.utility("load_reports"), tuple[LoadReport, ...])

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.client.utility("reset_prefix_cache"))

    def check_batch(self, num_prompts: int, n: int) -> None:
        validate_batch(num_prompts, n, self.limits)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, options: RequestOptions | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, merged while the reader is busy. Closing or cancelling aborts in the engine."""
        self._admit(1)
        token_ids = await self._tokenize(prompt, task_of(params))
        processed = self._frontend.inputs.process(prompt, params, options, token_ids)
        self._admit(len(processed.requests))
        news = asyncio.Event()
        # Known here first: whatever fails from now on, the end of this generator tells the engine to forget it.
        state = self._outputs.add(processed, news.set)
        try:
            self.client.add(processed.requests)
            while True:
                output = state.take()
                if output is not None:
                    yield output
                if state.finished and (output is None or output.finished):
                    return
                if output is None:
                    await news.wait()
                    news.clear()
        finally:
            if not state.finished:
                self._abort(processed.request_id)

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, options: RequestOptions | None = None
    ) -> EmbeddingOutput:
        return embedding_of(await last_output(self.generate(prompt, params or PoolingParams(), options)))

    async def process(self, data: Any, options: RequestOptions | None = None) -> Any:
        return await process_task(self, self._frontend.io_processor, data, options)

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones. False when ``timeout_s`` passed first."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._outputs.num_sequences:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def shutdown(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        """End the engine process; requests that outlast ``timeout_s`` end with an error. Idempotent."""
        self._is_draining = True
        drained = drain and await self.drain(timeout_s)
        await self.client.shutdown(drain=drained, timeout_s=timeout_s)
        self._flusher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._flusher
        self.stats_fanout.flush()
        self._tokenizing.shutdown(wait=False)
        self._on_stop()

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown(drain=exception[0] is None)

    def _admit(self, num_sequences: int) -> None:
        if self.client.dead_reason is not None:
            raise EngineDeadError(self.client.dead_reason)
        if self._is_draining:
            raise EngineNotReadyError("the server is shutting down and takes no new requests")
        limit = self._max_unfinished
        if limit is not None and num_sequences > limit:
            raise InvalidRequestError(f"n is {num_sequences}; this server takes {limit} sequences at a time", param="n")
        if limit is not None and self._outputs.num_sequences + num_sequences > limit:
            raise OverloadedError(
                f"{self._outputs.num_sequences} sequences are running or waiting, at most {limit} are taken; "
                "try again later, or raise --max-waiting"
            )

    async def _tokenize(self, prompt: Prompt, task: str) -> Int32Array:
        text = getattr(prompt, "text", None)
        if not isinstance(text, str) or len(text) <= OFF_LOOP_CHARS:
            return self._frontend.inputs.tokenize(prompt, task)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, self._frontend.inputs.tokenize, prompt, task)

    def _abort(self, request_id: str) -> None:
        self.client.abort(self._outputs.abort(request_id))
        self._changed.set()

    def on_kv_events(self, sink: Callable[[KVEventBatch], None]) -> None:
        if not self._sends_kv_events:
            raise ConfigError("the engine tells no KV cache events: set --kv-events (cache.kv_events)")
        self._kv_event_sinks.append(sink)

    def _on_outputs(self, batch: EngineOutputs) -> None:
        self._latest = batch.stats or self._latest
        self.client.abort(self._outputs.process(batch))
        self._changed.set()
        if batch.kv_events is not None:
            for sink in self._kv_event_sinks:
                sink(batch.kv_events)

    def _on_dead(self, reason: str) -> None:
        failure = EngineNotReadyError if self._is_draining else EngineDeadError
        self._outputs.fail_all(lambda: failure(reason))
        self._changed.set()
