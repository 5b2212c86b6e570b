"""An ``EngineClient`` without an engine: real validation, then a scripted reply, one byte token per step."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardpoint.engine.input_processor import InputProcessor, ProcessedRequest
from hardpoint.engine.io_tasks import process_task
from hardpoint.engine.validation import validate_batch
from hardpoint.errors import EngineDeadError, EngineNotReadyError, OverloadedError
from hardpoint.interfaces.engine import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    ModelLimits,
    PositionLogprobs,
    Prompt,
    RequestOptions,
    RequestOutput,
)
from hardpoint.interfaces.io_processor import IOProcessor
from hardpoint.interfaces.kv_events import KVEventBatch
from hardpoint.interfaces.request import FinishReason, OutputKind, PoolingParams, SamplingParams, SchedulerStats
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.plugins.report import LoadReport
from hardpoint.rendering import plain_copy, plain_messages
from hardpoint.testing.fake_chat_renderer import FakeChatRenderer
from hardpoint.testing.fake_tokenizer import FakeTokenizer

__all__ = ["FakeEngineClient", "fake_embedding"]


def fake_embedding(token_ids: Sequence[int], size: int) -> np.ndarray:
    """float32 ``[size]`` of length 1 that differs for other ids."""
    values = np.cos(np.arange(1, size + 1) * (1.0 + float(np.dot(token_ids, np.arange(1, len(token_ids) + 1)))))
    length = float(np.linalg.norm(values))
    return np.asarray(values / length, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Reply:
    """What one sequence will say. ``text`` is cut at a stop string or at the token limit."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    stop_reason: str | None = None


class FakeEngineClient:
    """Every sequence answers ``reply``; with ``ignore_eos`` it is repeated up to the token limit.

    ``step_s`` is the pause before each token. ``queue_limit`` is the number of requests that may run before
    ``OverloadedError``. ``tasks`` are what it serves. ``hold`` (an event) keeps generations waiting before their second
    token, and embeddings before their end, while it is cleared.
    """

    def __init__(
        self,
        *,
        model_name: str = "fake",
        reply: str = "Hello, world",
        limits: ModelLimits | None = None,
        step_s: float = 0.0,
        queue_limit: int | None = None,
        io_processor: IOProcessor | None = None,
        tasks: tuple[str, ...] = ("generate",),
    ) -> None:
        self.model_name = model_name
        self.reply = reply
        self.limits = limits or ModelLimits(vocab_size=259, max_model_len=512, embedding_size=8)
        self.tokenizer: Tokenizer = FakeTokenizer()
        self.tasks = tasks
        self.step_s = step_s
        self.queue_limit = queue_limit
        self.io_processor = io_processor
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_running = 0
        self.num_aborted = 0
        self.seen: list[tuple[Prompt, Any, RequestOptions | None]] = []
        self.reports: tuple[LoadReport, ...] = (LoadReport("process 1 (engine)", 1, ("engine",), None, "0.0", ()),)
        self.fail_after: int | None = None
        self.is_ready = True
        self.dead_reason: str | None = None
        self._kv_event_sinks: list[Callable[[KVEventBatch], None]] = []
        self._renderer = FakeChatRenderer(self.tokenizer)
        self._inputs = InputProcessor(self.tokenizer, self.limits, eos_token_ids=(2,), tasks=tasks)

    @property
    def is_alive(self) -> bool:
        return self.dead_reason is None

    def die(self, reason: str = "the engine process was killed") -> None:
        """From the next token on every generation raises ``EngineDeadError``."""
        self.dead_reason = reason
        self.is_ready = False
        self.hold.set()

    def stats(self) -> SchedulerStats | None:
        return SchedulerStats(num_running=self.num_running, num_free_blocks=90, num_total_blocks=100)

    def on_kv_events(self, sink: Callable[[KVEventBatch], None]) -> None:
        self._kv_event_sinks.append(sink)

    def emit(self, batch: KVEventBatch) -> None:
        """As if the engine had sent ``batch``."""
        for sink in self._kv_event_sinks:
            sink(batch)

    async def reset_prefix_cache(self) -> bool:
        self._require_life()
        return self.num_running == 0

    async def load_reports(self) -> Sequence[LoadReport]:
        self._require_life()
        return self.reports

    def check_batch(self, num_prompts: int, n: int) -> None:
        validate_batch(num_prompts, n, self.limits)

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, options: RequestOptions | None = None
    ) -> EmbeddingOutput:
        """:func:`fake_embedding` of the prompt's ids; waits for ``hold`` like a generation."""
        self._admit()
        params = params or PoolingParams()
        self.seen.append((prompt, params, options))
        (request,) = self._inputs.process(prompt, params, options).requests
        self.num_running += 1
        try:
            await self.hold.wait()
            self._require_life()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
        ids = request.prompt_token_ids.tolist()
        size = min(params.dimensions or self.limits.embedding_size or 8, 4096)
        return EmbeddingOutput(uuid.uuid4().hex, tuple(ids), fake_embedding(ids, size))

    async def process(self, data: Any, options: RequestOptions | None = None) -> Any:
        return await process_task(self, self.io_processor, data, options)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: dict[str, Any] | None = None,
    ) -> Prompt:
        text, _ = self._renderer.render(
            plain_messages(messages),
            add_generation_prompt=add_generation_prompt,
            template_arguments=plain_copy(template_arguments or {}),
        )
        return Prompt(text=text)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self._admit()
        request = self._inputs.process(prompt, params, options)
        self.seen.append((prompt, request.params, options))
        self.num_running += 1
        finished = False
        try:
            async for output in self._steps(request):
                finished = output.finished
                yield output
        finally:
            self.num_running -= 1
            self.num_aborted += not finished

    def _require_life(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    def _admit(self) -> None:
        self._require_life()
        if not self.is_ready:
            raise EngineNotReadyError("the engine is starting")
        if self.queue_limit is not None and self.num_running >= self.queue_limit:
            raise OverloadedError(f"{self.num_running} requests are queued; at most {self.queue_limit} may be")

    async def _steps(self, request: ProcessedRequest) -> AsyncGenerator[RequestOutput, None]:
        reply = self._script(request.params)
        sent = 0
        for position in range(len(reply.token_ids)):
            await asyncio.sleep(self.step_s)
            if position:
                await self.hold.wait()
            if self.dead_reason is not None:
                raise EngineDeadError(self.dead_reason)
            last = position == len(reply.token_ids) - 1
            if self.fail_after is not None and position >= self.fail_after:
                yield self._failed(request)
                return
            if request.params.output_kind is OutputKind.FINAL_ONLY and not last:
                continue
            begin = sent if request.params.output_kind is OutputKind.DELTA else 0
            yield self._output(request, reply, begin, position + 1)
            sent = position + 1

    def _script(self, params: SamplingParams) -> _Reply:
        """Stop strings and limits, without the streaming that the real detokenizer does."""
        limit = params.max_tokens or 1
        ids = self.tokenizer.encode(self.reply, add_special_tokens=False)
        repeated = ids * (limit // len(ids) + 1) if params.ignore_eos else ids
        text = self.tokenizer.decode(repeated[:limit])
        for stop in params.stop:
            before, found, _ = text.partition(stop)
            if found:
                kept = self.tokenizer.encode(before + found, add_special_tokens=False)
                shown = before + found if params.include_stop_str_in_output else before
                return _Reply(tuple(kept), shown, FinishReason.STOP, stop)
        cut = len(repeated) > limit or params.ignore_eos
        return _Reply(tuple(repeated[:limit]), text, FinishReason.LENGTH if cut else FinishReason.STOP)

    def _output(self, request: ProcessedRequest, reply: _Reply, begin: int, end: int) -> RequestOutput:
        last = end == len(reply.token_ids)
        ids = reply.token_ids[begin:end]
        count = request.params.logprobs
        sequence = CompletionOutput(
            index=0,
            text=reply.text[begin:] if last else reply.text[begin:end],
            token_ids=ids,
            logprobs=None if count is None else tuple(self._logprobs(token, count) for token in ids),
            finish_reason=reply.reason if last else None,
            stop_reason=reply.stop_reason if last else None,
            num_generated_tokens=end,
        )
        asked = request.params.prompt_logprobs
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt_text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(replace(sequence, index=index) for index in range(request.params.n)),
            finished=last,
            num_cached_tokens=1,
            prompt_logprobs=None
            if asked is None
            else (None, *(self._logprobs(token, asked) for token in request.prompt_token_ids[1:])),
        )

    def _failed(self, request: ProcessedRequest) -> RequestOutput:
        sequences = tuple(
            CompletionOutput(index=index, text="", token_ids=(), finish_reason=FinishReason.ERROR)
            for index in range(request.params.n)
        )
        return RequestOutput(
            request.request_id,
            request.prompt_text,
            request.prompt_token_ids,
            sequences,
            finished=True,
            error="the logits of this request were not finite",
        )

    def _logprobs(self, token_id: int, count: int) -> PositionLogprobs:
        top = [token_id, *(other for other in range(3, 3 + count) if other != token_id)][:count]
        entries = tuple(self._logprob(token, rank) for rank, token in enumerate(top, 1))
        return PositionLogprobs(self._logprob(token_id, 1), entries)

    def _logprob(self, token_id: int, rank: int) -> Logprob:
        tokenizer = self.tokenizer
        return Logprob(token_id, -0.5 * rank, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), rank)
